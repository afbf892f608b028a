"""What stands in for a partition where decode keeps the whole device."""

from __future__ import annotations

import os
from collections.abc import Callable

from windrow_sidecar.compute.partition import Side, UnknownLevel


def _nothing(_units: int) -> None:
    """A GPU has no threads to set."""


class WholeDevice:
    """Every unit of a device, always (see `compute.partition.Partition`).

    For a server that harvests nothing, even on one core; and for decode on a GPU, where only the
    worker's share is capped.

    Args:
        units: cores or SMs.
        unit: what they are called, in the plural.
        set_threads: takes the number of units at each move.
    """

    side: Side = "decode"

    def __init__(
        self, units: int, unit: str, *, set_threads: Callable[[int], None] = _nothing
    ) -> None:
        self.total_units = units
        self._unit, self._set_threads = unit, set_threads

    @classmethod
    def cores(cls, *, set_threads: Callable[[int], None]) -> WholeDevice:
        """Those of this process's affinity mask."""
        return cls(len(os.sched_getaffinity(0)), "cores", set_threads=set_threads)

    @classmethod
    def gpu(cls, units: int) -> WholeDevice:
        """All SMs."""
        return cls(units, "SMs")

    def levels(self) -> tuple[int, ...]:
        """All of it."""
        return (self.total_units,)

    def activate(self, level: int) -> None:
        """Compute on every unit.

        Raises:
            UnknownLevel: a part of the device is asked for.
        """
        if level != self.total_units:
            raise UnknownLevel(self.side, level, self.levels(), self._unit)
        self._set_threads(level)

    def release(self) -> None:
        """Nothing was taken away."""
