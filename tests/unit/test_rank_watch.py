"""Ranks that all rest in a tasklet are noticed, and ranks that are slow are not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from waiting import wait_until

from windrow.conditions import Reason
from windrow_sidecar.finetune.job.rank_watch import RankWatch, late_after_s, worked_s

BOUND_S = 5.0


class Ranks:
    """Two ranks and a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s, self.worked = 100.0, {1: 3.0, 2: 4.0}
        self.watch = RankWatch(
            [1, 2],
            lambda: BOUND_S,
            lambda found: None,
            worked=lambda process: self.worked[process],
            clock=lambda: self.now_s,
        )

    def passes(self, looks: int, *, works: tuple[float, float] = (0.0, 0.0)):
        """Look so often, half a second apart; `works`: of each rank, as a share of the time."""
        found = None
        for _ in range(looks):
            self.now_s += 0.5
            for process, share in zip((1, 2), works, strict=True):
                self.worked[process] += 0.5 * share
            found = found or self.watch.look()
        return found


@pytest.fixture
def ranks():
    return Ranks()


def test_ranks_that_rest_in_a_tasklet_are_told_once_the_bound_is_over(ranks):
    ranks.watch.begin()
    assert ranks.passes(10) is None
    found = ranks.passes(2)
    assert found.reason == Reason.NO_PROGRESS
    assert str(found) == "no rank has gone on with its part for 5 s"


def test_one_that_computes_or_waits_for_a_core_goes_on(ranks):
    ranks.watch.begin()
    assert ranks.passes(100, works=(0.0, 0.1)) is None
    assert ranks.passes(100, works=(0.05, 0.0)) is None


def test_what_libraries_do_now_and_then_is_no_work(ranks):
    ranks.watch.begin()
    assert ranks.passes(20, works=(0.005, 0.005)) is not None


def test_ranks_may_rest_between_two_tasklets(ranks):
    assert ranks.passes(100) is None
    ranks.watch.begin()
    ranks.passes(8)
    ranks.watch.end()
    assert ranks.passes(100) is None


def test_each_tasklet_has_a_time_of_its_own(ranks):
    for _ in range(10):
        ranks.watch.begin()
        assert ranks.passes(6) is None
        ranks.watch.end()


def test_a_watch_that_was_stopped_itself_begins_again(ranks):
    ranks.watch.begin()
    ranks.passes(8)
    ranks.now_s += 60.0
    assert ranks.passes(8) is None


def test_a_rank_that_waits_for_a_disk_or_has_ended_is_not_late(ranks):
    ranks.watch.begin()
    ranks.worked[2] = float("inf")
    assert ranks.passes(100) is None


def test_the_bound_is_of_the_policy_and_never_short():
    assert late_after_s(5_000) == BOUND_S
    assert late_after_s(500_000) == 10.0


def test_a_process_that_is_stopped_works_no_more_and_one_that_has_ended_is_told():
    process = os.fork()
    if not process:
        while True:
            pass
    try:
        assert 0 <= worked_s(process) < float("inf")
        os.kill(process, signal.SIGSTOP)
        stat = Path(f"/proc/{process}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "its stop")
        first = worked_s(process)
        assert worked_s(process) == first
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert worked_s(process) == float("inf")
    assert worked_s(os.getpid()) < float("inf")
