"""The partition of a GPU that is shared in time: whoever runs has all of it."""

from __future__ import annotations

from windrow_sidecar.compute.partition import Side, UnknownLevel


class Unshared:
    """One level, the whole device (see `Partition`).

    Args:
        side: whose it is.
        units: of the device.
    """

    def __init__(self, side: Side, units: int) -> None:
        self.side: Side = side
        self._units = units

    @property
    def total_units(self) -> int:
        """Of the device."""
        return self._units

    def levels(self) -> tuple[int, ...]:
        """All of it."""
        return (self._units,)

    def activate(self, level: int) -> None:
        """Nothing to move.

        Raises:
            UnknownLevel: a part of the device is asked for, which nobody would be held to.
        """
        if level != self._units:
            raise UnknownLevel(self.side, level, self.levels(), "units")

    def release(self) -> None:
        """Nothing was taken away."""
