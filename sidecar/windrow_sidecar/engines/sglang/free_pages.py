"""Compute which free pages leave an allocator, without waiting for a GPU's other work.

Free pages are a tensor on the allocator's device, as SGLang keeps them. On a GPU only one of these
calls waits for the device, `pages_by_chunk`, and that behind its own few kernels where the stream
was idle before. Nothing here imports SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NO_PAGE = torch.iinfo(torch.int64).max


def is_idle(device: torch.device) -> bool:
    """Return whether the device has done all that this thread's stream was given."""
    if device.type != "cuda":
        return True
    return bool(torch.cuda.current_stream(device).query())


def pages_of_range(pages: range, device: torch.device) -> Tensor:
    """Return the ids of a range as int64 [n], made on the device: no copy waits for it."""
    return torch.arange(pages.start, pages.stop, dtype=torch.int64, device=device)


def pages_by_chunk(free: Tensor, pages_per_chunk: int, chunks: int) -> list[int]:
    """Return how many of the free pages, int64 [n], each chunk has."""
    counts = torch.zeros(chunks, dtype=torch.int64, device=free.device)
    counts.scatter_add_(0, free // pages_per_chunk, torch.ones_like(free))
    return [int(count) for count in counts.tolist()]


def without_chunks(
    free: Tensor, chosen: Sequence[int], *, pages_per_chunk: int, chunks: int, leaving: int
) -> Tensor:
    """Return the free pages, ascending, without those of some chunks.

    Args:
        free: page ids, int64 [n].
        chosen: chunks whose pages leave.
        pages_per_chunk: KV pages in a chunk.
        chunks: of the arena.
        leaving: how many of `free` are pages of those chunks.
    """
    gone = torch.tensor(chosen, dtype=torch.int64)
    if free.is_cuda:
        gone = gone.pin_memory().to(free.device, non_blocking=True)
    leaves = torch.zeros(chunks, dtype=torch.bool, device=free.device)
    leaves.scatter_(0, gone, torch.ones_like(gone, dtype=torch.bool))
    # Selecting by a mask would wait to learn how many are left; sorted to the end they are cut off.
    kept, _ = torch.sort(free.masked_fill(leaves[free // pages_per_chunk], _NO_PAGE))
    return kept[: len(free) - leaving]
