"""A packed layer's two functions in few launches: products of torch, and Triton kernels between.

A launch of Triton costs the host a fifth of what an operator of torch costs, once it is compiled.
The functions save what those of `packed_layer` save and return what those return, so a layer that
was recorded with torch's operators runs its plan with these.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windrow_sidecar.compute.kernel_launch import kernel_of
from windrow_sidecar.finetune.adapter.packed_linears import Made, PackedLinears

if TYPE_CHECKING:
    from windrow_sidecar.finetune.adapter.packed_layer import PackedLayer

# Tokens and columns of one program. Products of Triton's take 16 of each at least.
_ROWS, _ROWS_OF_WHOLE, _BLOCK = 32, 16, 128
# Of gradients, which are sums over tokens: columns of a program, tokens at a time.
_COLUMNS, _TOKENS = 64, 64
# Ranks of a group, all of which a program holds at once.
MOST_RANKS = 256


def why_not(device: torch.device) -> str:
    """Return why kernels cannot run on a device; "" if they can."""
    if device.type != "cuda":
        return "the layers are not on a GPU"
    return "" if importlib.util.find_spec("triton") else "Triton is not installed"


# Of a group: its input, the gradient at its ranks, that of its output, and its input's ranks; each
# [tokens, units].
Learning = tuple[Tensor, Tensor, Tensor, Tensor]


class FusedLayer:
    """Runs the functions of one packed layer where its groups allow it.

    Args:
        layer: whose groups have been laid out.
    """

    def __init__(self, layer: PackedLayer) -> None:
        import triton
        import triton.language as tl

        from windrow_sidecar.finetune.adapter import gradient_kernels, share_kernels
        from windrow_sidecar.finetune.adapter import layer_kernels as kernels

        self._layer, self._cdiv = layer, triton.cdiv
        hidden = layer.before.weight
        self._wide = torch.promote_types(hidden.dtype, torch.float32)
        wide = tl.float64 if self._wide == torch.float64 else tl.float32
        head = layer.head
        self._half = {"HALF": head // 2, "HALF_COLUMNS": max(16, triton.next_power_of_2(head // 2))}
        outs = [p.weight.shape[0] // head for p in layer.qkv.projections]
        self._query_heads, self._key_heads = outs[0], outs[1]
        units, inner = hidden.shape[0], layer.down.inputs
        self._units, self._inner = units, inner
        # Looked up by modules of torch in each call, which takes them a microsecond.
        self._before, self._between = layer.before.weight, layer.between.weight
        self._ranks = {group: group.ranks for group in layer.groups}
        self._outputs = layer.qkv.outputs

        def ranks(group: PackedLinears) -> dict[str, int]:
            columns = max(16, triton.next_power_of_2(group.ranks))
            return {"RANKS": group.ranks, "RANK_COLUMNS": columns}

        tile = {"ROWS": _ROWS, "BLOCK": _BLOCK, "WIDE": wide}
        whole = tile | {"ROWS": _ROWS_OF_WHOLE}
        over = {"BLOCK": _COLUMNS, "ROWS": _TOKENS, "WIDE": wide}
        qkv, o, gate_up, down = (ranks(group) for group in layer.groups)
        heads = {"HEADS": outs[0] + outs[1], "VALUE_HEADS": outs[2], "ROWS": _ROWS, "WIDE": wide}
        back = {"HEADS": outs[0], "KV_HEADS": outs[1], "ROWS": _ROWS, "WIDE": wide}
        self._rotate = kernel_of(kernels.rotate, **heads, **self._half, **qkv)
        self._rotate_back = kernel_of(kernels.rotate_back, **back, **self._half)
        self._norm = kernel_of(kernels.norm_onto_ranks, 8, UNITS=units, **qkv, **whole)

        def then(of: dict[str, int]) -> dict[str, int]:
            return {"NEXT_RANKS": of["RANKS"], "NEXT_COLUMNS": of["RANK_COLUMNS"]}

        self._add_and_norm = kernel_of(
            kernels.add_and_norm, 8, UNITS=units, **o, **then(gate_up), **whole
        )
        self._swiglu = kernel_of(kernels.swiglu, INNER=inner, **gate_up, **tile)
        self._add_share = kernel_of(share_kernels.add_share, UNITS=units, **down, **tile)
        self._swiglu_back = kernel_of(kernels.swiglu_back, INNER=inner, **down, **tile)
        nothing = {"RANKS": 0, "RANK_COLUMNS": 16}
        self._norm_back = {
            group: kernel_of(kernels.norm_back, 8, UNITS=units, **of, **then(onto), **whole)
            for group, of, onto in ((layer.qkv, qkv, nothing), (layer.gate_up, gate_up, o))
        }
        # In the order in which a backward finds them.
        self._learning = (layer.o, layer.gate_up, layer.down, layer.qkv)
        sizes: dict[str, Any] = {}
        for n, group in enumerate(self._learning):
            of = ranks(group)
            sizes |= {f"IN{n}": group.inputs, f"OUT{n}": group.outputs}
            sizes |= {f"RANKS{n}": of["RANKS"], f"COLUMNS{n}": of["RANK_COLUMNS"]}
        self._gradients = kernel_of(gradient_kernels.gradients, **sizes, **over)
        self._column_blocks = sum(
            triton.cdiv(units, _COLUMNS)
            for group in self._learning
            for units in (group.inputs, group.outputs)
        )
        self._learns: list[Tensor] = [p for group in self._learning for p in group.in_a_row]
        self._parts = [sum(p.numel() for p in group.in_a_row) for group in self._learning]
        self._elements = sum(self._parts)
        self._type = self._learns[0].dtype
        self._pack = {}
        for group, of in ((layer.qkv, qkv), (layer.gate_up, gate_up)):
            shapes = [
                (p.weight.shape[0], 0 if p.a is None else p.a.shape[0]) for p in group.projections
            ]
            shapes += [(0, 0)] * (3 - len(shapes))
            sizes = {f"OUT{n}": out for n, (out, _) in enumerate(shapes)}
            sizes |= {f"RANK{n}": rank for n, (_, rank) in enumerate(shapes)}
            columns = of["RANK_COLUMNS"]
            self._pack[group] = kernel_of(
                share_kernels.pack_b, RANK_COLUMNS=columns, ROWS=_TOKENS, **sizes
            )

    def pack_b(self, group: PackedLinears) -> None:
        """Write the packed copy of all B matrices of a group of several projections."""
        given = [group.b if p.b is None else p.b.detach() for p in group.projections]
        given += [group.b] * (3 - len(given))
        self._pack[group]((self._rows(group.outputs, _TOKENS), 1, 1), (*given, group.b))

    @staticmethod
    def refused(layer: PackedLayer) -> str:
        """Return why a layer's functions cannot be these; "" if they can."""
        if layer.head_norms is not None:
            return "heads have norms"
        if layer.head % 2:
            return "heads have an odd number of units"
        for name, group in zip(("qkv", "o", "gate_up", "down"), layer.groups, strict=True):
            if why := group.refused_alone:
                return f"{name} {why}"
            if group.learns[0].dtype != layer.qkv.learns[0].dtype:
                return f"{name} has adapters of another type than qkv"
            if group.ranks > MOST_RANKS:
                return f"{name} has {group.ranks} ranks in all, more than {MOST_RANKS}"
        return ""

    def runs(self, hidden: Tensor) -> bool:
        """Return whether it may run on [..., units]: not on stand-ins, or with weights apart."""
        layer = self._layer
        return type(hidden) is Tensor and layer.qkv.parts == 1 and layer.gate_up.parts == 1

    def _rows(self, tokens: int, rows: int = _ROWS) -> int:
        return (tokens + rows - 1) // rows

    def into_attention(
        self, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Made]:
        """Norm, queries, keys and values, rotary embedding.

        Args:
            hidden: [rows, tokens, hidden].
            cos: [1 or rows, tokens, head].
            sin: of the same shape.

        Returns:
            what attention reads, [all tokens, outputs]; the norm's reciprocal roots; for backward.
        """
        layer, group, x = self._layer, self._layer.qkv, hidden.flatten(0, 1).contiguous()
        tokens = x.shape[0]
        y, u = torch.empty_like(x), x.new_empty(tokens, self._ranks[group])
        rstd = x.new_empty(tokens, 1, dtype=self._wide)
        self._norm(
            (self._rows(tokens, _ROWS_OF_WHOLE), 1, 1),
            (x, self._before, group.a, y, rstd, u),
            *((tokens,), (layer.before.variance_epsilon, group.scale)),
        )
        qkv = group.product(y)
        cos, sin = cos.contiguous(), sin.contiguous()
        heads = qkv.shape[1] // layer.head
        self._rotate(
            (self._rows(tokens), heads, 1),
            (qkv, u, group.b, cos, sin),
            (tokens, cos.numel() // layer.head),
        )
        return qkv, rstd, Made(u, (None,))

    def back_into_attention(
        self,
        given: tuple[Tensor, Tensor, Tensor],
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        others: tuple[Learning, ...],
        residual: Tensor | None,
        norm: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor | None:
        """Add the gradients of all adapters; return that of the input, [all tokens, hidden].

        Args:
            given: gradients of queries, keys and values, [rows, heads, tokens, head].
            saved: hidden, the norm's roots, cos, sin, u.
            others: that `back_out_of_attention` returned.
            residual: added to the gradient, [all tokens, hidden]; None: return None.
            norm: RMSNorm, as `packed_layer` computes it.
        """
        layer, group = self._layer, self._layer.qkv
        hidden, rstd, cos, sin, u = saved
        x = hidden.flatten(0, 1).contiguous()
        tokens, row_tokens = x.shape[0], hidden.shape[1]
        given_here = [d if d.stride(-1) == 1 else d.contiguous() for d in given]
        strides = [n for d in given_here for n in d.stride()[:3]]
        cos, sin = cos.contiguous(), sin.contiguous()
        d_qkv = x.new_empty(tokens, self._outputs)
        self._rotate_back(
            (self._rows(tokens), self._query_heads + 2 * self._key_heads, 1),
            (*given_here, cos, sin, d_qkv),
            (tokens, row_tokens, cos.numel() // layer.head, *strides),
        )
        v = group.lift(d_qkv)
        d_x: Tensor | None = None
        if residual is not None:
            d_y = d_qkv @ group.weight
            d_x, y = torch.empty_like(x), torch.empty_like(x)
            self._norm_back[group](
                (self._rows(tokens, _ROWS_OF_WHOLE), 1, 1),
                (d_y, v, group.a, x, rstd, self._before, residual, group.a, d_x, y, d_x),
                *((tokens,), (1.0,)),
            )
        else:
            y, _ = norm(x, layer.before)
        self._learn((*others, (y, v, d_qkv, u)))
        return d_x

    def _learn(self, of: tuple[Learning, ...]) -> None:
        """Add the gradients of all parameters, which lie in one memory."""
        room = of[0][0].new_empty(self._elements, dtype=self._type)
        tensors: list[Tensor] = []
        parts: Any = torch.split(room, self._parts)
        for group, learning, part in zip(self._learning, of, parts, strict=True):
            tensors += (*learning, group.places, part)
        self._gradients((self._column_blocks, 1, 1), tuple(tensors), (of[0][0].shape[0],))
        views = torch._C._nn.unflatten_dense_tensors(room, self._learns)
        for parameter, gradient in zip(self._learns, views, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = parameter.grad + gradient

    def learn_apart(self, of: tuple[Learning, ...]) -> None:
        """Add what `back_out_of_attention` has left, by torch's operators."""
        for group, learning in zip(self._learning, of, strict=False):
            group.add_gradients(*learning)

    def out_of_attention(
        self, hidden: Tensor, seen: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], tuple[Made, Made, Made]]:
        """Output projection, norm, MLP and both residuals.

        Args:
            hidden: the layer's input, [rows, tokens, hidden].
            seen: of attention, [rows, tokens, heads x head].

        Returns:
            the layer's output, [all tokens, hidden]; the sum before the norm, its roots, gate and
            up; of the output projection, the down projection, gate and up, for backward.
        """
        layer, tokens = self._layer, hidden.shape[0] * hidden.shape[1]
        x, of_seen = (
            hidden.flatten(0, 1).contiguous(),
            seen.flatten(0, 1).contiguous(),
        )
        u_o, group = layer.o.down(of_seen), layer.gate_up
        h, y = layer.o.product(of_seen), torch.empty_like(x)
        u = x.new_empty(tokens, self._ranks[group])
        rstd = x.new_empty(tokens, 1, dtype=self._wide)
        self._add_and_norm(
            (self._rows(tokens, _ROWS_OF_WHOLE), 1, 1),
            (h, x, u_o, layer.o.b, self._between, group.a, y, rstd, u),
            *((tokens,), (layer.between.variance_epsilon, group.scale)),
        )
        gate_up = group.product(y)
        acted = x.new_empty(tokens, self._inner)
        blocks = (self._inner + _BLOCK - 1) // _BLOCK
        self._swiglu((self._rows(tokens), blocks, 1), (gate_up, u, group.b, acted), (tokens,))
        u_down = layer.down.down(acted)
        out = layer.down.product(acted)
        blocks = (self._units + _BLOCK - 1) // _BLOCK
        self._add_share((self._rows(tokens), blocks, 1), (out, h, u_down, layer.down.b), (tokens,))
        made = (Made(u_o, (None,)), Made(u_down, (None,)), Made(u, (None,)))
        return out, (h, rstd, gate_up), made

    def back_out_of_attention(
        self,
        d_out: Tensor,
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, tuple[Learning, ...]]:
        """Return the gradient of the residual, that of what attention had seen, and what is learnt.

        The first is [all tokens, hidden], the second [all tokens, heads x head]. The last is for
        `back_into_attention`, or `learn_apart`.

        Args:
            d_out: [all tokens, hidden].
            saved: seen, the sum before the norm, its roots, gate and up, and u of the output
                projection, of the down projection, of gate and up.
        """
        layer, tokens = self._layer, d_out.shape[0]
        seen, h, rstd, gate_up, u_o, u_down, u = saved
        down, group, o = layer.down, layer.gate_up, layer.o
        d_out = d_out.contiguous()
        v_down = down.lift(d_out)
        acted = d_out @ down.weight  # the gradient's, until the kernel has read it
        d_gate_up = torch.empty_like(gate_up)
        blocks = (self._inner + _BLOCK - 1) // _BLOCK
        self._swiglu_back(
            (self._rows(tokens), blocks, 1),
            (acted, v_down, down.a, gate_up, d_gate_up),
            (tokens,),
        )
        v = group.lift(d_gate_up)
        d_y = d_gate_up @ group.weight
        d_h, y = torch.empty_like(h), torch.empty_like(h)
        v_o = h.new_empty(tokens, self._ranks[o])
        self._norm_back[group](
            (self._rows(tokens, _ROWS_OF_WHOLE), 1, 1),
            (d_y, v, group.a, h, rstd, self._between, d_out, o.b, d_h, y, v_o),
            *((tokens,), (o.scale,)),
        )
        layer.point()
        d_seen = (d_h @ o.weight).addmm_(v_o, o.a)
        of_seen = seen.flatten(0, 1).contiguous()
        learning = (
            (of_seen, v_o, d_h, u_o),
            (y, v, d_gate_up, u),
            (acted, v_down, d_out, u_down),
        )
        return d_h, d_seen, learning
