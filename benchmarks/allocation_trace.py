"""Read a recorded trace of allocations, and replay it on a device allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windrow_sidecar._core import DeviceAllocator

# (id, bytes): allocation `id`, or its end where bytes is 0.
Step = tuple[int, int]


def read_trace(file: Path) -> list[Step]:
    """The steps of a file of `tools/record_allocations.py`: `+bytes` begins, `-n` ends one.

    Raises:
        ValueError: a line is not a number or ends what does not live.
    """
    steps: list[Step] = []
    living: set[int] = set()
    count = 0
    for line in file.read_text(encoding="ascii").split():
        value = int(line)
        if line.startswith("-"):
            if -value not in living:
                raise ValueError(f"{file}: allocation {-value} ends, but does not live")
            living.remove(-value)
            steps.append((-value, 0))
        else:
            living.add(count)
            steps.append((count, value))
            count += 1
    return steps


def peak_bytes(steps: Sequence[Step]) -> int:
    """Requested bytes that live at once at most."""
    sizes: dict[int, int] = {}
    live = peak = 0
    for number, n_bytes in steps:
        live += n_bytes or -sizes.pop(number)
        if n_bytes:
            sizes[number] = n_bytes
        peak = max(peak, live)
    return peak


@dataclass(frozen=True, slots=True)
class Replay:
    """Cost of a replayed trace.

    Attributes:
        requests: allocations in all.
        most_fragmentation_bytes: held minus requested, at its worst.
        mapping_calls: of the driver.
        saved_calls: mapping calls that idle aliases saved.
    """

    requests: int
    most_fragmentation_bytes: int
    mapping_calls: int
    saved_calls: int


def replay(steps: Sequence[Step], allocator: DeviceAllocator) -> Replay:
    """Make every request of the trace on the default stream, and end what it leaves alive.

    Raises:
        windrow_sidecar._core.BudgetError: the budget is smaller than the trace needs.
    """
    addresses: dict[int, int] = {}
    requests = worst = 0
    before = allocator.stats()
    for number, n_bytes in steps:
        if n_bytes:
            addresses[number] = allocator.allocate(n_bytes)
            requests += 1
        else:
            allocator.free(addresses.pop(number))
        worst = max(worst, allocator.fragmentation_bytes())
    for address in addresses.values():
        allocator.free(address)
    after = allocator.stats()
    return Replay(
        requests,
        worst,
        after["num_device_alloc"] - before["num_device_alloc"],
        after["num_device_alloc_saved"] - before["num_device_alloc_saved"],
    )
