"""Run a transformers model one decoder layer at a time, forward and backward.

How the model calls its layers is recorded; replaying those calls gives bit-equal results for every
architecture that keeps its layers in one list. Each layer's output is detached and becomes the next
one's leaf, so a backward ends at the layer's input; a layer's graph lives from its forward tasklet
to its backward tasklet, and nothing is computed twice. A layer may also run on a window of tokens
at a time (`windows`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from windrow_sidecar.finetune.model.around import NOTHING, AroundLayer, NothingAround
from windrow_sidecar.finetune.model.boundaries import (
    Activations,
    Boundaries,
    Forgotten,
    Graph,
    Replayed,
)
from windrow_sidecar.finetune.model.capabilities import try_windows
from windrow_sidecar.finetune.model.embedding import by_token, drops_embeddings
from windrow_sidecar.finetune.model.key_values import KeyValues, Prefix
from windrow_sidecar.finetune.model.layer_calls import (
    LayerCall,
    TokenDims,
    part_of,
    token_dims,
)
from windrow_sidecar.finetune.model.layer_program import (
    ProgramName,
    StackGraphs,
    program_of,
)
from windrow_sidecar.finetune.model.packed_rows import rows_are
from windrow_sidecar.finetune.model.structure import (
    asking,
    find_layers,
    find_norm,
    follows_longest,
    in_mode,
    record,
    unsupported,
    what_layers_return,
)
from windrow_sidecar.finetune.model.token_dropout import DropoutKeys
from windrow_sidecar.finetune.model.window_attention import looking_back
from windrow_sidecar.finetune.tasklets import TokenWindow

# Shapes (rows x width) whose calls are remembered: position tables and masks, a few KiB a token.
CALLS_KEPT = 64
# Tokens of the rows that the model is asked with to learn its structure.
_PROBE = 6


def drop_broken_backward() -> None:
    """Free what autograd keeps of a backward that has ended in an error, in the calling thread.

    Without a thread of the device, the nodes that were still to come wait in this thread's own
    queue, with all that they have saved, until the next backward takes them out. So one runs here,
    of a number.
    """
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        number = torch.zeros((), requires_grad=True)
        torch.autograd.backward((number * 1,))


class DecoderStack:
    """The decoder layers of a causal language model, each callable alone.

    Attributes:
        probe: ids with which the model was asked for its structure: [1, tokens].
        device: where it computes.
        returned: by a layer (see `what_layers_return`).
        norm: modules between the last layer and the head.
        answer: the type of what the decoder returns.
        drops_embeddings: whether units of what the first layer reads are dropped in training.
        follows_longest: whether position tables depend on the longest row of a step.
        own_dropout: whether its layers drop units, besides the adapter.
        windows_refused: why its layers cannot run on windows of tokens; "" if they can.
        graphs: runs layers by CUDA graphs where it can; None: nothing does.
        prefix_refused: why nothing can precede a row's first token; "" if it can.
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
        self.graphs: StackGraphs | None = None
        self.decoder: nn.Module = model.get_decoder()  # type: ignore[operator]
        self.config: Any = self.decoder.config
        self.layers = find_layers(self.decoder, self.config)
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._calls: OrderedDict[tuple[int, ...], tuple[LayerCall, ...]] = OrderedDict()
        self.device = _device(embedding)
        self.probe = probe = torch.arange(_PROBE, device=self.device).unsqueeze(0)
        _check_loss(model, self.config)
        self.follows_longest = follows_longest(self.config)
        with torch.no_grad(), asking(model), in_mode(model, training=False):
            self.returned = what_layers_return(self.decoder, self.layers, probe, self.around_layer)
            self.norm, self.answer = find_norm(self.decoder, self.layers, probe, self.returned)
            hidden, wide = self.record(probe)
            _, narrow = self.record(probe[:, :-1])
        with torch.no_grad(), asking(model):
            self.drops_embeddings = drops_embeddings(model, lambda: self.record(probe)[0])
        plain = not self.drops_embeddings and torch.equal(embedding(probe), hidden)
        self._embedding = embedding if plain else None
        self._dims: list[TokenDims] = [token_dims(n, w) for n, w in zip(narrow, wide, strict=True)]
        with asking(model), in_mode(model, training=False):
            self.own_dropout, self.prefix_refused = try_windows(self, probe)
        drops = "its layers apply dropout of their own" if self.own_dropout else ""
        self.windows_refused = drops or self.prefix_refused

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def program(self) -> ProgramName:
        """The program that runs its layers."""
        if self.graphs is not None and not self.graphs.refused:
            return "graphs"
        found = program_of(self.layers[0])
        return "eager" if found is None else found.name

    def move_buffers(self, *, to_host: bool) -> None:
        """Bring all of the model but its parameters to the host, or back; nothing may run."""
        self._calls.clear()
        if self.graphs is not None:
            self.graphs.drop()
        for layer in self.layers:
            if (program := program_of(layer)) is not None:
                program.release()
        to = torch.device("cpu") if to_host else self.device
        move_buffers(self.model, to)
        self.probe = self.probe.to(to)

    def record(
        self,
        ids: Tensor,
        past: Any = None,  # noqa: ANN401 - a Cache of transformers
        positions: Tensor | None = None,
        row_of: Tensor | None = None,
    ) -> tuple[Tensor, tuple[LayerCall, ...]]:
        """Ask the model what its first layer would get, and how it calls each (see `structure`).

        Args:
            ids: token ids, int64 [rows, tokens].
            past: keys and values before the first token; None: nothing is.
            positions: int64 [rows, tokens]; None: each row counts from 0.
            row_of: see `begin`.

        Returns:
            hidden states, [rows, tokens, hidden], new memory, and the call of each layer.
        """
        with rows_are(row_of):
            return record(self.decoder, self.layers, ids, past, positions, self.returned)

    def begin(
        self,
        ids: Tensor,
        prefix: Prefix | None = None,
        positions: Tensor | None = None,
        dropout: DropoutKeys | None = None,
        longest: int = 0,
        row_of: Tensor | None = None,
    ) -> Activations:
        """Embed `ids` ([rows, width], padded on the right) and look up how layers are called.

        `positions`, of the same shape, tells rows apart that stand one after the other in a line;
        `row_of`, int64 as well, has their numbers, with which nobody waits for the device.
        `dropout`: by which units are dropped where the model does so ahead of its layers; None: as
        torch draws. `longest`: tokens of the longest of all rows that belong together, of which
        these may be some.

        No attention mask is made of the padding: behind a causal mask a real token never sees those
        to its right, and padded positions have no label.
        """
        before = prefix.tokens if prefix else 0
        key = (*ids.shape, before, longest if self.follows_longest else 0)
        with torch.no_grad():
            known = self._calls.get(key) if positions is None else None
            if known is not None and self._embedding is not None:
                hidden, calls = self._embedding(ids), known
                self._calls.move_to_end(key)
            else:
                past = prefix.past if prefix else None
                with by_token(dropout if self.drops_embeddings else None):
                    hidden, calls = self.record(ids, past, positions, row_of)
                if self.follows_longest:
                    calls = self._beside(longest, ids, past, positions, before, row_of)
                if positions is None:
                    self._remember(key, calls)
        inputs: list[Tensor | None] = [hidden, *[None] * self.depth]
        graphs: list[list[Graph | Forgotten | Replayed]] = [[] for _ in self.layers]
        return Activations(ids, calls, inputs, prefix, graphs, [None] * self.depth)

    def _beside(
        self,
        longest: int,
        ids: Tensor,
        past: Any,  # noqa: ANN401 - a Cache of transformers
        positions: Tensor | None,
        before: int,
        row_of: Tensor | None = None,
    ) -> tuple[LayerCall, ...]:
        """Return how layers are called for rows that pass beside one of `longest` tokens.

        As in the padded batch of all of them, whichever pass together here.
        """
        # A short row makes dynamic RoPE forget the longer ones of earlier steps.
        self.record(self.probe)
        width = ids.shape[1]
        if positions is None:
            more = max(0, longest - width)
        else:
            more = longest
            row = torch.arange(more, device=positions.device)[None]
            positions = torch.cat([positions, row.expand(len(positions), -1)], dim=1)
        if row_of is not None:
            row_of = functional.pad(row_of, (0, more), value=-1)
        _, calls = self.record(functional.pad(ids, (0, more)), past, positions, row_of)
        ours = TokenWindow(0, width)
        return tuple(
            part_of(call, ours, dims, before=before)
            for call, dims in zip(calls, self._dims, strict=True)
        )

    def forward(
        self, at: Activations, layer: int, window: TokenWindow, store: Boundaries, *, learn: bool
    ) -> None:
        """Run one layer on a window of tokens; its input must be there, and what is left of it.

        Afterwards the next layer's input is there. With `learn` the graph is kept for `backward`.
        """
        if self.graphs is not None and window == at.whole:
            # A plan that keeps a part says so by a number.
            keeps_all = getattr(self.around_layer, "bytes_per_token", None) is None
            made = self.graphs.forward(at, layer, keeps_all=keeps_all)
            if made is not None:
                at.inputs[layer + 1] = made
                if learn:
                    at.graphs[layer].append(Replayed(window))
                else:
                    at.inputs[layer] = None
                return
        leaf, out = self._pass(at, layer, window, learn=learn)
        if window == at.whole:
            at.inputs[layer + 1] = store.place(out) if learn else out
        else:
            self._fill(at, layer + 1, window, out, store)
        if learn:
            at.graphs[layer].append(_graph(window, leaf, out, self._units()))
        elif window.end == at.whole.end:
            at.inputs[layer] = at.key_values[layer] = None

    def backward_by_graphs(self, at: Activations, layer: int, window: TokenWindow) -> bool:
        """Run a layer back by graphs, whose last one sets `.grad`; False: that cannot be.

        What is given up in its middle may run again.
        """
        graphs, entries = self.graphs, at.graphs[layer]
        if graphs is None or not entries or not isinstance(entries[-1], Replayed):
            return False
        if window != at.whole or not graphs.replays(at, layer):
            return False
        graphs.backward(at, layer)
        entries.clear()
        at.inputs[layer] = None
        return True

    def backward(self, at: Activations, layer: int, window: TokenWindow) -> None:
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
            if isinstance(graph, Forgotten | Replayed):
                graph = _graph(window, *self._pass(at, layer, window, learn=True))
            if graph.edge is not None:
                # Not in autograd's thread of the device: each layer would change to it and back.
                with (
                    self.around_layer.backward(layer),
                    torch.autograd.set_multithreading_enabled(False),
                ):
                    torch.autograd.backward((graph.edge,), (gradient,))
        except BaseException:
            drop_broken_backward()
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
        self, at: Activations, layer: int, window: TokenWindow, *, learn: bool
    ) -> tuple[Tensor, Tensor]:
        """Run a layer's forward; returns what it read and what it made."""
        leaf = _leaf(at.inputs[layer], window, whole=window == at.whole).to(at.ids.device)
        leaf.grad = None
        leaf.requires_grad_(learn and layer > 0)
        with torch.set_grad_enabled(learn), self.around_layer.forward(layer):
            return leaf, self._run(at, layer, window, leaf)

    def _run(self, at: Activations, layer: int, window: TokenWindow, leaf: Tensor) -> Tensor:
        """Call a layer as the model would."""
        call = at.calls[layer]
        looking: AbstractContextManager[None] = NOTHING
        if window != at.whole or at.prefix is not None:
            before = at.prefix.tokens if at.prefix else 0
            call = part_of(call, window, self._dims[layer], before=before)
            looking = looking_back(self.config, window, _key_values(at, layer))
        with looking:
            out = self.layers[layer](leaf, *call.args, **call.kwargs)
        made: Tensor = out[0] if isinstance(out, tuple) else out
        return made

    def _fill(
        self, at: Activations, layer: int, window: TokenWindow, made: Tensor, store: Boundaries
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


def _graph(window: TokenWindow, leaf: Tensor, out: Tensor, units: int = 0) -> Graph:
    # The edge keeps the graph alive, not the output: that is in the boundary already.
    return Graph(window, leaf, get_gradient_edge(out) if out.requires_grad else None, units)


def _leaf(hidden: Tensor | None, window: TokenWindow, *, whole: bool) -> Tensor:
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


def _check_loss(model: nn.Module, config: Any) -> None:  # noqa: ANN401 - transformers' own
    """Refuse models whose own loss adds a term of their routers.

    Raises:
        UserError: the model's own adds one of its routers.
    """
    if getattr(config, "output_router_logits", False):
        raise unsupported(
            model,
            "its loss adds one of its routers (output_router_logits)",
            "Set output_router_logits to false in its config.json: tokens are learnt alone.",
        )


def move_buffers(model: nn.Module, to: torch.device) -> None:
    """Have a model's buffers on a device; other trees of modules that share them keep theirs."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(to)
