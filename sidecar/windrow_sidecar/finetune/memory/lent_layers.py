"""Keep further frozen layers in lent chunks, on the host.

The fewest layers that can take turns are in the worker's own memory, so that a job never waits for
them. What decode lends beyond what groups of micro-batches need holds further ones: each saves a
transfer up and one down. When decode asks a chunk back, the layer in it is dropped, which takes no
copy, since its file has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from windrow_sidecar._core import Arena
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.memory.tensors import arena_tensor


class LentLayers:
    """Place frozen layers in lent chunks, and remove them before chunks go back.

    Args:
        arena: attached, as a peer.
        frozen: the layers; those that its own memory holds stay there.
    """

    def __init__(self, arena: Arena, frozen: FrozenLayers) -> None:
        self._arena, self._frozen = arena, frozen
        self._of_a_layer = -(-frozen.slot_bytes // arena.geometry.chunk_bytes)
        self._missing = frozen.depth - frozen.capacity
        self._lying: dict[int, Tensor] = {}  # by the first of its chunks
        self._holes = 0  # chunks that no layer can use where they lie, at most so far

    @property
    def wanted_chunks(self) -> int:
        """Chunks that would hold every layer that own memory does not, in their present places."""
        return self._missing * self._of_a_layer + self._holes

    @property
    def chunks(self) -> frozenset[int]:
        """Chunks that hold layers."""
        return frozenset(chunk for first in self._lying for chunk in self._range(first))

    def leave(self, chunks: Iterable[int]) -> None:
        """Drop the layers that lie in any of these; nothing moves there any more afterwards."""
        leaving = set(chunks)
        for first in [at for at in self._lying if not leaving.isdisjoint(self._range(at))]:
            self._frozen.remove(self._lying.pop(first))

    def grow(self, spare: Sequence[int]) -> None:
        """Take as many layers as are missing into chunks side by side, from the highest on.

        Decode lends the highest first, so what is lent next is below, and no hole is left.

        Args:
            spare: ascending ids of chunks that are held and empty.
        """
        above, length, holes = -1, 0, 0  # the lowest chunk of a run so far, and what is left of it
        for chunk in reversed(spare):
            if chunk + 1 != above:
                holes, length = holes + length, 0
            above, length = chunk, length + 1
            if len(self._lying) < self._missing and length == self._of_a_layer:
                self._lying[chunk] = self._slot(chunk)
                self._frozen.add(self._lying[chunk])
                length = 0
        if any(chunk < above for chunk in self._lying):
            holes += length  # what is lent next is below, and cannot make that whole
        if len(self._lying) < self._missing:
            # Never less than before: a wish that trembles would move chunks to and fro.
            self._holes = max(self._holes, holes)

    def _range(self, first: int) -> range:
        return range(first, first + self._of_a_layer)

    def _slot(self, first: int) -> Tensor:
        offset = self._arena.chunk_offset(first)
        return arena_tensor(self._arena, offset, (self._frozen.slot_bytes,), torch.uint8)
