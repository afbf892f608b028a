"""Parts of the operator that no longer move, so that a restart would help.

An API server that is slow or away is no reason to end: every call to it ends after a bounded time,
and a step that ended so has moved. What counts is that a part which waits for nothing is stuck,
that steps are due and none has ended for longer than the slowest one takes, or that the watches
keep reporting less than a listing finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

# The look at what is due waits for nobody.
LOOKS_WITHIN_S: Final = 60.0
# A step makes five calls at most, each of four tries of ten seconds with pauses of five between.
STEPS_WITHIN_S: Final = 5 * (4 * 10.0 + 3 * 5.0) + 25.0
# So many comparisons in a row that found what a watch should have reported: it is stuck.
_STUCK_AFTER: Final = 3


class Liveness:
    """Record of the parts' movements; asked by the kubelet.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._leads = False
        self._looked = self._stepped = clock()
        self._missed_in_a_row = 0

    def leads(self, *, yes: bool) -> None:
        """Note whether this replica leads; a replica on standby has no queue."""
        self._leads = yes
        self._looked = self._stepped = self._clock()

    def looked(self, due: int) -> None:
        """Note that it was looked at what is due, and how many steps are."""
        self._looked = self._clock()
        if not due:
            self._stepped = self._looked

    def stepped(self) -> None:
        """Note that a step has ended, well or not."""
        self._stepped = self._clock()

    def compared(self, missed: Mapping[str, int]) -> None:
        """Note how many objects a comparison found that the watches had not reported."""
        self._missed_in_a_row = self._missed_in_a_row + 1 if missed else 0

    def stalled(self) -> str:
        """Return what does not move any more; empty: nothing."""
        now = self._clock()
        if self._leads and now - self._looked > LOOKS_WITHIN_S:
            return f"nobody has looked at what is due for {now - self._looked:.0f} s"
        if self._leads and now - self._stepped > STEPS_WITHIN_S:
            return f"steps are due, and none has ended for {now - self._stepped:.0f} s"
        if self._missed_in_a_row >= _STUCK_AFTER:
            return f"the watches reported nothing for {self._missed_in_a_row} comparisons"
        return ""
