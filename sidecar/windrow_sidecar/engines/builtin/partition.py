"""What the loop needs of a device's partition, and what stands in on one that is not shared."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol


class DecodePartition(Protocol):
    """Decode's side of `compute.Partition`."""

    @property
    def total_units(self) -> int:
        """Units of the device."""
        ...

    def activate_decode(self, units: int) -> None:
        """Compute on so many units from now on (0: all). Costs nothing when they are the same."""
        ...


class WholeDevice:
    """Every core of this process, always: for a server that harvests nothing, even on one core."""

    def __init__(self, *, set_threads: Callable[[int], None]) -> None:
        self.cpus = tuple(sorted(os.sched_getaffinity(0)))
        self._set_threads = set_threads

    @property
    def total_units(self) -> int:
        """Cores of the affinity mask."""
        return len(self.cpus)

    def activate_decode(self, units: int) -> None:
        """All of it, whatever is asked."""
        self._set_threads(self.total_units)
