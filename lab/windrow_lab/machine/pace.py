"""Speed of this machine at the moment, for machines that others share.

A neighbour that takes memory bandwidth or a core's clock shows in no counter of this machine. What
shows it is a piece of work that is always the same: `MachinePace` times one, on one core, while
nothing of ours runs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable

import numpy as np

BYTES = 32 << 20  # beyond a core's own caches, as decode's weights and KV are
PASSES = 20  # over these bytes: a tenth of a second or so
SLOWER = 1.1  # than usual by so much: not the machine that the others have met
USUAL_S = 8.0  # one slow moment is about as long


class MachinePace:
    """Times one pass over an array of `BYTES` (float32) on one of these cores."""

    def __init__(self, cores: Iterable[int]) -> None:
        self._core = min(cores)
        self._array = np.ones(BYTES // 4, np.float32)

    def now_us(self) -> float:
        """Return the median microseconds of a pass, of `PASSES`."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            return statistics.median(self._pass_us() for _ in range(PASSES))
        finally:
            os.sched_setaffinity(0, before)

    def usual_us(self) -> float:
        """Return what a pass takes in quiet moments: the lower quartile of `USUAL_S` seconds."""
        taken, end = [], time.monotonic() + USUAL_S
        while time.monotonic() < end:
            taken.append(self.now_us())
        return statistics.quantiles(taken, n=4)[0]

    def _pass_us(self) -> float:
        began = time.perf_counter_ns()
        self._array.sum()
        return (time.perf_counter_ns() - began) / 1e3
