"""Decide when a container that ended runs again; pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class BackoffRule:
    """Exponential delays between restarts, forgotten after a long run.

    Attributes:
        initial: delay before the second restart; the first restart comes at once.
        cap: longest delay.
        reset_after: a run of this length makes the next restart count as the first.
    """

    initial: timedelta = timedelta(seconds=1)
    cap: timedelta = timedelta(minutes=5)
    reset_after: timedelta = timedelta(minutes=10)


@dataclass(frozen=True)
class Backoff:
    """Count of restarts in a row."""

    rule: BackoffRule
    in_a_row: int = 0

    def after_run(self, lasted: timedelta) -> tuple[timedelta, Backoff]:
        """Return the delay before the restart that follows a run, and the state after it."""
        in_a_row = 0 if lasted >= self.rule.reset_after else self.in_a_row
        # The exponent is bounded so that a container that crashes for weeks does not overflow.
        delay = self.rule.initial * 2 ** min(in_a_row - 1, 30) if in_a_row else timedelta()
        return min(delay, self.rule.cap), Backoff(self.rule, in_a_row + 1)


def restarts(policy: str, exit_code: int) -> bool:
    """Tell whether a pod's restart policy (Always, OnFailure, Never) runs the container again."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)
