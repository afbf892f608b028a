"""Keep a window of frozen layers in memory, and load the others from files when needed.

Around each layer's forward and backward (see `around.AroundLayer`): its weights are there, the
next ones are on their way. A layer that leaves is dropped, since its file has it; so giving memory
back takes no copy. Graphs must not hold weights: see `activations.planned`, which looks them up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windrow_sidecar.engines.streaming.copying import Copier, Part, Transfer
from windrow_sidecar.engines.streaming.schedule import coming, moves
from windrow_sidecar.engines.streaming.streamed_layers import Moved
from windrow_sidecar.engines.streaming.tensor_files import Stored, absent

ALIGN_BYTES = 64
# Memory for one layer: uint8 of at least so many bytes.
MakeSlot = Callable[[int], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Frozen parameters of one layer, and the place of each in a file."""

    parameters: tuple[tuple[nn.Parameter, Stored], ...]

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, each parameter aligned."""
        return sum(_aligned(_bytes_of(parameter)) for parameter, _ in self.parameters)

    def attach(self, slot: Tensor) -> list[Part]:
        """Let the parameters lie in `slot`, uint8 [n_bytes]; return what has to be copied there.

        The parameters are views of it until `detach`; its start is aligned to `ALIGN_BYTES`.
        """
        parts, begin = [], 0
        for parameter, stored in self.parameters:
            n_bytes = _bytes_of(parameter)
            room = slot[begin : begin + n_bytes].view(parameter.dtype).view(parameter.shape)
            parameter.data = room
            parts.append(Part(stored, room))
            begin += _aligned(n_bytes)
        return parts

    def detach(self) -> None:
        """Leave only the shapes: computing with them gives NaN, and does not go unnoticed."""
        for parameter, _ in self.parameters:
            parameter.data = absent(tuple(parameter.shape), parameter.dtype, parameter.device)


class FrozenLayers:
    """Cache of at most `capacity` frozen layers, prefetched in the order of their visits.

    Args:
        layers: all of the model, from the bottom.
        copier: moves them.
        capacity: 1 at least; 2 let the next layer come while one runs.
        make_slot: memory for one layer.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        copier: Copier,
        *,
        capacity: int,
        make_slot: MakeSlot = lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers, self._copier, self._clock = layers, copier, clock
        self._capacity, self._make_slot = capacity, make_slot
        self.slot_bytes = max(layer.n_bytes for layer in layers)
        self._free: list[Tensor] = []
        self._slots: dict[int, Tensor] = {}
        self._coming: dict[int, Transfer] = {}
        self._order: tuple[int, ...] = tuple(range(len(layers)))
        self.moved = Moved()

    @property
    def capacity(self) -> int:
        """Layers that may be in memory."""
        return self._capacity

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def slots(self) -> int:
        """Layers for which memory is held."""
        return len(self._slots) + len(self._free)

    @property
    def all_fit(self) -> bool:
        """True where no layer has to leave for another."""
        return self._capacity >= len(self._layers)

    @property
    def bytes_per_s(self) -> float:
        """Speed at which layers come (see `Copier.bytes_per_s`)."""
        return self._copier.bytes_per_s

    @property
    def resident(self) -> frozenset[int]:
        """Layers in memory or on their way there."""
        return frozenset(self._slots)

    @contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        """Hold the layer's weights while its forward runs."""
        self._visit(coming(len(self._layers), layer, up=True, returns=torch.is_grad_enabled()))
        yield

    @contextmanager
    def backward(self, layer: int) -> Iterator[None]:
        """Hold the layer's weights while its backward runs."""
        self._visit(coming(len(self._layers), layer, up=False))
        yield

    def resize(self, capacity: int) -> None:
        """Use memory for so many layers from now on; to be called between tasklets.

        What is too much is let go at once, farthest in the schedule first. 0: no memory at all; a
        layer that runs then needs one again.
        """
        self._capacity = capacity
        for layer in moves(self._order, self._slots.keys(), capacity).evict:
            self._evict(layer)
        del self._free[max(0, capacity - len(self._slots)) :]

    def add(self, slot: Tensor) -> None:
        """Hold one layer more from now on, in memory of the caller's: uint8 [slot_bytes]."""
        self._free.append(slot)
        self._capacity += 1

    def remove(self, slot: Tensor) -> None:
        """Use no more what `add` was given, uint8 [slot_bytes]; to be called between tasklets.

        The layer in it is dropped, wherever it is in the schedule, and nothing moves there any more
        once this is back.
        """
        for layer in [layer for layer, held in self._slots.items() if held is slot]:
            self._evict(layer)
        self._free = [free for free in self._free if free is not slot]
        self._capacity -= 1

    def close(self) -> None:
        """Let all go and end the copying."""
        self.resize(0)
        self._copier.close()

    def _visit(self, order: tuple[int, ...]) -> None:
        self._order, layer = order, order[0]
        wanted = moves(order, self._slots.keys(), max(1, self._capacity))
        for old in wanted.evict:
            self._evict(old)
        for new in wanted.load:
            slot = self._free.pop() if self._free else self._make_slot(self.slot_bytes)
            self._slots[new] = slot
            self._coming[new] = self._copier.start(self._layers[new].attach(slot))
        if layer in self._coming:
            begun = self._clock()
            self._arrive(layer)
            self.moved.waited_s += self._clock() - begun

    def _arrive(self, layer: int) -> None:
        transfer = self._coming.pop(layer)
        try:
            transfer.wait()
            self._copier.hold_back(transfer)
        finally:
            self._account(layer)
            if transfer.error is not None:
                self._evict(layer)

    def _evict(self, layer: int) -> None:
        transfer = self._coming.pop(layer, None)
        if transfer is not None:
            transfer.cancel()
            self._account(layer)
        self._layers[layer].detach()
        self._free.append(self._slots.pop(layer))

    def _account(self, layer: int) -> None:
        self.moved.count(self._layers[layer].n_bytes, self._copier.seconds)


def weights_of(
    layers: Sequence[nn.Module], prefixes: Sequence[str], stored: Mapping[str, Stored]
) -> list[LayerWeights]:
    """Match the parameters of each layer with a checkpoint.

    Args:
        layers: as yet without an adapter.
        prefixes: of the names of each layer's parameters, with a dot at the end.
        stored: of the checkpoint.

    Raises:
        KeyError: the checkpoint keeps a parameter under another name or in another shape.
    """
    found = []
    for layer, prefix in zip(layers, prefixes, strict=True):
        pairs = []
        for name, parameter in layer.named_parameters():
            at = stored[prefix + name]
            if at.shape != tuple(parameter.shape):
                raise KeyError(prefix + name)
            pairs.append((parameter, at))
        found.append(LayerWeights(tuple(pairs)))
    return found


def _bytes_of(parameter: Tensor) -> int:
    return parameter.numel() * parameter.dtype.itemsize


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
