"""What a sidecar says of ranks that differ."""

from __future__ import annotations

import pytest

from windrow.proto.agent_pb2 import RankStats
from windrow_sidecar.agent.rank_difference import rank_difference


def ranks(*figures: tuple[float, int]) -> list[RankStats]:
    return [RankStats(computed_seconds=seconds, chunks_lent=lent) for seconds, lent in figures]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([], [], ""),
        ([(1, 0)], [(9, 0)], ""),
        ([], [(1, 0), (9, 0)], ""),  # the first report
        ([(1, 4), (1, 4)], [(2, 4), (2.4, 4)], ""),
        ([(1, 0), (1, 0)], [(1.5, 0), (2, 0)], "rank 1 computes 2.0 times as long as rank 0"),
        ([(1, 0), (1, 0)], [(1.01, 0), (1.04, 0)], ""),  # next to nothing was computed
        ([(1, 0), (1, 0)], [(1, 0), (1, 0)], ""),
        # Between the answers of two ranks, in one report each.
        ([(1, 4), (1, 7)], [(2, 7), (2, 7)], ""),
        (
            [(1, 0), (1, 3), (1, 0)],
            [(2, 0), (2, 3), (2, 0)],
            "the worker of rank 1 has 3 more chunks than that of rank 0",
        ),
    ],
)
def test_ranks_that_differ_are_named_and_others_are_not(before, now, said):
    assert rank_difference(ranks(*before), ranks(*now)) == said
