"""A GPU as a compute device: the one module that calls `torch.cuda`.

Nothing here waits for the whole device but `wait_idle`; a mark is an event behind what its thread
has queued.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from windrow.errors import UserError
from windrow_sidecar.compute.captures import CudaCaptures, taken_for_graphs
from windrow_sidecar.compute.device import Copies, Mark
from windrow_sidecar.memory.allocator import LentBudget, install, memory_stats
from windrow_sidecar.torch_cuda import require_torch_cuda

# Distances between events are 32-bit floats in milliseconds: over a second, exact to 0.06 us.
_ANCHOR_LASTS_NS = 1_000_000_000
# An interrupt between two looks at the clock makes one of them worthless, hardly all.
_TRIES = 3
# Two buffers of 4 MiB and eight of 16 KiB, as torch has them before Hopper, where it takes 32 MiB:
# for each product, and before 2.15 keeps them: on eight shares of SMs 256 MiB of what decode lends.
CUBLAS_WORKSPACES = ":4096:2:16:8"


class CudaDevice:
    """One GPU, of which torch computes on the current stream (see `ComputeDevice`).

    Args:
        ordinal: among those that this process sees.
        field: that named it, for errors.
        lent: what torch's memory there is taken from, all of it (default: torch's own allocator).

    Raises:
        UserError: torch sees no such GPU, or has used it already where `lent` is given.
    """

    queues = True

    def __init__(
        self, ordinal: int = 0, *, field: str = "--device", lent: LentBudget | None = None
    ) -> None:
        found = require_torch_cuda(field)
        if ordinal >= found.gpus:
            raise UserError(
                f"there is no cuda:{ordinal}, torch sees {found.gpus} GPU(s)",
                field=field,
                remedy="Count from 0 among the GPUs that CUDA_VISIBLE_DEVICES leaves.",
                reason="NoCudaDevice",
            )
        if lent is not None:
            # Read when cuBLAS is first used: each product takes a workspace from torch's memory.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)
            # Before anything that makes torch initialise CUDA, as `set_device` does: its own
            # allocator would stay then.
            install(lent.allocator, device=ordinal)
        torch.cuda.set_device(ordinal)
        self.name, self.torch = f"cuda:{ordinal}", torch.device("cuda", ordinal)
        self._clock, self._ordinal = _EventClock(self.torch), ordinal
        self._streams: dict[tuple[int, ...], torch.cuda.Stream] = {}
        self._lent = lent

    def mark(self) -> Mark:
        """Return an event behind what this thread has queued on its stream."""
        # Of a few streams: torch makes an object of the current one each time it is asked.
        known = tuple(torch._C._cuda_getCurrentStream(self._ordinal))
        stream = self._streams.get(known)
        if stream is None:
            stream = self._streams[known] = torch.cuda.current_stream(self._ordinal)
        return _EventMark(self._clock, stream)

    def free_bytes(self) -> int:
        """Return the free bytes of what is lent; on an own GPU, the driver's and torch's."""
        if self._lent is not None:
            # The driver takes memory for graphs beside what is lent: so much of that is left.
            return max(0, self._lent.free_bytes() - taken_for_graphs())
        cached = torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch)
        return int(torch.cuda.mem_get_info(self.torch)[0]) + cached

    def peak_bytes(self) -> int:
        """Return the peak bytes of tensors, and what the driver has for graphs."""
        if self._lent is not None:  # torch's own figures raise then
            tensors = memory_stats(self.torch.index)["allocated_bytes.all.peak"]
        else:
            tensors = int(torch.cuda.max_memory_allocated(self.torch))
        return tensors + taken_for_graphs()

    def wait_idle(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize(self.torch)

    def release_caches(self) -> None:
        """Drop the workspaces of cuBLAS, tens of MiB: torch before 2.15 keeps one a stream."""
        torch._C._cuda_clearCublasWorkspaces()

    def total_units(self) -> int:
        """SMs of the GPU."""
        return int(torch.cuda.get_device_properties(self.torch).multi_processor_count)

    def host_copy(self, n_bytes: int) -> Tensor:
        """Return pinned memory, uint8 [n_bytes]: other memory is copied through a buffer."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)

    def host_copy_bytes(self, n_bytes: int) -> int:
        """The next power of two: torch pins no other sizes."""
        return 1 << max(0, n_bytes - 1).bit_length()

    def captures(self) -> CudaCaptures:
        """Return what captures on the current stream, in lent memory where torch has that."""
        return CudaCaptures(self._ordinal, None if self._lent is None else self._lent.allocator)

    def copies(self) -> Copies:
        """Return a stream of its own, outside of every share: a share would slow its copies."""
        return _StreamCopies(self._clock, torch.cuda.Stream(self.torch))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Anchor:
    """An event whose time is known."""

    event: torch.cuda.Event
    ns: int
    within_ns: int  # twice as far off as its time can be


class _EventClock:
    """Give events a time: CUDA measures only the time between two events. Any thread."""

    def __init__(self, device: torch.device) -> None:
        self._anchor: _Anchor | None = None
        # Nothing else is queued there, so an event is reached at once, whatever computes: torch
        # hands the same streams out in turn, but nobody else asks for those of a higher priority.
        self._idle = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def anchor(self) -> _Anchor:
        """Return one that was passed before anything that is queued from now on."""
        anchor = self._anchor
        if anchor is None or time.monotonic_ns() - anchor.ns > _ANCHOR_LASTS_NS:
            anchor = self._anchor = min(
                (self._try() for _ in range(_TRIES)), key=lambda tried: tried.within_ns
            )
        return anchor

    def _try(self) -> _Anchor:
        """Record an event between two looks at the host's clock."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before_ns = time.monotonic_ns()
        event.record(self._idle)
        event.synchronize()
        after_ns = time.monotonic_ns()
        return _Anchor(event, (before_ns + after_ns) // 2, after_ns - before_ns)


class _EventMark:
    """An event on a stream (see `Mark`)."""

    def __init__(self, clock: _EventClock, stream: torch.cuda.Stream) -> None:
        self._anchor, self._at_ns, self._is_reached = clock.anchor(), 0, False
        self.event = _timed_event(stream)

    def done(self) -> bool:
        self._is_reached = self._is_reached or bool(self.event.query())  # type: ignore[no-untyped-call]
        return self._is_reached

    def wait(self) -> None:
        self.event.synchronize()
        self._is_reached = True

    def at_ns(self) -> int:
        if not self._at_ns:
            if not self._is_reached:
                self.wait()
            since_ms = float(self._anchor.event.elapsed_time(self.event))
            self._at_ns = self._anchor.ns + round(since_ms * 1e6)
        return self._at_ns


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Return an event whose waiters sleep: a spinning worker would take a core from decode."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


class _StreamCopies:
    """Copies on a stream of their own (see `Copies`)."""

    def __init__(self, clock: _EventClock, stream: torch.cuda.Stream) -> None:
        self._clock, self._stream = clock, stream

    def after(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark)
        self._stream.wait_event(mark.event)

    def start(self, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _EventMark(self._clock, self._stream)

    def hold_back(self, mark: Mark) -> None:
        assert isinstance(mark, _EventMark)
        torch.cuda.current_stream().wait_event(mark.event)
