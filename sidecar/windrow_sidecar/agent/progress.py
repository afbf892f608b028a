"""Compute a job's rate and ETA from its worker's reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from windrow.proto import agent_pb2, attach_pb2

# Long enough to span an optimizer step of a slow job, short enough that pauses show.
_WINDOW_S = 10.0
# Half of the interval at which a worker reports. Reports that waited for an agent that was stopped
# come in one moment, and the work of minutes between them would look like that of microseconds.
_SHORTEST_S = 0.5


class ProgressMeter:
    """Rates over the last ten seconds, or since the last report before; pauses included."""

    def __init__(self) -> None:
        self._reports: deque[tuple[float, agent_pb2.WorkerProgress]] = deque()
        self.latest = agent_pb2.WorkerProgress(
            loss=math.nan, learning_rate=math.nan, grad_norm=math.nan
        )

    def add(self, now_s: float, report: agent_pb2.WorkerProgress) -> int:
        """Take a report; returns how many tokens were done since the one before."""
        if not self.latest.total_steps:
            # It had not loaded its checkpoint yet: what that holds was not done just now.
            self._reports.clear()
        known = bool(self._reports)
        fresh = report.tokens - self.latest.tokens if known else 0
        self.latest = report
        self._reports.append((now_s, report))
        # The one from before the window stays: after a silence the rate is over all of it.
        while len(self._reports) > 1 and now_s - self._reports[1][0] >= _WINDOW_S:
            self._reports.popleft()
        return max(0, int(fresh))

    @property
    def tokens_per_second(self) -> float:
        """0 until two reports have come, half a second apart."""
        return self._rate(lambda report: report.tokens)

    @property
    def eta_s(self) -> float:
        """Seconds until the last step at the present pace; 0 while the pace is not known."""
        pace = self._rate(lambda report: report.step)
        left = self.latest.total_steps - self.latest.step
        return left / pace if pace > 0 else 0.0

    def message(self) -> attach_pb2.Progress:
        """Return the progress as the wire has it."""
        latest = self.latest
        return attach_pb2.Progress(
            step=latest.step,
            total_steps=latest.total_steps,
            loss=latest.loss,
            tokens_per_second=self.tokens_per_second,
            tokens=latest.tokens,
            eta_seconds=self.eta_s,
            checkpoint_step=latest.checkpoint_step,
            checkpoint_path=latest.checkpoint_path,
            skipped_rows=latest.skipped_rows,
            cut_rows=latest.cut_rows,
            joined_with=latest.joined_with,
        )

    def _rate(self, of: Callable[[agent_pb2.WorkerProgress], int]) -> float:
        if len(self._reports) < 2:
            return 0.0
        (begin_s, first), (end_s, last) = self._reports[0], self._reports[-1]
        if end_s - begin_s < _SHORTEST_S:
            return 0.0
        return max(0, of(last) - of(first)) / (end_s - begin_s)
