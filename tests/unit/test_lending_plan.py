from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windrow_sidecar._core import GROW_REST_NS, plan_lending

LONG_AGO = 1 << 60


class ChunkCounts(NamedTuple):
    """Counts of chunks, in the order of an arena."""

    free: int
    kv: int
    lent: int
    reserved: int
    draining: int


class LendingPlan(NamedTuple):
    """Plan of the core."""

    target: int
    lend: int = 0
    revoke: int = 0


def plan(chunks: ChunkCounts, **changes) -> LendingPlan:
    values = {
        "wanted": 64,
        "limit": 64,
        "reserve": 4,
        "kv_short": False,
        "since_revoke_ns": LONG_AGO,
    }
    return LendingPlan(*plan_lending(chunks, **{**values, **changes}))


@pytest.mark.parametrize(
    ("situation", "chunks", "changes", "expected"),
    [
        (
            "free chunks are lent, but for a second reserve",
            ChunkCounts(100, 24, 0, 4, 0),
            {},
            LendingPlan(64, lend=64),
        ),
        (
            "up to what is wanted",
            ChunkCounts(100, 24, 3, 4, 0),
            {"wanted": 8},
            LendingPlan(8, lend=5),
        ),
        ("up to the limit", ChunkCounts(100, 24, 0, 4, 0), {"limit": 10}, LendingPlan(10, lend=10)),
        (
            "a short reserve is filled first",
            ChunkCounts(12, 100, 0, 2, 0),
            {},
            LendingPlan(6, lend=6),
        ),
        ("nothing to spare", ChunkCounts(4, 100, 20, 4, 0), {}, LendingPlan(20)),
        (
            "not right after a revocation",
            ChunkCounts(50, 54, 20, 4, 0),
            {"since_revoke_ns": GROW_REST_NS - 1},
            LendingPlan(20),
        ),
        (
            "the reserve is eaten into: as much comes back",
            ChunkCounts(0, 105, 20, 1, 2),
            {},
            LendingPlan(19, revoke=1),
        ),
        (
            "what drains already counts as asked for",
            ChunkCounts(0, 105, 20, 1, 3),
            {},
            LendingPlan(20),
        ),
        (
            "a request finds no room: a quarter comes back, whatever is free",
            ChunkCounts(3, 101, 20, 4, 0),
            {"kv_short": True},
            LendingPlan(15, revoke=5),
        ),
        (
            "but not twice before it has drained",
            ChunkCounts(3, 96, 20, 4, 5),
            {"kv_short": True},
            LendingPlan(20),
        ),
        (
            "a lower limit takes the rest back",
            ChunkCounts(80, 24, 20, 4, 0),
            {"limit": 5},
            LendingPlan(5, revoke=15),
        ),
        (
            "a worker that wants less",
            ChunkCounts(80, 24, 20, 4, 0),
            {"wanted": 0},
            LendingPlan(0, revoke=20),
        ),
    ],
)
def test_what_is_lent_and_asked_back(situation, chunks, changes, expected):
    assert plan(chunks, **changes) == expected, situation


counts = st.integers(0, 64)


@given(
    st.builds(ChunkCounts, counts, counts, counts, counts, counts),
    counts,
    counts,
    counts,
    st.booleans(),
)
def test_a_plan_never_exceeds_what_there_is_nor_touches_the_reserve(
    chunks, wanted, limit, reserve, kv_short
):
    made = plan(chunks, wanted=wanted, limit=limit, reserve=reserve, kv_short=kv_short)
    assert 0 <= made.revoke <= chunks.lent
    assert 0 <= made.lend <= max(0, chunks.free)
    assert made.target == chunks.lent + made.lend - made.revoke
    assert not (made.lend and made.revoke)
    if made.lend:
        assert made.target <= min(wanted, limit)
        assert chunks.free - made.lend + min(chunks.reserved, reserve) >= reserve


def test_lending_and_revoking_come_to_rest():
    """Repeated plans with a quiet decode reach a fixed point within two rounds from any start."""
    free, lent = 100, 0
    seen = []
    for _ in range(4):
        made = plan(ChunkCounts(free, 20, lent, 4, 0))
        free, lent = free - made.lend + made.revoke, lent + made.lend - made.revoke
        seen.append(lent)
    assert seen == [64, 64, 64, 64]
