"""Further frozen layers in chunks that decode has lent, on the host.

The fewest layers that can take turns lie in the worker's own memory, so that a job never waits for
them. What decode lends beyond what groups of micro-batches need holds further ones: each saves a
transfer up and one down. When decode asks a chunk back, the layer that lies in it is dropped, which
takes no copy, since its file has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windrow_sidecar._core import Arena
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.memory.tensors import arena_tensor


class LentLayers:
    """Puts layers into chunks, and takes them out.

    Args:
        arena: attached, as a peer.
        frozen: the layers; those that its own memory holds stay there.
    """

    def __init__(self, arena: Arena, frozen: FrozenLayers) -> None:
        self._arena, self._frozen = arena, frozen
        self._of_a_layer = -(-frozen.slot_bytes // arena.geometry.chunk_bytes)
        self._missing = frozen.depth - frozen.capacity
        self._lying: dict[int, Tensor] = {}  # by the first of the chunks that it lies in
        self._holes = 0  # chunks that no layer can use where they lie, at most so far

    @property
    def wanted_chunks(self) -> int:
        """How many would hold every layer that own memory does not, lying as they do now."""
        return self._missing * self._of_a_layer + self._holes

    @property
    def chunks(self) -> frozenset[int]:
        """In which layers lie."""
        return frozenset(chunk for first in self._lying for chunk in self._range(first))

    def leave(self, chunks: Iterable[int]) -> None:
        """Drop the layers that lie in any of these; nothing moves there any more afterwards."""
        leaving = set(chunks)
        for first in [at for at in self._lying if not leaving.isdisjoint(self._range(at))]:
            self._frozen.remove(self._lying.pop(first))

    def grow(self, spare: Sequence[int]) -> None:
        """Take as many layers as are missing into chunks side by side, from the highest on.

        Decode lends the highest first, so what is lent next lies below, and no hole is left.

        Args:
            spare: ascending ids of chunks that are held and that nothing lies in.
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
            holes += length  # what is lent next lies below, and cannot make that whole
        if len(self._lying) < self._missing:
            # Never less than before: a wish that trembles would move chunks to and fro.
            self._holes = max(self._holes, holes)

    def _range(self, first: int) -> range:
        return range(first, first + self._of_a_layer)

    def _slot(self, first: int) -> Tensor:
        offset = self._arena.chunk_offset(first)
        return arena_tensor(self._arena, offset, (self._frozen.slot_bytes,), torch.uint8)


ALIGN_BYTES = 64  # a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Chunks that lie side by side: ids [first, end)."""

    first: int
    end: int

    @property
    def chunks(self) -> int:
        """How many."""
        return self.end - self.first


def runs_of(chunks: Sequence[int]) -> tuple[ChunkRun, ...]:
    """Group ascending chunk ids into runs, highest first: decode asks for the lowest ids first."""
    runs: list[ChunkRun] = []
    for chunk in chunks:
        if runs and runs[-1].end == chunk:
            runs[-1] = ChunkRun(runs[-1].first, chunk + 1)
        else:
            runs.append(ChunkRun(chunk, chunk + 1))
    return tuple(reversed(runs))


def tokens_that_fit(
    runs: Sequence[ChunkRun], *, chunk_bytes: int, boundaries: int, bytes_per_token: int
) -> int:
    """Return the largest micro-batch, in padded tokens, whose boundaries all fit into the runs.

    A boundary lies in one run; each of `boundaries` has tokens * bytes_per_token bytes.
    """
    low, high = 0, sum(r.chunks for r in runs) * chunk_bytes // (boundaries * bytes_per_token)
    while low < high:
        middle = (low + high + 1) // 2
        size = aligned(middle * bytes_per_token)
        if sum(r.chunks * chunk_bytes // size for r in runs) >= boundaries:
            low = middle
        else:
            high = middle - 1
    return low


def chunks_needed(tokens: int, *, chunk_bytes: int, boundaries: int, bytes_per_token: int) -> int:
    """Return how many chunks side by side hold the boundaries of so many padded tokens."""
    return -(-boundaries * aligned(tokens * bytes_per_token) // chunk_bytes)


def aligned(n_bytes: int) -> int:
    """Round up to what a boundary begins at."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
