"""Compute where boundary activations fit into runs of adjacent chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN_BYTES = 64  # a cache line, and the widest vector register


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Adjacent chunks: ids [first, end)."""

    first: int
    end: int

    @property
    def chunks(self) -> int:
        """Chunks of the run."""
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

    A boundary is in one run; each of `boundaries` has tokens * bytes_per_token bytes.
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
    """Return how many adjacent chunks hold the boundaries of that many padded tokens."""
    return -(-boundaries * aligned(tokens * bytes_per_token) // chunk_bytes)


def aligned(n_bytes: int) -> int:
    """Round up to the alignment of boundaries."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES
