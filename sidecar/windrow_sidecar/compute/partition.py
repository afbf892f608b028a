"""What splits a device between decode and the finetune worker, whatever the device is."""

from __future__ import annotations

from typing import Protocol


class Partition(Protocol):
    """One device's compute units, and this process's hold on its share of them.

    Units are cores on the host, SMs on a GPU. Decode takes units from the low end, the worker from
    the high end; that the two do not overlap is their caller's decision, not this object's. Each
    process makes its own over the same device. One thread at a time.
    """

    @property
    def total_units(self) -> int:
        """Units of the device."""

    def finetune_levels(self, *, decode_busy: bool) -> tuple[int, ...]:
        """How many units the worker may get, ascending.

        While decode works it keeps at least one unit; while it is idle the worker gets all or none.
        """

    def activate_decode(self, units: int) -> None:
        """Run this process's compute on the first `units` units (0: all). Cheap when unchanged."""

    def activate_finetune(self, units: int) -> None:
        """Run this process's compute on the last `units` units, at least 1. As cheap."""

    def release(self) -> None:
        """Undo: this process may use every unit again."""
