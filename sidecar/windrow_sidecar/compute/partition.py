"""The interface of a partition: one side's share of a device's cores or SMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from windrow.errors import InvariantBroken

Side = Literal["decode", "finetune"]

_NAMES: dict[Side, str] = {"decode": "decode", "finetune": "the worker"}


class UnknownLevel(InvariantBroken):
    """A share was asked for that is none of the partition's levels; the old one is kept.

    Attributes:
        problem: what was asked for, and what there is.
    """

    def __init__(self, side: Side, level: int, levels: Sequence[int], unit: str) -> None:
        known = ", ".join(map(str, levels))
        self.problem = (
            f"{_NAMES[side]} cannot take {level} of {levels[-1]} {unit};"
            f" its levels here are {known}"
        )
        super().__init__(
            f"{self.problem}. Make decode's partition and the worker's over the same"
            " device, and grant only what levels() names."
        )


class NotMoved(InvariantBroken):
    """The driver refused a share that is one of the levels; the old one is kept."""

    def __init__(self, side: Side, cause: Exception) -> None:
        super().__init__(f"{_NAMES[side]} stays on the share that it had: {cause}")


class Partition(Protocol):
    """One process's hold on its share of a device's compute units.

    Units are cores on the host, SMs on a GPU; a level is a number of them. Decode takes units from
    the low end, the worker from the high end; that the two do not overlap is their caller's
    decision, not this object's. Each process makes its own, for its side, over the same device. One
    thread at a time.
    """

    @property
    def side(self) -> Side:
        """Side whose share it is."""
        ...

    @property
    def total_units(self) -> int:
        """Units of the device: the last of the levels."""
        ...

    def levels(self) -> tuple[int, ...]:
        """Return all levels that this side can be given, ascending.

        The last is the whole device, for while the other side computes nothing; all before it leave
        the other side at least one unit.
        """
        ...

    def activate(self, level: int) -> None:
        """Run this process's compute on so many units. Cheap when unchanged.

        Raises:
            UnknownLevel: none of `levels()`; nothing has changed.
            NotMoved: the driver refused; nothing has changed.
        """
        ...

    def release(self) -> None:
        """Undo: this process may use every unit again.

        Raises:
            NotMoved: the driver refused; nothing has changed.
        """
        ...
