"""Which batch sizes a step is prepared for: a graph has one shape, and requests come and go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# A GEMM's tile has 8 rows at least: between multiples of 8 nothing is gained.
_SMALL = (1, 2, 4)
_STEP = 8


def batch_buckets(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8, the last one holding `max_batch`. 64 requests: 11 buckets."""
    top = -(-max_batch // _STEP) * _STEP
    return (
        *(n for n in _SMALL if n < max_batch),
        *(range(_STEP, top + 1, _STEP) if max_batch > _SMALL[-1] else (max_batch,)),
    )


def bucket_of(buckets: Sequence[int], batch: int) -> int:
    """The smallest bucket that holds the batch. Raises ValueError for one that none holds."""
    at = bisect_left(buckets, batch)
    if at == len(buckets):
        raise ValueError(f"a batch of {batch} is larger than the largest bucket, {buckets[-1]}")
    return buckets[at]
