from __future__ import annotations

import pytest

from windrow_sidecar.engines.builtin.step.static_step import batch_buckets, bucket_of


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (4, (1, 2, 4)),
        (5, (1, 2, 4, 8)),
        (8, (1, 2, 4, 8)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (33, (1, 2, 4, 8, 16, 24, 32, 40)),
    ],
)
def test_buckets_grow_to_hold_the_largest_batch(most, expected):
    assert batch_buckets(most) == expected


@pytest.mark.parametrize("most", range(1, 70))
def test_every_batch_has_a_bucket_at_most_seven_rows_larger(most):
    buckets = batch_buckets(most)
    for batch in range(1, most + 1):
        assert batch <= bucket_of(buckets, batch) < batch + 8


def test_a_batch_beyond_the_largest_bucket_is_refused():
    with pytest.raises(ValueError, match="larger than the largest bucket, 4"):
        bucket_of((1, 2, 4), 5)
