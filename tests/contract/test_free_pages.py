"""Free pages of chunks that leave SGLang's allocator, as its own operators would find them."""

from __future__ import annotations

import pytest
import torch

from windrow_sidecar.engines.sglang.free_pages import (
    is_idle,
    pages_by_chunk,
    pages_of_range,
    without_chunks,
)

PAGES, CHUNKS = 4, 9
HOST = torch.device("cpu")


@pytest.mark.parametrize("seed", range(4))
def test_what_stays_is_what_a_mask_would_leave(seed):
    draw = torch.Generator().manual_seed(seed)
    free = torch.randperm(PAGES * CHUNKS, generator=draw)[:23]
    where = free // PAGES
    counts = pages_by_chunk(free, PAGES, CHUNKS)
    assert counts == torch.bincount(where, minlength=CHUNKS).tolist()
    chosen = [1, 5, 8]
    leaving = sum(counts[chunk] for chunk in chosen)
    found = without_chunks(free, chosen, pages_per_chunk=PAGES, chunks=CHUNKS, leaving=leaving)
    expected, _ = torch.sort(free[~torch.isin(where, torch.tensor(chosen))])
    assert torch.equal(found, expected)


def test_pages_of_a_chunk_are_made_where_they_are_used():
    assert pages_of_range(range(5, 9), HOST).tolist() == [5, 6, 7, 8]
    assert pages_of_range(range(5, 9), HOST).dtype is torch.int64
    assert is_idle(HOST)
