"""A Llama-like decoder layer in two functions around its attention, with backward by hand.

Attention is the model's own function, so masks, windows of tokens and rows in one line work as
they do in the model. What is saved is the least from which backward follows with element-wise work
alone. Forward consists of operations that make new tensors, so that it can be recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from windrow_sidecar.finetune.adapter.fused_layer import FusedLayer, Learning
from windrow_sidecar.finetune.adapter.packed_copies import Projection, refresh
from windrow_sidecar.finetune.adapter.packed_linears import Made, PackedLinears
from windrow_sidecar.finetune.model.layer_program import ProgramName


class PackedLayer:
    """Runs one decoder layer of Llama, Mistral, Qwen2 or Qwen3 (see `LayerProgram`).

    Args:
        layer: of transformers; `layer_programs.refused` has found nothing against it.
        projections: by name (q_proj, ...).
        disabled: whether the adapter is switched off now.
        point: called between attention and MLP, forward and backward; it may raise.

    Attributes:
        groups: linear layers of one input each, in the order in which a forward runs them: q, k and
            v; o; gate and up; down.
        anchor: has autograd run both functions where the input needs no gradient; it gets none.
        others: groups of other layers, whose copies are made at the same time.
        head: units of a head.
        fused: runs both functions in fewer launches; None: torch's operators run them.
    """

    name: ProgramName = "packed"

    def __init__(
        self,
        layer: nn.Module,
        projections: dict[str, Projection],
        disabled: Callable[[], bool],
        point: Callable[[], None] | None = None,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._layer, self._disabled, self.point = layer, disabled, point or _go_on
        attention: Any = layer.self_attn
        self._attention, self.head = attention, int(attention.head_dim)
        of = projections
        names = ("q_proj", "k_proj", "v_proj")
        self._heads = [of[name].weight.shape[0] // self.head for name in names]
        self.qkv = self._group("qkv", [of["q_proj"], of["k_proj"], of["v_proj"]])
        self.o = self._group("o", [of["o_proj"]])
        self.gate_up = self._group("gate_up", [of["gate_proj"], of["up_proj"]])
        self.down = self._group("down", [of["down_proj"]])
        self.groups = (self.qkv, self.o, self.gate_up, self.down)
        self.others: tuple[PackedLinears, ...] = ()
        self._learns = tuple(p for group in self.groups for p in group.learns)
        self._weights = tuple(p.weight for group in self.groups for p in group.projections)
        self._seen: tuple[int, ...] = ()
        self.anchor: Tensor | None = self._learns[0] if self._learns else None
        self.before: Any = layer.input_layernorm
        self.between: Any = layer.post_attention_layernorm
        self.head_norms: tuple[Any, Any] | None = (
            (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        )
        module = sys.modules[type(attention).__module__]
        self._attend: Any = module.ALL_ATTENTION_FUNCTIONS
        self._eager: Any = module.eager_attention_forward
        self.fused: FusedLayer | None = None

    def _group(self, name: str, projections: list[Projection]) -> PackedLinears:
        return PackedLinears(name, projections, self.tensors)

    @property
    def products(self) -> int:
        """Products over the base's weights that a forward takes."""
        return sum(group.parts for group in self.groups)

    @property
    def is_adapted(self) -> bool:
        """True where the adapter counts now."""
        return not self._disabled()

    def release(self) -> None:
        """Give the packed copies back."""
        for group in self.groups:
            group.release()
        self._seen = ()

    def refresh(self) -> None:
        """Make the packed copies of what has changed, those of all layers at once."""
        seen = self._look()
        if seen != self._seen:
            # Those of all layers are made when the first of them is asked.
            if any(group.is_stale for group in self.groups):
                refresh(self.groups, self.others)
            self._seen = seen

    def fuse(self, fused: FusedLayer | None) -> None:
        """Run both functions by these kernels where they can; None: by torch's operators."""
        self.fused = fused
        for group in self.groups:
            group.pack_b = None if fused is None else partial(fused.pack_b, group)

    def _look(self) -> tuple[int, ...]:
        seen = [weight.data_ptr() for weight in self._weights]
        for parameter in self._learns:
            seen += (parameter.data_ptr(), parameter._version)
        return tuple(seen)

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: None = None,
        **kwargs: Any,  # noqa: ANN401 - for the model's attention function
    ) -> Tensor:
        """Return the layer's output, [rows, tokens, hidden], for its input of the same shape."""
        assert past_key_values is None, "layers are called without a cache"
        self.refresh()
        attention = self._attention
        cos, sin = position_embeddings
        query, key, value = _IntoAttention.apply(
            *(hidden_states, self.anchor, cos, sin, self, along := _Along())
        )
        options = {"sliding_window": self._window} if self._takes_window else {}
        function = self._attend.get_interface(attention.config._attn_implementation, self._eager)
        seen: Tensor = function(
            attention,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=attention.scaling,
            **options,
            **kwargs,
        )[0]
        seen = seen.reshape(*hidden_states.shape[:-1], -1)
        self.point()
        made: Tensor = _OutOfAttention.apply(*(hidden_states, seen, self.anchor, self, along))
        return made

    @property
    def _takes_window(self) -> bool:
        return hasattr(self._attention, "sliding_window") or "mistral" in self._kind

    @property
    def _window(self) -> int | None:
        attention = self._attention
        if hasattr(attention, "sliding_window"):
            found: int | None = attention.sliding_window
            return found
        return getattr(attention.config, "sliding_window", None)

    @property
    def _kind(self) -> str:
        return type(self._attention).__module__

    def heads_apart(self, product: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a product, [tokens, outputs]: views of it.

        Each is [rows, heads, tokens of a row, head].
        """
        heads = self.heads(product, rows).transpose(1, 2)
        query, key, value = torch.split(heads, self._heads, 1)
        return query, key, value

    def heads(self, projected: Tensor, rows: int) -> Tensor:
        """Return [tokens, heads x head] as [rows, tokens of a row, heads, head]: a view."""
        tokens, width = projected.shape
        return projected.view(rows, tokens // rows, width // self.head, self.head)


def refresh_all(layers: Sequence[PackedLayer]) -> None:
    """Make the packed copies of all layers, whose weights are all there, of what has changed."""
    refresh([group for layer in layers for group in layer.groups])


class _Along:
    """Carries from the second function of a layer to the first, backward, what has no gradient yet.

    The norm's backward adds the residual's gradient there; autograd would take a launch of its own.
    """

    __slots__ = ("learning", "residual")

    def __init__(self) -> None:
        self.learning: tuple[Learning, ...] = ()
        self.residual: Tensor | None = None

    def take(self) -> tuple[tuple[Learning, ...], Tensor | None]:
        """Return both, once."""
        taken = (self.learning, self.residual)
        self.learning, self.residual = (), None
        return taken


class _IntoAttention(torch.autograd.Function):
    """Norm, queries, keys and values, rotary embedding: [rows, heads, tokens, head] each."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        anchor: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        layer: PackedLayer,
        along: _Along,
    ) -> tuple[Tensor, Tensor, Tensor]:
        del anchor  # it has the graph begin here where the input needs no gradient
        ctx.layer, ctx.along, ctx.kept = layer, along, 0
        rows, fused = hidden.shape[0], layer.fused
        if fused is not None and layer.is_adapted and fused.runs(hidden):
            qkv, rstd, made = fused.into_attention(hidden, cos, sin)
            ctx.save_for_backward(hidden, rstd, cos, sin, *made.flat())
            return layer.heads_apart(qkv, rows)
        x = hidden.detach().flatten(0, 1)
        y, rstd = _norm(x, layer.before)
        outputs, made = layer.qkv.forward(y, adapted=layer.is_adapted)
        query, key, value = (layer.heads(o, rows) for o in layer.qkv.by_projection(outputs))
        kept: tuple[Tensor | None, ...] = ()
        if layer.head_norms is not None:
            of_query, of_key = layer.head_norms
            kept = (query, key)
            query, query_rstd = _norm(query, of_query)
            key, key_rstd = _norm(key, of_key)
            kept = (*kept, query_rstd, key_rstd)
            query, key = _turned(query, cos, sin), _turned(key, cos, sin)
        elif len(outputs) == 1:
            both = layer.heads(outputs[0][:, : outputs[0].shape[1] - value.shape[2:].numel()], rows)
            both = _turned(both, cos, sin)
            query, key = torch.split(both, [query.shape[2], key.shape[2]], dim=2)
        else:
            query, key = _turned(query, cos, sin), _turned(key, cos, sin)
        ctx.save_for_backward(hidden, rstd, cos, sin, *kept, *made.flat())
        ctx.kept = len(kept)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        d_query: Tensor,
        d_key: Tensor,
        d_value: Tensor,
    ) -> tuple[Tensor | None, ...]:
        layer: PackedLayer = ctx.layer
        layer.point()
        hidden, rstd, cos, sin, *rest = ctx.saved_tensors
        kept, made = rest[: ctx.kept], Made.of(rest[ctx.kept :])
        fused, wants = layer.fused, ctx.needs_input_grad[0]
        others, residual = ctx.along.take()
        if fused is not None and others and made.u is not None and fused.runs(hidden):
            saved = (hidden, rstd, cos, sin, made.u)
            of_input = fused.back_into_attention(
                *((d_query, d_key, d_value), saved, others, residual, _norm)
            )
            return None if of_input is None else of_input.view_as(hidden), *[None] * 5
        if fused is not None and others:
            fused.learn_apart(others)
        x = hidden.detach().flatten(0, 1)
        room = layer.qkv.room(x)
        into = [layer.heads(r, hidden.shape[0]) for r in layer.qkv.by_projection(room)]
        given = [d.transpose(1, 2) for d in (d_query, d_key)]
        for n, (d, to) in enumerate(zip(given, into, strict=False)):
            back = _turned_back(d, cos, sin, None if kept else to)
            if kept:
                assert layer.head_norms is not None
                to.copy_(_norm_backward(back, kept[n], kept[n + 2], layer.head_norms[n]))
        into[2].copy_(d_value.transpose(1, 2))
        y = None if made.u is None else _norm(x, layer.before)[0]
        d_y = layer.qkv.backward(room, y, made, wants_input=wants)
        if d_y is None:
            return (None,) * 6
        d_x = _norm_backward(d_y, x, rstd, layer.before)
        if residual is not None:
            d_x.add_(residual)
        return d_x.view_as(hidden), *[None] * 5


class _OutOfAttention(torch.autograd.Function):
    """Output projection, norm, MLP and both residuals: [rows, tokens, hidden]."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        seen: Tensor,
        anchor: Tensor | None,
        layer: PackedLayer,
        along: _Along,
    ) -> Tensor:
        del anchor
        ctx.layer, ctx.along, ctx.outputs = layer, along, 1
        adapted, fused = layer.is_adapted, layer.fused
        if fused is not None and adapted and fused.runs(hidden):
            out, kept, of = fused.out_of_attention(hidden, seen)
            ctx.save_for_backward(seen, *kept, *(tensor for m in of for tensor in m.flat()))
            return out.view_as(hidden)
        x, of_seen = hidden.detach().flatten(0, 1), seen.detach().flatten(0, 1)
        (h,), made_o = layer.o.forward(of_seen, adapted=adapted, residual=x)
        y, rstd = _norm(h, layer.between)
        outputs, made_gate_up = layer.gate_up.forward(y, adapted=adapted)
        gate, up = layer.gate_up.by_projection(outputs)
        (out,), made_down = layer.down.forward(
            functional.silu(gate) * up, adapted=adapted, residual=h
        )
        made = (*made_o.flat(), *made_down.flat(), *made_gate_up.flat())
        ctx.save_for_backward(seen, h, rstd, *outputs, *made)
        ctx.outputs = len(outputs)
        return out.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        layer: PackedLayer = ctx.layer
        seen, h, rstd, *rest = ctx.saved_tensors
        outputs, rest = rest[: ctx.outputs], rest[ctx.outputs :]
        made_o, made_down = Made.of(rest[:2]), Made.of(rest[2:4])
        made_gate_up = Made.of(rest[4:])
        d, fused = d_out.flatten(0, 1), layer.fused
        us = (made_o.u, made_down.u, made_gate_up.u)
        wants_residual, wants_seen = ctx.needs_input_grad[:2]
        if fused is not None and wants_seen and all(u is not None for u in us) and fused.runs(seen):
            saved = (seen, h, rstd, *outputs, *us)
            d_h, d_seen, ctx.along.learning = fused.back_out_of_attention(d, saved)
            ctx.along.residual = d_h if wants_residual else None
            return None, d_seen.view_as(seen), None, None, None
        gate, up = layer.gate_up.by_projection(outputs)
        swished = functional.silu(gate)
        acted = None if made_down.u is None else swished * up
        d_acted = layer.down.backward([d], acted, made_down, wants_input=True)
        del acted
        assert d_acted is not None
        room = layer.gate_up.room(d)
        d_gate, d_up = layer.gate_up.by_projection(room)
        torch.mul(d_acted, swished, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_acted.mul_(up), gate, grad_input=d_gate)
        del d_acted, swished
        y = None if made_gate_up.u is None else _norm(h, layer.between)[0]
        d_y = layer.gate_up.backward(room, y, made_gate_up, wants_input=True)
        assert d_y is not None
        d_h = _norm_backward(d_y, h, rstd, layer.between).add_(d)
        layer.point()
        of_seen = layer.o.backward(
            [d_h], seen.detach().flatten(0, 1), made_o, wants_input=wants_seen
        )
        return (
            d_h.view_as(d_out) if wants_residual else None,
            None if of_seen is None else of_seen.view_as(seen),
            *[None] * 3,
        )


def _norm(x: Tensor, norm: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - of transformers
    """Return RMSNorm of `x`, [..., units], and the reciprocal roots, [..., 1], in a wide type."""
    made: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(
        x, [x.shape[-1]], norm.weight.detach(), norm.variance_epsilon
    )
    return made


def _norm_backward(d: Tensor, x: Tensor, rstd: Tensor, norm: Any) -> Tensor:  # noqa: ANN401
    """Return the gradient of what `_norm` read, in new memory, from that of its result."""
    weight: Tensor = norm.weight.detach()
    if d.is_cuda:
        made: Tensor = torch.ops.aten._fused_rms_norm_backward(
            d, x, [x.shape[-1]], rstd, weight, [True, False]
        )[0]
        return made
    wide = rstd.dtype
    normed, g = x.to(wide) * rstd, d.to(wide) * weight.to(wide)
    return (rstd * (g - normed * (g * normed).mean(-1, keepdim=True))).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return [rows, tokens, heads, head] turned by its positions; cos, sin: [1, tokens, head]."""
    first, second = x.chunk(2, dim=-1)
    beside = torch.cat((-second, first), dim=-1)
    return torch.addcmul(x * cos.unsqueeze(2), beside, sin.unsqueeze(2))


def _turned_back(d: Tensor, cos: Tensor, sin: Tensor, into: Tensor | None) -> Tensor:
    """Return the gradient of what `_turned` read, from that of its result; `into`: its memory."""
    by_sin = d * sin.unsqueeze(2)
    first, second = by_sin.chunk(2, dim=-1)
    beside = torch.cat((second, -first), dim=-1)
    return torch.addcmul(beside, d, cos.unsqueeze(2), out=into)


def _go_on() -> None:
    """Do nothing: nobody suspends the layer."""
