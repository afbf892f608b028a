"""A partition with one level: the whole device."""

from __future__ import annotations

import os
from collections.abc import Callable

from windrow_sidecar.compute.partition import Side, UnknownLevel


def _nothing(_units: int) -> None:
    """A GPU has no threads to set."""


class WholeDevice:
    """One level, the whole device (see `Partition`).

    For a server that harvests nothing, even on one core; for decode on a GPU, where only the
    worker's share is capped; for a worker on a GPU that is shared in time.

    Args:
        side: whose it is.
        units: cores or SMs of the device.
        unit: what they are called, in the plural.
        set_threads: takes the number of units at each move.
    """

    def __init__(
        self,
        side: Side,
        units: int,
        unit: str = "units",
        *,
        set_threads: Callable[[int], None] = _nothing,
    ) -> None:
        self.side: Side = side
        self.total_units = units
        self._unit, self._set_threads = unit, set_threads

    @classmethod
    def cores(cls, side: Side, *, set_threads: Callable[[int], None]) -> WholeDevice:
        """Return the cores of this process's affinity mask."""
        return cls(side, len(os.sched_getaffinity(0)), "cores", set_threads=set_threads)

    def levels(self) -> tuple[int, ...]:
        """All of it."""
        return (self.total_units,)

    def activate(self, level: int) -> None:
        """Compute on every unit; nothing moves.

        Raises:
            UnknownLevel: a part of the device is asked for, which nobody would be held to.
        """
        if level != self.total_units:
            raise UnknownLevel(self.side, level, self.levels(), self._unit)
        self._set_threads(level)

    def release(self) -> None:
        """Do nothing: nothing was taken away."""
