"""Packed layers as CUDA graphs: attention and MLP, forward and backward, each launched by one call.

A set of graphs is for one share of the device and one shape of a micro-batch; each of its layers is
captured when it first runs. What a layer leaves for its backward, and the activations between
layers, have addresses that stay, so one group at a time runs by graphs; another runs as packed
layers do. Between two graphs the layer may be suspended.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from windrow_sidecar.compute.captures import GraphCaptures, Launch, NoMemory, PoolId
from windrow_sidecar.compute.device import Mark
from windrow_sidecar.finetune.adapter.gradient_room import GradientRoom
from windrow_sidecar.finetune.adapter.graph_inputs import call_of, numbered
from windrow_sidecar.finetune.adapter.layer_pass import LayerPass, split_by
from windrow_sidecar.finetune.adapter.packed_layer import PackedLayer, refresh_all
from windrow_sidecar.finetune.model.boundaries import Activations

log = logging.getLogger(__name__)

# Shares of the device that have graphs, and shapes of micro-batches on each.
MOST_SHARES, MOST_SHAPES = 4, 4
# Of the policy's bound, for the longest graph: decode waits for the graph that runs.
OF_BOUND = 3
# Nodes of a layer's graphs: 30 launches of Triton's kernels, products and attention, as
# `benchmarks/host_cost.py` counts them, and copies of the output and of both kinds of gradients to
# memory that stays. Without Triton's kernels there are more.
NODES_OF_LAYER = 33
# Groups that run packed after memory was too short for a capture.
_RESTS = 16


@dataclass(slots=True)
class _Graphed:
    """Graphs of one layer.

    Attributes:
        ran: what was captured; it holds the memory that graphs use.
        back: of MLP and attention, backward; None: not captured yet.
    """

    ran: LayerPass
    attention: Launch
    mlp: Launch
    back: tuple[Launch, Launch] | None = None


@dataclass(slots=True)
class _Set:
    """Graphs of all layers for one share and one shape.

    Attributes:
        pool: of their memory.
        like: the arguments of each layer, tensors replaced by their numbers.
        statics: those tensors, where graphs read them; empty before the first capture.
        boundaries: by layer, what it reads; the last is what the last one makes.
        filled: of which calls the statics are; None: of none.
        marks: around the graphs of a layer that is measured, until they are read.
        longest_us: of a graph; 0: not measured yet.
        rests: groups that do not try it, since memory was short.
    """

    pool: PoolId
    tokens: int
    units: int
    like: tuple[Any, ...]
    layers: list[_Graphed | None]
    boundaries: list[Tensor | None]
    statics: list[Tensor] = field(default_factory=list)
    gradient: Tensor | None = None
    filled: object = None
    marks: list[Mark] = field(default_factory=list)
    longest_us: float = 0.0
    rests: int = 0


class LayerGraphs:
    """Runs the layers of a stack by graphs where it can (see `DecoderStack.graphs`).

    Args:
        programs: of its layers.
        captures: of the device.
        mark: the point behind everything that is queued (see `ComputeDevice.mark`).
        point: called between two graphs; it may raise.
        units: of the device that the next graphs run on.
        bound_us: how long decode may have to wait for what runs; 0: nobody waits.
    """

    def __init__(
        self,
        programs: Sequence[PackedLayer],
        captures: GraphCaptures,
        *,
        mark: Callable[[], Mark],
        point: Callable[[], None] | None = None,
        units: Callable[[], int] = lambda: 0,
        bound_us: Callable[[], int] = lambda: 0,
    ) -> None:
        self._programs, self._captures, self._mark = tuple(programs), captures, mark
        self._point, self._units, self._bound_us = point or _go_on, units, bound_us
        self._learns: list[list[Tensor]] = [
            [p for group in program.groups for p in group.learns] for program in programs
        ]
        self._firsts = [learns[0] for learns in self._learns]
        self._versions: list[int] = []
        self._sets: dict[tuple[Any, ...], _Set] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._us_a_token: dict[int, float] = {}  # by units: of the longest graph
        self._rooms: list[GradientRoom | None] = [None for _ in programs]
        self._owner: weakref.ref[Activations] | None = None
        self._set: _Set | None = None
        self._next: tuple[Launch, Launch] = (_go_on, _go_on)  # that `replays` has found
        self.refused = ""

    @property
    def driver_bytes(self) -> int:
        """Bytes that the driver took for graphs."""
        return self._captures.driver_bytes

    @property
    def expected_bytes(self) -> int:
        """Bytes that the driver is expected to take for the graphs of one shape on one share."""
        return len(self._programs) * NODES_OF_LAYER * self._captures.node_bytes

    @property
    def backed_bytes(self) -> int:
        """Bytes of lent memory that graphs have; a group that runs by them takes no others."""
        return self._captures.backed_bytes()

    @property
    def captured(self) -> int:
        """Graphs that there are."""
        found = [one for of in self._sets.values() for one in of.layers if one is not None]
        return sum(2 if one.back is None else 4 for one in found)

    def most_tokens(self) -> int:
        """Return the padded tokens whose graphs keep within the bound on the share; 0: any."""
        us = self._us_a_token.get(self._units(), 0.0)
        bound_us = self._bound_us()
        return max(1, int(bound_us / OF_BOUND / us)) if us and bound_us else 0

    def forward(self, at: Activations, layer: int, *, keeps_all: bool) -> Tensor | None:
        """Run one layer on whole rows; return its output, [rows, tokens, hidden]; None: not so.

        Args:
            at: of the micro-batch; its input to the layer is there.
            layer: which one.
            keeps_all: whether layers may keep all that their backward reads.
        """
        if layer == 0:
            self._choose(at, keeps_all=keeps_all)
        of = self._of(at)
        if of is None:
            return None
        one = of.layers[layer] or self._captured(of, at, layer)
        if one is None:
            return None
        hidden, reads, made = at.inputs[layer], of.boundaries[layer], of.boundaries[layer + 1]
        assert hidden is not None
        assert reads is not None
        assert made is not None
        if hidden.data_ptr() != reads.data_ptr():
            reads.data.copy_(hidden.detach())
        if not of.longest_us and layer == len(self._programs) // 2:
            of.marks = [self._mark()]
            one.attention()
            of.marks.append(self._mark())
            self._point()
            one.mlp()
            of.marks.append(self._mark())
            return made.data
        one.attention()
        self._point()
        one.mlp()
        return made.data

    def replays(self, at: Activations, layer: int) -> bool:
        """Return whether the layer, which ran by graphs, can run back by graphs now.

        Not on fewer units than its forward ran on: a captured kernel keeps its share.
        """
        of = self._of(at)
        if of is None or self._units() < of.units or self._firsts[layer].grad is not None:
            return False
        one, room = of.layers[layer], self._room(layer)
        if one is None or not room.is_free:
            return False
        if one.back is not None:
            self._next = one.back
            return True
        try:
            self._next = one.back = self._captured_back(of, one, layer, room.flat)
        except NoMemory:
            return False
        except Exception as error:  # noqa: BLE001 - of a driver, a library, a kernel
            self._refuse(f"a capture failed ({type(error).__name__}: {error})")
            return False
        return True

    def backward(self, at: Activations, layer: int) -> None:
        """Run a layer back for which `replays` said so; sets `.grad` of what learns.

        Takes `at.gradient` at the output, and leaves there that at the input. What is given up
        between the two graphs may run again.
        """
        of, (mlp, attention) = self._set, self._next
        assert of is not None
        assert of.gradient is not None
        assert at.gradient is not None
        if at.gradient.data_ptr() != of.gradient.data_ptr():
            of.gradient.data.copy_(at.gradient)
            at.gradient = of.gradient.data
        mlp()
        self._point()
        attention()
        self._room(layer).hand_over()

    def leave(self, ats: Sequence[Activations] = ()) -> bool:
        """Give the memory of graphs back, addresses and captures stay.

        Args:
            ats: groups on their way, whose layers' inputs move to other memory of the device.

        Returns:
            False: there was no room for those inputs; nothing was given back.
        """
        if not self.backed_bytes:
            return True
        ours = [of for of in self._sets.values() if of.statics]
        for at in ats:
            try:
                inputs = [self._outside(ours, hidden) for hidden in at.inputs]
                gradient = self._outside(ours, at.gradient)
            except RuntimeError as error:
                log.info("no room beside the memory of graphs: %s", error)
                return False
            at.inputs, at.gradient = inputs, gradient
        self._owner = self._set = None
        for of in ours:
            of.filled = None
        self._captures.leave()
        return True

    def drop(self) -> None:
        """Forget all graphs: what they read or write is about to move."""
        pools = [of.pool for of in self._sets.values()]
        self._owner = self._set = None
        self._next = (_go_on, _go_on)
        self._captures.drop(self._sets.clear)
        self._rooms = [None for _ in self._programs]
        self._versions = []
        for pool in pools:
            self._captures.end(pool)
        if pools:
            self._captures.leave()

    def _of(self, at: Activations) -> _Set | None:
        return self._set if self._owner is not None and self._owner() is at else None

    def _choose(self, at: Activations, *, keeps_all: bool) -> None:
        """Bind the group that begins to a set of graphs, if one can run it."""
        if self._owner is not None and self._owner() not in (None, at):
            return  # its memory is in use
        self._owner = self._set = None
        first = self._programs[0]
        is_plain = at.prefix is None and first.is_adapted and first.qkv.joining is None
        if keeps_all and not self.refused and is_plain:
            self._set = self._usable(at)
        if self._set is None:
            if self.backed_bytes:  # this group needs ordinary memory
                self.leave()
            return
        self._owner = weakref.ref(at)
        self._refresh()
        self._fill(self._set, at)

    def _usable(self, at: Activations) -> _Set | None:
        units, rows, tokens = self._units(), *at.ids.shape
        if 0 < self.most_tokens() < rows * tokens:
            return None
        share = self._captures.share()
        key = (share, rows, tokens)
        of = self._sets.get(key)
        if of is None:
            if key not in self._seen:
                # Packed the first time: kernels compile, and libraries take what they keep.
                self._seen.add(key)
                return None
            of = self._new(key, at, units)
        elif of.filled is not at.calls and of.like != numbered(at.calls)[0]:
            return None
        if of is None or not self._is_short(of, units):
            return None
        if of.rests:
            of.rests -= 1
            return None
        return of if self._captures.ready(of.pool) else None

    def _new(self, key: tuple[Any, ...], at: Activations, units: int) -> _Set | None:
        share = key[0]
        shares = {known[0] for known in self._sets}
        shapes = sum(known[0] == share for known in self._sets)
        if shapes >= MOST_SHAPES or (share not in shares and len(shares) >= MOST_SHARES):
            return None
        like, tensors = numbered(at.calls)
        if any(tensor.requires_grad for tensor in tensors):
            return None
        depth = len(self._programs)
        of = _Set(
            self._captures.pool(),
            key[1] * key[2],
            units,
            like,
            [None] * depth,
            [None] * (depth + 1),
        )
        self._sets[key] = of
        return of

    def _is_short(self, of: _Set, units: int) -> bool:
        """Return whether its longest graph keeps within the bound, as far as that is known."""
        if of.marks and of.marks[-1].done():
            times = [mark.at_ns() for mark in of.marks]
            # A backward of a part takes about twice as long as its forward.
            spans = [b - a for a, b in pairwise(times)]
            of.longest_us, of.marks = max(1.0, 2 * max(spans) / 1e3), []
            self._us_a_token[units] = of.longest_us / of.tokens
        most_us = self._bound_us() / OF_BOUND
        if not most_us or of.longest_us <= most_us:
            return True
        log.info(
            "graphs for %d tokens on %d units take %.0f us, more than %.0f: rows are split",
            *(of.tokens, units, of.longest_us, most_us),
        )
        return False

    def _refresh(self) -> None:
        """Make the packed copies again where the adapter has changed."""
        versions = [parameter._version for parameter in self._firsts]
        if versions != self._versions:
            refresh_all(self._programs)
            self._versions = [parameter._version for parameter in self._firsts]

    def _fill(self, of: _Set, at: Activations) -> None:
        """Have graphs read this group's positions and masks."""
        if of.statics and of.filled is not at.calls:
            _, tensors = numbered(at.calls)
            for static, tensor in zip(of.statics, tensors, strict=True):
                static.data.copy_(tensor)
            for other in self._sets.values():  # they may be over the same memory
                other.filled = None
            of.filled = at.calls

    def _captured(self, of: _Set, at: Activations, layer: int) -> _Graphed | None:
        hidden = at.inputs[layer]
        assert hidden is not None
        program = self._programs[layer]
        made: list[LayerPass] = []
        memory = list(of.statics), of.gradient, list(of.boundaries)

        def prepare() -> None:
            # Again from the beginning: what the last try took of the pool is gone.
            of.statics, of.gradient, of.boundaries = list(memory[0]), memory[1], list(memory[2])
            made[:] = [self._over_memory(of, at, layer, hidden)]

        def forward(split: Launch) -> None:
            with split_by(program, split):
                made[0].forward()

        try:
            program.refresh()
            attention, mlp = self._captures.capture(of.pool, prepare, forward)
            self._fill(of, at)
        except NoMemory:
            of.rests = _RESTS
            self._owner = self._set = None
            self.leave([at])
            return None
        except Exception as error:  # noqa: BLE001 - of a driver, a library, a kernel
            self._refuse(f"a capture failed ({type(error).__name__}: {error})")
            return None
        of.layers[layer] = one = _Graphed(made[0], attention, mlp)
        return one

    def _captured_back(
        self, of: _Set, one: _Graphed, layer: int, room: Tensor
    ) -> tuple[Launch, Launch]:
        program = self._programs[layer]

        def backward(split: Launch) -> None:
            with split_by(program, split):
                one.ran.backward(room, keeps=self._captures.keeps)

        mlp, attention = self._captures.capture(of.pool, _go_on, backward)
        return mlp, attention

    def _over_memory(self, of: _Set, at: Activations, layer: int, hidden: Tensor) -> LayerPass:
        """Return the layer over memory of the pool; to be called in a capture."""
        if of.gradient is None:
            _, tensors = numbered(at.calls)
            of.statics = [torch.empty_like(tensor) for tensor in tensors]
            of.gradient = torch.empty_like(hidden)
        for n in (layer, layer + 1):
            if of.boundaries[n] is None:
                of.boundaries[n] = torch.empty_like(hidden)
        reads, makes = of.boundaries[layer], of.boundaries[layer + 1]
        assert reads is not None
        assert makes is not None
        call = call_of(of.like[layer], of.statics)
        program = self._programs[layer]
        return LayerPass(program, call, reads, makes, of.gradient, wants_input=layer > 0)

    def _room(self, layer: int) -> GradientRoom:
        room = self._rooms[layer]
        if room is None:
            room = self._rooms[layer] = GradientRoom(self._learns[layer])
        return room

    def _outside(self, ours: Sequence[_Set], hidden: Tensor | None) -> Tensor | None:
        if hidden is None:
            return None
        at = hidden.data_ptr()
        inside = (b for of in ours for b in (*of.boundaries, of.gradient) if b is not None)
        return hidden.clone() if any(at == b.data_ptr() for b in inside) else hidden

    def _refuse(self, why: str) -> None:
        self.refused = why
        log.warning("layers run packed, not as graphs: %s", why)
        self._owner = self._set = None


def _go_on() -> None:
    """Do nothing: nobody suspends the layer."""
