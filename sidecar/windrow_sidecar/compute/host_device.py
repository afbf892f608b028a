"""The host as a compute device: work is done when a call returns."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from windrow_sidecar.compute.device import Copies, Mark

# What allocators that have no type for it say: torch's of the host, and ours over lent chunks.
_REFUSERS = ("DefaultCPUAllocator", "the budget of ")


@dataclass(slots=True)  # frozen, it takes longer to make, and each tasklet has two
class HostMark:
    """A moment: all work before it is over. Never changed."""

    reached_ns: int

    def done(self) -> bool:
        """Yes."""
        return True

    def wait(self) -> None:
        """Return at once: there is nothing to wait for."""

    def at_ns(self) -> int:
        """Return when it was made."""
        return self.reached_ns


class HostDevice:
    """Compute device made of this machine's cores and memory (see `ComputeDevice`).

    Args:
        clock: nanoseconds of CLOCK_MONOTONIC.
    """

    name = "cpu"
    torch = torch.device("cpu")
    queues = False

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock

    def mark(self) -> Mark:
        """Return now."""
        return HostMark(self._clock())

    def free_bytes(self) -> int:
        """Memory of this machine that may still be taken."""
        return available_bytes()

    def peak_bytes(self) -> int:
        """The largest resident set of this process."""
        # Kibibytes on Linux.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def wait_idle(self) -> None:
        """Return at once: calls are done when they return."""

    def release_caches(self) -> None:
        """Freed memory that the C library keeps for its next allocations."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(ctypes.c_size_t(0))

    def total_units(self) -> int:
        """Cores of this process."""
        return len(os.sched_getaffinity(0))

    def host_copy(self, n_bytes: int) -> Tensor:
        """Return new memory, uint8 [n_bytes]: any host memory serves."""
        return torch.empty(n_bytes, dtype=torch.uint8)

    def host_copy_bytes(self, n_bytes: int) -> int:
        """Return the same number of bytes."""
        return n_bytes

    def captures(self) -> None:
        """Return None: a processor has no graphs."""

    def copies(self) -> Copies:
        """Return copies that are done when they return."""
        return HostCopies(self)


class HostCopies:
    """Copies in the thread that asks for them (see `Copies`)."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device

    def after(self, mark: Mark) -> None:
        """Every mark is reached."""

    def start(self, to: Tensor, source: Tensor) -> None:
        """Copy [...] to [...] of one shape; done on return."""
        to.copy_(source)

    def mark(self) -> Mark:
        """Return now."""
        return self._device.mark()

    def hold_back(self, mark: Mark) -> None:
        """Every mark is reached."""


def available_bytes() -> int:
    """Memory of this machine that may still be taken."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def out_of_memory(error: Exception) -> bool:
    """Return whether memory was refused, by whichever allocator: the host has no type for it."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error) if isinstance(error, RuntimeError) else ""
    return any(allocator in said for allocator in _REFUSERS)
