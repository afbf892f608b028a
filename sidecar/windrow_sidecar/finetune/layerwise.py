"""How a transformers model runs one decoder layer at a time, forward and backward.

The layers are found by structure. How the model calls each of them is recorded while it runs its
own forward with layers that only listen; replaying those calls gives bit-equal results for every
architecture that keeps its layers in one list. Each layer's output is detached and becomes the next
one's leaf, so a backward ends at the layer's input; a layer's graph lives from its forward tasklet
to its backward tasklet, and nothing is computed twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from windrow.conditions import Reason
from windrow.errors import UserError

# Shapes (rows x width) whose calls are remembered: position tables and masks, a few KiB a token.
CALLS_KEPT = 64


class Boundaries(Protocol):
    """Where the activations between two layers live until backward has used them."""

    def place(self, hidden: Tensor) -> Tensor:
        """Return a tensor outside of any graph with the values of `hidden`."""

    def clear(self) -> None:
        """Forget everything that was placed."""


class TorchBoundaries:
    """Boundaries in torch's own memory, without a copy."""

    def place(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, detached."""
        return hidden.detach()

    def clear(self) -> None:
        """Nothing is kept here."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What the model hands to one layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Activations:
    """A micro-batch on its way. `inputs[l]`: [rows, width, hidden], the leaf that layer l reads."""

    ids: Tensor  # [rows, width], int64
    calls: tuple[LayerCall, ...]
    inputs: list[Tensor | None]
    edges: list[GradientEdge | None] = field(default_factory=list)
    gradient: Tensor | None = None  # with respect to the output of the last layer that ran


class DecoderStack:
    """The parts of a causal language model that the tasklets run."""

    def __init__(self, model: nn.Module) -> None:
        """Find layers, final norm and head by structure.

        Args:
            model: a transformers causal language model, with adapters or without.

        Raises:
            UserError: it is not a plain stack of decoder layers.
        """
        self.model = model
        self.decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        self.config: Any = model.config
        self.layers = _layers(self.decoder, self.config)
        self.head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._calls: OrderedDict[tuple[int, ...], tuple[LayerCall, ...]] = OrderedDict()
        probe = torch.arange(4).unsqueeze(0)
        with torch.no_grad():
            self.norm = self._find_norm(probe)
            hidden, _ = self._record(probe)
            plain = torch.equal(embedding(probe), hidden)
        self._embedding = embedding if plain else None

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def begin(self, ids: Tensor) -> Activations:
        """Embed `ids` ([rows, width], padded on the right) and look up how layers are called.

        No attention mask is made of the padding: behind a causal mask a real token never sees what
        stands to its right, and padded positions have no label.
        """
        with torch.no_grad():
            known = self._calls.get(tuple(ids.shape))
            if known is not None and self._embedding is not None:
                hidden, calls = self._embedding(ids), known
                self._calls.move_to_end(tuple(ids.shape))
            else:
                hidden, calls = self._record(ids)
        return Activations(ids, calls, inputs=[hidden], edges=[None] * self.depth)

    def forward(self, at: Activations, layer: int, store: Boundaries, *, learn: bool) -> None:
        """Run one layer; its input must be there. Afterwards the next one's input is.

        With `learn` the layer's graph is kept for `backward`.
        """
        hidden = at.inputs[layer]
        call = at.calls[layer]
        with torch.set_grad_enabled(learn):
            out = self.layers[layer](hidden, *call.args, **call.kwargs)
        out = out[0] if isinstance(out, tuple) else out
        at.inputs.append(store.place(out))
        if not learn:
            at.inputs[layer] = None
            return
        # The edge keeps the graph alive, not the output: that is in the boundary already.
        at.edges[layer] = get_gradient_edge(out) if out.requires_grad else None
        at.inputs[-1].requires_grad_()  # type: ignore[union-attr]

    def backward(self, at: Activations, layer: int) -> None:
        """Run one layer's backward: adds to the adapters' `.grad`, moves `at.gradient` down."""
        edge, hidden = at.edges[layer], at.inputs[layer]
        if edge is not None:
            torch.autograd.backward((edge,), (at.gradient,))
        at.edges[layer] = None
        at.gradient = hidden.grad if hidden is not None else None
        at.inputs[layer] = None

    def _find_norm(self, probe: Tensor) -> nn.Module:
        """The one module between the last layer and the head."""
        seen: list[tuple[nn.Module, Tensor, Any]] = []
        hooks = [
            child.register_forward_hook(lambda m, args, out: seen.append((m, args[0], out)))
            for child in self.decoder.children()
            if not isinstance(child, nn.ModuleList)
        ]
        last: list[Tensor] = []
        try:
            with _forwards(self.layers, lambda i, hidden, a, k: last.append(hidden)):
                out = self.decoder(input_ids=probe, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        norms = [m for m, given, made in seen if given is last[-1] and made is out]
        if len(norms) != 1:
            raise unsupported(self.model, "no single norm stands between layers and head")
        return norms[0]

    def _record(self, ids: Tensor) -> tuple[Tensor, tuple[LayerCall, ...]]:
        calls: list[LayerCall] = []
        first: list[Tensor] = []

        def listen(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Any) -> None:  # noqa: ANN401
            if index == 0:
                first.append(hidden)
            calls.append(LayerCall(args, kwargs))

        with _forwards(self.layers, listen):
            self.decoder(input_ids=ids, use_cache=False)
        if len(calls) != self.depth:
            raise unsupported(self.model, f"{len(calls)} of {self.depth} layers are called")
        made = tuple(calls)
        self._calls[tuple(ids.shape)] = made
        while len(self._calls) > CALLS_KEPT:
            self._calls.popitem(last=False)
        return first[0], made


def unsupported(model: nn.Module, why: str) -> UserError:
    """Return the error for a model that cannot be run layer by layer."""
    return UserError(
        f"architecture {type(model).__name__} cannot be trained here: {why}",
        field="spec.model.name",
        remedy="Use a decoder-only model that is one stack of layers (Llama, Qwen, Mistral, ...).",
        reason=Reason.MODEL_UNSUPPORTED,
    )


def _layers(decoder: nn.Module, config: Any) -> Sequence[nn.Module]:  # noqa: ANN401
    depth = getattr(config, "num_hidden_layers", None)
    lists = [c for c in decoder.children() if isinstance(c, nn.ModuleList) and len(c) == depth]
    if len(lists) != 1:
        raise unsupported(decoder, f"no single list of {depth} layers was found")
    return list(lists[0])


@contextmanager
def _forwards(
    layers: Sequence[nn.Module], listen: Callable[[int, Tensor, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Let every layer hand its input through and tell `listen` how it was called."""

    def listener(index: int) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
            listen(index, hidden_states, args, kwargs)
            return hidden_states

        return forward

    for index, layer in enumerate(layers):
        layer.forward = listener(index)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
