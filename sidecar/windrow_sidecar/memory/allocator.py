"""Let torch on CUDA take all of its memory from lent chunks, through its pluggable allocator.

`install` comes before torch's first allocation. From then on the worker's tensors lie in chunks
that decode has lent; `LentBudget` follows the table of owners, tasklet by tasklet.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar._core import Arena, DeviceAllocator
from windrow_sidecar.torch_cuda import require_torch_cuda

log = logging.getLogger(__name__)

_installed: dict[int, DeviceAllocator] = {}


class LentBudget:
    """Keeps an allocator's budget equal to what the table of owners lends to one worker.

    Args:
        arena: attached, as a peer.
        owner: the worker's job epoch.
        allocator: over the same arena.
    """

    def __init__(self, arena: Arena, owner: int, allocator: DeviceAllocator) -> None:
        self._arena, self._owner, self._allocator = arena, owner, allocator
        self._chunks: set[int] = set()
        self._chunk_bytes = arena.geometry.chunk_bytes
        self._settled_lent = -1  # LENT chunks of the table that were all in the budget; -1: unknown

    @property
    def allocator(self) -> DeviceAllocator:
        """Allocator whose budget it is."""
        return self._allocator

    @property
    def chunks(self) -> int:
        """Chunks in the budget, those that drain included."""
        return len(self._chunks)

    def asked_back(self) -> bool:
        """Return whether decode waits for a chunk."""
        return bool(self._arena.draining(self._owner))

    def used_bytes(self) -> int:
        """Return the bytes that tensors take, in whole blocks."""
        return self._allocator.stats()["reserved_bytes.all.current"]

    def free_bytes(self) -> int:
        """Return the bytes that tensors may still take. Any thread."""
        lent = len(self._chunks) * self._chunk_bytes
        return max(0, lent - self.used_bytes())

    def wait_freed(self) -> None:
        """Wait until nothing uses what was freed so far, on any stream of this process."""
        self._allocator.wait_freed()

    def give_back(self) -> None:
        """Return every chunk that nothing uses; the others go when this process ends."""
        self.settle()
        self._settled_lent = -1
        for chunk in self._chunks:
            self._allocator.drain(chunk)
        for chunk in self._allocator.take_quiet():
            self._arena.give_back(chunk, owner=self._owner)
            self._chunks.discard(chunk)

    def settle(self) -> bool:
        """Follow the table: take what is lent, drain what is asked back, return what is quiet.

        Belongs between two tasklets. Never waits: a drained chunk whose tensors live, or that work
        on any stream may still use, stays until a later call.

        Returns:
            whether the budget has changed.
        """
        _, _, lent, _, drains = self._arena.counts()
        if not drains and lent == self._settled_lent:
            # Nobody but this worker ends a loan, and it would drain first. Lists of chunks take a
            # millisecond where there are thousands of them, before each tasklet.
            return False
        # In this order: what is LENT now cannot have been DRAINING before.
        draining = set(self._arena.draining(self._owner))
        held = set(self._arena.held(self._owner))
        before = frozenset(self._chunks)
        for chunk in sorted(held - before):
            self._allocator.lend(chunk)
        for chunk in sorted(draining & before):
            self._allocator.drain(chunk)
        quiet = {*self._allocator.take_quiet(), *(draining - before)}
        for chunk in sorted(quiet):
            self._arena.give_back(chunk, owner=self._owner)
        self._chunks = (self._chunks | held) - quiet
        all_is_ours = not drains and len(held) == lent and self._chunks == held
        self._settled_lent = lent if all_is_ours else -1
        return self._chunks != before


def install(allocator: DeviceAllocator, *, device: int = 0) -> None:
    """Make torch take that device's memory from `allocator`, for the rest of the process.

    Raises:
        UserError: torch has no CUDA here, or has allocated on the device already.
    """
    require_torch_cuda("device")
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(
        _core.__file__, "windrow_torch_alloc", "windrow_free"
    )
    hooks: Any = pluggable.allocator()  # type: ignore[no-untyped-call]
    # Without this torch ignores record_stream, and memory would be reused under running kernels.
    hooks.set_record_stream_fn(_address("windrow_record_stream"))
    hooks.set_reset_fn(_address("windrow_empty_cache"))
    # Without these a capture takes ordinary memory: what it frees would be others' while its graph
    # still writes there.
    hooks.set_begin_allocate_to_pool(_address("windrow_begin_pool"))
    hooks.set_end_allocate_to_pool_fn(_address("windrow_end_pool"))
    hooks.set_release_pool(_address("windrow_release_pool"))
    _core.serve_device(device, allocator)
    try:
        torch.cuda.memory.change_current_allocator(pluggable)
    except RuntimeError as error:
        _core.serve_device(device, None)
        raise UserError(
            f"torch has allocated device memory already: {error}",
            field="device",
            remedy="Install the allocator before the first tensor on the device.",
            reason="AllocatorTooLate",
        ) from error
    _installed[device] = allocator
    log.info("torch allocates on cuda:%d from %s", device, allocator.describe_budget())


def memory_stats(device: int | None = None) -> dict[str, int]:
    """Figures of the installed allocator under the names of `torch.cuda.memory_stats`.

    torch's own function raises with a pluggable allocator. Empty where none is installed; `device`:
    of which GPU (default: the one that has an allocator).
    """
    installed = [_installed.get(device)] if device is not None else list(_installed.values())
    return installed[0].stats() if installed and installed[0] is not None else {}


def _address(symbol: str) -> int:
    """Return the address of a C function of the native module."""
    function = getattr(ctypes.CDLL(_core.__file__), symbol)
    return ctypes.cast(function, ctypes.c_void_p).value or 0
