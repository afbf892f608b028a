"""Pause the worker when measured steps break the objective, whatever a policy says.

Two consecutive steps over the objective while the worker ran pause it for 50 ms and widen the
margin. So do requests that wait: an objective of each token allows slow steps, slow steps fill the
batch, and others find no place in it. A breaker gives up for a while when steps beside the worker
break the objective much more often than steps of decode alone, or when a CPU limit kept decode from
running beside it. The way back: after 10 s (twice as long each time, 160 s at most) it lets the
worker run again on trial, judged by a fresh window; a clean window of 1,600 steps puts the 10 s
back. Impossible input (a stale view, a stopped clock, a latency of NaN) pauses too. Time is an
argument. `csrc/src/guard.cpp` has the rules.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from windrow_sidecar import _core

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Defaults as the design gives them; times in nanoseconds."""

    pause_ns: int = 50_000_000
    # Longer than a request waits that comes between two steps, short to who awaits a first token.
    queue_us: int = 50_000
    widen: float = 0.05  # added to the margin at each trip
    widen_max: float = 0.4
    widen_queued: float = 4.0  # for requests that wait: steps of a fifth of the objective
    widen_half_life_ns: int = 10 * SECOND_NS
    # The breaker: a percentile of 99 allows 1% of steps over the objective; five times that, beyond
    # what decode shows alone, over a window long enough that two bad steps do not make it.
    excess_factor: float = 5.0
    window_steps: int = 400
    min_steps: int = 200
    first_break_ns: int = 10 * SECOND_NS
    longest_break_ns: int = 160 * SECOND_NS
    # A view describes the step that starts now; a second is longer than any step of an objective.
    stale_ns: int = SECOND_NS
    # Two decisions may fall into one tick of a coarse clock, and three do not.
    standing_clock: int = 3
    # Ten minutes; no decode step takes as long.
    longest_step_us: float = 6e8


class Guard(_core.Guard):
    """Watches latencies; says whether the worker may run now and how much margin to add.

    Args:
        settings: times and bounds.
        watches: False for a guard that lets the worker run whatever was measured.
    """

    def __init__(self, settings: GuardSettings | None = None, *, watches: bool = True) -> None:
        self.settings = settings or GuardSettings()
        super().__init__(asdict(self.settings), watches=watches)
        self.watches = watches

    def renewed(self) -> Guard:
        """Return one of the same settings with a clean record."""
        return Guard(self.settings, watches=self.watches)
