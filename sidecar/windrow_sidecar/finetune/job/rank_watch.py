"""Notice that the ranks of a job have come to rest in the middle of an act: one is late.

A tasklet has collectives in it, as a checkpoint has, so a rank that does not come makes all others
wait, and they use no core then. Time alone says nothing: a machine that is shared by many is slow.
Ranks that compute, or are ready and have no core, or wait for a disk, go on, however slowly.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from windrow.conditions import Reason
from windrow_sidecar.finetune.training.health import Unhealthy

# So many times the bound of the policy on what is in flight, which is what a tasklet is sized for;
# and so long in any case, that a moment without a core or a slow collective is none.
LATE_FACTOR, LATE_LEAST_S = 20.0, 5.0
_LOOK_EVERY_S = 0.5
# Of the time between two looks: what threads of libraries take that wake up now and then.
_AT_REST = 0.02


def late_after_s(in_flight_bound_us: int) -> float:
    """Return for how long ranks may rest in a tasklet, where a policy bounds it by so much."""
    return max(LATE_LEAST_S, LATE_FACTOR * in_flight_bound_us / 1e6)


def worked_s(process: int) -> float:
    """Return for how long a rank has had a core or waited for one, seconds.

    Of this process, whose other threads talk to the agent, the thread that computes; of another one
    all threads. Infinite where it waits for a disk, or has ended, which its leader notices. See
    Documentation/scheduler/sched-stats.rst.
    """
    tasks = Path(f"/proc/{process}/task")
    total_ns = 0
    with suppress(OSError, ValueError, IndexError):
        threads = [tasks / str(process)] if process == os.getpid() else tasks.iterdir()
        for thread in threads:
            if (thread / "stat").read_text().rpartition(")")[2].split()[0] in "DXZ":
                return float("inf")
            ran, waited, _ = (thread / "schedstat").read_text().split()
            total_ns += int(ran) + int(waited)
        return total_ns / 1e9
    return float("inf")


class RankWatch:
    """Tell, once, of a tasklet or a checkpoint in which no rank goes on.

    `begin` and `end` are called by the thread that runs tasklets, all else by another one.

    Args:
        processes: of all ranks, this one's first.
        bound_s: for how long they may rest.
        tell: called with what is wrong.
        worked: returns how long a rank's process has worked so far.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        processes: Sequence[int],
        bound_s: Callable[[], float],
        tell: Callable[[Unhealthy], None],
        *,
        worked: Callable[[int], float] = worked_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._bound_s, self._tell = processes, bound_s, tell
        self._worked, self._clock = worked, clock
        self._act = 0  # even: none runs
        self._seen = (0, 0.0, 0.0)  # the act, when, and what had been worked then
        self._rests_since_s = 0.0
        self._closing = threading.Event()

    def begin(self) -> None:
        """Note that a tasklet begins, or another act of all ranks."""
        self._act += 1 + self._act % 2

    def end(self) -> None:
        """Note that all ranks have done it."""
        self._act += self._act % 2

    def look(self) -> Unhealthy | None:
        """Return what to say of ranks that rest; to be called every so often."""
        now_s, act = self._clock(), self._act
        worked = sum(map(self._worked, self._processes)) if act % 2 else 0.0
        before, at_s, worked_before = self._seen
        self._seen = (act, now_s, worked)
        passed_s = now_s - at_s
        # Who looks too late was stopped or had no core, and the other ranks may have been as well.
        goes_on = act != before or passed_s > 4 * _LOOK_EVERY_S
        if goes_on or not act % 2 or not worked - worked_before <= _AT_REST * passed_s:
            self._rests_since_s = now_s
            return None
        bound_s = self._bound_s()
        if now_s - self._rests_since_s < bound_s:
            return None
        detail = f"no rank has gone on with its part for {bound_s:.0f} s"
        return Unhealthy(Reason.NO_PROGRESS, detail)

    def watch(self) -> None:
        """Look from a thread of its own: the one that runs tasklets cannot."""

        def look() -> None:
            while not self._closing.wait(_LOOK_EVERY_S):
                if (found := self.look()) is not None:
                    self._tell(found)
                    return

        threading.Thread(target=look, name="rank-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closing.set()
