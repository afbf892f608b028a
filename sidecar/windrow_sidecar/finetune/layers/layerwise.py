"""How a transformers model runs one decoder layer at a time, forward and backward.

How the model calls its layers is recorded; replaying those calls gives bit-equal results for every
architecture that keeps its layers in one list. Each layer's output is detached and becomes the next
one's leaf, so a backward ends at the layer's input; a layer's graph lives from its forward tasklet
to its backward tasklet, and nothing is computed twice. A layer may also run on a window of tokens
at a time (`windows`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from windrow_sidecar.finetune.base.structure import (
    asking,
    find_layers,
    find_norm,
    record,
)
from windrow_sidecar.finetune.layers.boundaries import Boundaries
from windrow_sidecar.finetune.layers.probing import try_windows
from windrow_sidecar.finetune.tasklets import Window
from windrow_sidecar.finetune.windows.attention import looking_back
from windrow_sidecar.finetune.windows.calls import (
    LayerCall,
    TokenDims,
    part_of,
    token_dims,
)
from windrow_sidecar.finetune.windows.keyvalues import KeyValues
from windrow_sidecar.finetune.windows.prefix import Prefix

# Shapes (rows x width) whose calls are remembered: position tables and masks, a few KiB a token.
CALLS_KEPT = 64
# Tokens of the rows that the model is asked with to learn its structure.
_PROBE = 6


class AroundLayer(Protocol):
    """What holds while a layer's own code runs: its weights are there, saved tensors are packed."""

    def forward(self, layer: int) -> AbstractContextManager[None]:
        """Enter around the forward of one layer."""

    def backward(self, layer: int) -> AbstractContextManager[None]:
        """Enter around the backward of one layer."""


class NothingAround:
    """Every layer is resident, and autograd keeps what it saves."""

    def forward(self, layer: int) -> AbstractContextManager[None]:
        """Do nothing."""
        del layer
        return _NOTHING

    def backward(self, layer: int) -> AbstractContextManager[None]:
        """Do nothing."""
        del layer
        return _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Graph:
    """What one layer left behind for one window: where backward begins and ends."""

    window: Window
    leaf: Tensor
    edge: GradientEdge | None  # None: nothing in it learns
    units: int = 0  # of the device that its forward ran on


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A window of which only the layer's input is kept: it runs forward again before backward."""

    window: Window


@dataclass(slots=True)
class Activations:
    """A micro-batch on its way.

    Attributes:
        ids: [rows, width], int64.
        calls: of each layer.
        inputs: [rows, width, hidden] that layer l reads; the last is the output of the last layer.
        prefix: what stands before the first token, where the adapter is a prefix.
        graphs: of each layer, the windows that have run and not been run back, left to right.
        key_values: of each layer that runs in windows.
        gradient: [rows, width, hidden]: at each token, with respect to the output of the layer that
            has not run back yet.
    """

    ids: Tensor
    calls: tuple[LayerCall, ...]
    inputs: list[Tensor | None]
    prefix: Prefix | None = None
    graphs: list[list[Graph | Forgotten]] = field(default_factory=list)
    key_values: list[KeyValues | None] = field(default_factory=list)
    gradient: Tensor | None = None

    @property
    def whole(self) -> Window:
        """All tokens of a row."""
        return Window(0, self.ids.shape[1])

    def forget_graphs(self) -> None:
        """Keep layers' inputs only, on the host, in memory of their own."""
        self.graphs = [[Forgotten(graph.window) for graph in layer] for layer in self.graphs]
        self.inputs = [None if x is None else x.detach().to("cpu", copy=True) for x in self.inputs]


class DecoderStack:
    """The parts of a causal language model that the tasklets run.

    Attributes:
        probe: ids with which the model was asked for its structure: [1, tokens].
        device: where it computes.
        own_dropout: whether its layers drop units by themselves, besides the adapter.
        windows_refused: why its layers cannot run on windows of tokens; "" if they can.
    """

    def __init__(
        self,
        model: nn.Module,
        around_layer: AroundLayer | None = None,
        units: Callable[[], int] = lambda: 0,
    ) -> None:
        """Find layers, final norm and head by structure.

        Args:
            model: a transformers causal language model, with adapters or without.
            around_layer: entered around each layer's forward and backward.
            units: of the device that what is called now computes on; on a GPU torch runs a backward
                on the stream of its forward, so a graph that was made on more units than are left
                is made again before it runs back. Always the same where streams say nothing of it.

        Raises:
            UserError: it is not a plain stack of decoder layers.
        """
        self.model, self._units = model, units
        self.around_layer: AroundLayer = around_layer or NothingAround()
        self.decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        self.config: Any = self.decoder.config
        self.layers = find_layers(self.decoder, self.config)
        self.head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._calls: OrderedDict[tuple[int, ...], tuple[LayerCall, ...]] = OrderedDict()
        self.device = _device(embedding)
        self.probe = probe = torch.arange(_PROBE, device=self.device).unsqueeze(0)
        with torch.no_grad(), asking(model):
            self.norm = find_norm(self.decoder, self.layers, probe)
            hidden, wide = record(self.decoder, self.layers, probe)
            _, narrow = record(self.decoder, self.layers, probe[:, :-1])
            self._embedding = embedding if torch.equal(embedding(probe), hidden) else None
        self._dims: list[TokenDims] = [token_dims(n, w) for n, w in zip(narrow, wide, strict=True)]
        with asking(model):
            self.own_dropout, self.windows_refused = try_windows(self, probe)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def stow(self, *, away: bool) -> None:
        """Bring all of the model but its parameters to the host, or back; nothing may run."""
        self._calls.clear()
        to = torch.device("cpu") if away else self.device
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(to)
        self.probe = self.probe.to(to)

    def begin(
        self, ids: Tensor, prefix: Prefix | None = None, positions: Tensor | None = None
    ) -> Activations:
        """Embed `ids` ([rows, width], padded on the right) and look up how layers are called.

        `positions`, of the same shape, tells rows apart that stand one after the other in one line.

        No attention mask is made of the padding: behind a causal mask a real token never sees what
        stands to its right, and padded positions have no label.
        """
        key = (*ids.shape, prefix.tokens if prefix else 0)
        with torch.no_grad():
            known = self._calls.get(key) if positions is None else None
            if known is not None and self._embedding is not None:
                hidden, calls = self._embedding(ids), known
                self._calls.move_to_end(key)
            else:
                past = prefix.past if prefix else None
                hidden, calls = record(self.decoder, self.layers, ids, past, positions)
                if positions is None:
                    self._remember(key, calls)
        inputs: list[Tensor | None] = [hidden, *[None] * self.depth]
        graphs: list[list[Graph | Forgotten]] = [[] for _ in self.layers]
        return Activations(ids, calls, inputs, prefix, graphs, [None] * self.depth)

    def forward(
        self, at: Activations, layer: int, window: Window, store: Boundaries, *, learn: bool
    ) -> None:
        """Run one layer on a window of tokens; its input must be there, and what is left of it.

        Afterwards the next layer's input is there. With `learn` the graph is kept for `backward`.
        """
        leaf, out = self._pass(at, layer, window, learn=learn)
        if window == at.whole:
            at.inputs[layer + 1] = store.place(out) if learn else out
        else:
            self._fill(at, layer + 1, window, out, store)
        if learn:
            at.graphs[layer].append(_graph(window, leaf, out, self._units()))
        elif window.end == at.whole.end:
            at.inputs[layer] = at.key_values[layer] = None

    def backward(self, at: Activations, layer: int, window: Window) -> None:
        """Run one layer's backward on the last window that is left of it.

        Adds to the adapters' `.grad`; moves `at.gradient` down by a layer at those tokens. If it
        fails half-way, a whole row's may run again once that `.grad` is what it was before.
        """
        graph = at.graphs[layer].pop()
        if graph.window != window or at.gradient is None:
            raise ValueError(f"{window} of layer {layer} is not next, {graph.window} is")
        if isinstance(graph, Graph) and graph.units > self._units():
            graph = Forgotten(window)
        whole = window == at.whole
        gradient = at.gradient if whole else at.gradient[:, window.begin : window.end]
        try:
            if isinstance(graph, Forgotten):
                graph = _graph(window, *self._pass(at, layer, window, learn=True))
            if graph.edge is not None:
                with self.around_layer.backward(layer):
                    torch.autograd.backward((graph.edge,), (gradient,))
        except BaseException:
            at.graphs[layer].append(Forgotten(window))
            raise
        if layer > 0 and graph.leaf.grad is not None:
            if whole:
                at.gradient = graph.leaf.grad
            else:
                gradient.copy_(graph.leaf.grad)
        if not at.graphs[layer]:
            at.inputs[layer] = at.key_values[layer] = None

    def _pass(
        self, at: Activations, layer: int, window: Window, *, learn: bool
    ) -> tuple[Tensor, Tensor]:
        """Run a layer's forward; returns what it read and what it made."""
        leaf = _leaf(at.inputs[layer], window, whole=window == at.whole).to(at.ids.device)
        leaf.grad = None
        leaf.requires_grad_(learn and layer > 0)
        with torch.set_grad_enabled(learn), self.around_layer.forward(layer):
            return leaf, self._run(at, layer, window, leaf)

    def _run(self, at: Activations, layer: int, window: Window, leaf: Tensor) -> Tensor:
        """Call a layer as the model would."""
        call = at.calls[layer]
        looking: AbstractContextManager[None] = _NOTHING
        if window != at.whole or at.prefix is not None:
            before = at.prefix.tokens if at.prefix else 0
            call = part_of(call, window, self._dims[layer], before=before)
            looking = looking_back(self.config, window, _key_values(at, layer))
        with looking:
            out = self.layers[layer](leaf, *call.args, **call.kwargs)
        made: Tensor = out[0] if isinstance(out, tuple) else out
        return made

    def _fill(
        self, at: Activations, layer: int, window: Window, made: Tensor, store: Boundaries
    ) -> None:
        room = at.inputs[layer]
        if room is None:
            room = store.room(made, (*at.ids.shape, made.shape[-1]))
            at.inputs[layer] = room
        # `.data`: autograd has saved windows of this very memory; other tokens do not touch them.
        room.data[:, window.begin : window.end].copy_(made.detach())

    def _remember(self, key: tuple[int, ...], calls: tuple[LayerCall, ...]) -> None:
        self._calls[key] = calls
        while len(self._calls) > CALLS_KEPT:
            self._calls.popitem(last=False)


def _graph(window: Window, leaf: Tensor, out: Tensor, units: int = 0) -> Graph:
    # The edge keeps the graph alive, not the output: that is in the boundary already.
    return Graph(window, leaf, get_gradient_edge(out) if out.requires_grad else None, units)


def _leaf(hidden: Tensor | None, window: Window, *, whole: bool) -> Tensor:
    """Return what a layer reads, as a tensor without history and with a version of its own."""
    assert hidden is not None, "the layer below has not run on these tokens"
    return hidden if whole else hidden.data[:, window.begin : window.end]


def _key_values(at: Activations, layer: int) -> KeyValues:
    known = at.key_values[layer]
    if known is None:
        ahead = at.prefix.leaves[layer] if at.prefix else None
        known = at.key_values[layer] = KeyValues(at.whole.tokens, ahead)
    return known


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
