"""Limit how many writes a second go to the API server for what can wait.

What decisions and people hang on is written at once. Progress of jobs and figures of slots are read
now and then, and every write of them is stored by etcd and sent to every watcher; so all of them
together share one budget, however many jobs and slots there are.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

# In all. A step of a job tells more than the figures of a slot, which Prometheus has anyway.
PROGRESS_PER_SECOND: Final = 1.5
FIGURES_PER_SECOND: Final = 1.0


class WriteBudget:
    """Tokens that come at a rate; each write takes one.

    Args:
        per_second: the rate.
        burst: so many are kept at most.
    """

    def __init__(self, per_second: float, burst: float = 3.0) -> None:
        self._rate, self._burst = per_second, burst
        self._tokens, self._at = burst, datetime.min.replace(tzinfo=UTC)

    def take(self, now: datetime) -> bool:
        """Take a token; return whether there was one."""
        at, self._at = self._at, now
        grown = (now - at).total_seconds() * self._rate
        self._tokens = min(self._burst, self._tokens + max(0.0, grown))
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def interval(self, writers: int) -> timedelta:
        """Return how often each of so many writers has its turn."""
        return timedelta(seconds=writers / self._rate)
