"""The interface of a compute device: a machine's cores or a GPU.

Work on a GPU is only queued when a call returns; on the host it is done then. `mark` tells the two
apart nowhere else: a mark is a point in the work that was queued before it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from windrow_sidecar.compute.captures import GraphCaptures


class Mark(Protocol):
    """A point in a device's queue of work (an event)."""

    def done(self) -> bool:
        """Return whether everything queued before it has ended. Never waits."""

    def wait(self) -> None:
        """Wait until it has been reached; other threads of Python go on meanwhile."""

    def at_ns(self) -> int:
        """Return when it was reached, in nanoseconds of CLOCK_MONOTONIC. Waits."""


class ComputeDevice(Protocol):
    """A compute device, for one thread at a time unless a method says more."""

    @property
    def name(self) -> str:
        """Name as `finding.find_device` takes it: "cpu" or "cuda:N"."""

    @property
    def torch(self) -> torch.device:
        """Device on which tensors are allocated."""

    @property
    def queues(self) -> bool:
        """True where a call returns before its work is done."""

    def mark(self) -> Mark:
        """Return the point behind everything that this thread has queued."""

    def free_bytes(self) -> int:
        """Memory for tensors that may still be taken. Any thread."""

    def peak_bytes(self) -> int:
        """Most memory that this process has held there so far. Any thread."""

    def wait_idle(self) -> None:
        """Wait until no work of this process runs there, on any stream. For its end; any thread.

        What a client of MPS leaves running at its end may take the other clients along.
        """

    def release_caches(self) -> None:
        """Give up memory that libraries keep for the next time."""

    def total_units(self) -> int:
        """Cores or SMs of the device, whatever part of them is in use."""

    def host_copy(self, n_bytes: int) -> Tensor:
        """Return new host memory, uint8 [n_bytes], that copies to the device at the link's rate."""

    def host_copy_bytes(self, n_bytes: int) -> int:
        """Return how much host memory `host_copy` takes for so many bytes."""

    def captures(self) -> GraphCaptures | None:
        """Return what captures CUDA graphs there; None: nothing can."""

    def copies(self) -> Copies:
        """Return a way to copy beside the computation. Any thread, one at a time."""


class Copies(Protocol):
    """Copies from host memory into the device's, in order, beside what is computed."""

    def after(self, mark: Mark) -> None:
        """Start later work behind `mark`."""

    def start(self, to: Tensor, source: Tensor) -> None:
        """Copy `source` (see `host_copy`) to `to` on the device, [...] of one dtype.

        Queued on the stream of the copies; both must live until a later `mark` is reached.
        """

    def mark(self) -> Mark:
        """Return the point behind every copy that was started."""

    def hold_back(self, mark: Mark) -> None:
        """Let what the calling thread computes from now on wait, on the device, for such a mark."""
