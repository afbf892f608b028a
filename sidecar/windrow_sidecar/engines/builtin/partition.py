"""What stands in for a partition on a device that is not shared."""

from __future__ import annotations

import os
from collections.abc import Callable

from windrow_sidecar.compute.partition import Side, UnknownLevel


class WholeDevice:
    """Every core of this process, always: for a server that harvests nothing, even on one core."""

    side: Side = "decode"

    def __init__(self, *, set_threads: Callable[[int], None]) -> None:
        self.cpus = tuple(sorted(os.sched_getaffinity(0)))
        self._set_threads = set_threads

    @property
    def total_units(self) -> int:
        """Cores of the affinity mask."""
        return len(self.cpus)

    def levels(self) -> tuple[int, ...]:
        """All of it."""
        return (self.total_units,)

    def activate(self, level: int) -> None:
        """Use as many threads as there are cores.

        Raises:
            UnknownLevel: a part of the device is asked for.
        """
        if level != self.total_units:
            raise UnknownLevel(self.side, level, self.levels(), "cores")
        self._set_threads(level)

    def release(self) -> None:
        """Nothing was taken away."""
