"""Capture CUDA graphs of one device: what is captured, and the memory that its graphs use.

A capture takes no call of the driver that would end it: Python's collector, which may destroy
events, waits, and so do other threads that want lent memory (see `DeviceAllocator.begin_pool`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch

from windrow_sidecar._core import DeviceAllocator, Error

Launch = Callable[[], None]
# Runs what is captured; its argument ends a graph and begins the next one.
Run = Callable[[Launch], None]
PoolId = tuple[int, int]

# What the driver takes for a node of an executable graph, as it is estimated before anything is
# captured: under driver 470.16 graphs of 500, 1,000 and 2,000 empty kernels took 362, 395 and 458
# MB of a GPU, the context included (https://forums.developer.nvidia.com/t/244901).
NODE_BYTES = 64 << 10
# Of lent memory behind a pool whose first capture needs more than that; then half as much again.
_FIRST_BYTES = 64 << 20
_TRIES = 24


class NoMemory(Exception):
    """Lack of memory for graphs; later there may be enough."""


class GraphCaptures(Protocol):
    """Captures graphs on a device (see `CudaCaptures`).

    Attributes:
        keeps: whether what ran while it was captured is there for later captures.
        driver_bytes: that the driver has taken for graphs, by its free memory.
        node_bytes: that it is expected to take for each node.
    """

    keeps: bool
    driver_bytes: int
    node_bytes: int

    def share(self) -> int:
        """Return what tells the device's shares apart: that of the current stream."""

    def pool(self) -> PoolId:
        """Return a new pool of memory, for graphs that run in the order of their captures."""

    def ready(self, pool: PoolId) -> bool:
        """Return whether all memory of the pool is there; asks for it where it was left."""

    def capture(self, pool: PoolId, prepare: Launch, run: Run) -> tuple[Launch, ...]:
        """Return launches of the graphs of `run`, in their order.

        Args:
            pool: of what both allocate.
            prepare: called in the capture, before `run`.
            run: what the graphs repeat. Both may be called again where memory was short.

        Raises:
            NoMemory: of lent memory.
            RuntimeError: the capture failed.
        """

    def leave(self) -> int:
        """Give the memory of all pools back, not addresses; returns its bytes."""

    def backed_bytes(self) -> int:
        """Return the bytes of lent memory behind all pools."""

    def end(self, pool: PoolId) -> None:
        """Forget a pool whose graphs are gone."""

    def drop(self, forget: Launch) -> None:
        """Run what forgets graphs, and count what the driver gets back."""


# Of this process.
_CAPTURES: WeakSet[CudaCaptures] = WeakSet()


def taken_for_graphs() -> int:
    """Return the bytes that the driver has taken for graphs of this process. Any thread."""
    return sum(captures.driver_bytes for captures in list(_CAPTURES))


class CudaCaptures:
    """Captures on a GPU.

    Args:
        ordinal: of the GPU.
        lent: torch's memory there; None: its own allocator's.
    """

    keeps = True
    node_bytes = NODE_BYTES

    def __init__(self, ordinal: int, lent: DeviceAllocator | None) -> None:
        self._ordinal, self._lent = ordinal, lent
        self._beside: Any = None  # where torch computes on the default stream, which cannot capture
        self._backed: dict[PoolId, int] = {}  # asked for, of each pool
        self._largest = _FIRST_BYTES
        # Of each pool, captures that failed: torch takes no pool again whose last graph is gone.
        self._failed: dict[PoolId, list[Any]] = {}
        self.driver_bytes = 0
        _CAPTURES.add(self)

    def share(self) -> int:
        """Return the number of the current stream."""
        found: int = torch._C._cuda_getCurrentRawStream(self._ordinal)
        return found

    def pool(self) -> PoolId:
        """Return a new one of torch's."""
        pool: PoolId = torch.cuda.graph_pool_handle()
        if self._lent is not None:
            # Known from now on, so that memory can be put behind it.
            self._lent.begin_pool(pool, stream=0)
            self._lent.end_pool(pool)
            self._backed[pool] = 0
        return pool

    def ready(self, pool: PoolId) -> bool:
        """Ask the lent allocator, where torch has one."""
        return self._lent is None or self._back(pool, self._lent.pool_bytes(pool))

    def _back(self, pool: PoolId, n_bytes: int) -> bool:
        """Put memory behind the pool; what was freed and is still in use is waited for."""
        lent = self._lent
        assert lent is not None
        if lent.back_pool(pool, n_bytes):
            return True
        lent.wait_freed()
        return lent.back_pool(pool, n_bytes)

    def capture(self, pool: PoolId, prepare: Launch, run: Run) -> tuple[Launch, ...]:
        """Capture on the current stream, or on one beside the default stream."""
        lent = self._lent
        for _ in range(_TRIES):
            if lent is not None:
                used = lent.pool_bytes(pool)
                self._backed[pool] = max(self._backed[pool], used + self._largest)
                if not self._back(pool, self._backed[pool]):
                    raise NoMemory
            try:
                return self._once(pool, prepare, run)
            except RuntimeError as error:
                if lent is None or "memory of graphs" not in str(error):
                    raise
                self._largest += self._largest // 2
        raise NoMemory

    def _once(self, pool: PoolId, prepare: Launch, run: Run) -> tuple[Launch, ...]:
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            of: Any = pool
            graphs[-1].capture_begin(pool=of, capture_error_mode="thread_local")

        def split() -> None:
            graphs[-1].capture_end()
            begin()

        before = self._not_taken()
        with self._quiet(), torch.cuda.stream(self._stream()):
            # A workspace that cuBLAS keeps for a stream may go while a graph still writes there.
            torch._C._cuda_clearCublasWorkspaces()
            try:
                begin()
                prepare()
                run(split)
            except BaseException:
                with suppress(RuntimeError):
                    graphs[-1].capture_end()
                self._failed.setdefault(pool, []).append(graphs)
                if self._lent is not None:
                    with suppress(Error):  # torch ends it, unless the capture did not begin
                        self._lent.end_pool(pool)
                raise
            graphs[-1].capture_end()
            torch._C._cuda_clearCublasWorkspaces()
        self.driver_bytes += max(0, before - self._not_taken())
        # Past `replay` of torch's class, which looks for hooks and trackers that nobody sets here.
        return tuple(super(torch.cuda.CUDAGraph, graph).replay for graph in graphs)

    def _not_taken(self) -> int:
        """Return the bytes that are the driver's to give, or torch's, which counts its own."""
        free = int(torch.cuda.mem_get_info(self._ordinal)[0])
        if self._lent is not None:
            return free
        return free + int(torch.cuda.memory_reserved(self._ordinal))

    def _stream(self) -> Any:  # noqa: ANN401
        current = torch.cuda.current_stream(self._ordinal)
        if current.cuda_stream:
            return current
        if self._beside is None:
            self._beside = torch.cuda.Stream(self._ordinal)  # type: ignore[no-untyped-call]
        return self._beside

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            # A backward of autograd's own thread could not end a capture that this one began.
            with torch.autograd.set_multithreading_enabled(False):
                yield
        finally:
            if was_enabled:
                gc.enable()

    def leave(self) -> int:
        """Give lent blocks back; the allocator unmaps them when nothing runs."""
        if self._lent is None:
            return 0
        left = self._lent.backed_bytes()
        self._lent.unback_pools()
        return left

    def backed_bytes(self) -> int:
        """Return it; 0 for torch's own memory."""
        return self._lent.backed_bytes() if self._lent is not None else 0

    def end(self, pool: PoolId) -> None:
        """Forget it."""
        self._failed.pop(pool, None)
        if self._lent is not None and self._backed.pop(pool, None) is not None:
            self._lent.release_pool(pool)

    def drop(self, forget: Launch) -> None:
        """Read the driver's free memory around it."""
        before = self._not_taken()
        forget()
        given_back = max(0, self._not_taken() - before)
        self.driver_bytes = max(0, self.driver_bytes - given_back)
