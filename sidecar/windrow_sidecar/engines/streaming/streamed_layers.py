"""Compute with a model whose layers memory does not hold all at once, by several users in turn.

Weights keep their addresses: a layer that leaves gives its pages back, and one that comes is read
from its file into the same place. So decode's views, the adapters' and those that a graph has saved
stay valid, and two users of a layer share one copy. A thread reads the next layers meanwhile.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from windrow_sidecar.engines.streaming.copying import Copier, Part, Transfer
from windrow_sidecar.engines.streaming.schedule import coming, next_moves

PAGE_BYTES = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(slots=True)
class Moved:
    """Bytes and times of the transfers so far."""

    transfers: int = 0
    n_bytes: int = 0
    copy_s: float = 0.0
    waited_s: float = 0.0  # by layers, for their weights

    def count(self, n_bytes: int, copy_s: float) -> None:
        """Count a transfer that has ended; `copy_s`: seconds of copying so far."""
        self.transfers += 1
        self.n_bytes += n_bytes
        self.copy_s = copy_s

    @property
    def hidden(self) -> float:
        """Share of the copying behind which something computed."""
        return 1.0 - min(1.0, self.waited_s / self.copy_s) if self.copy_s else 1.0


class HostPages:
    """Memory of this process whose pages can go and come back while their addresses stay.

    Args:
        n_bytes: of addresses; pages take memory once something is written to them.

    Attributes:
        storage: uint8 [n_bytes], aligned to a page; alive as long as one of its views.
    """

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        self._map = mmap.mmap(-1, self._n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.storage: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:n_bytes]

    def release(self, begin: int, end: int) -> None:
        """Give the pages of these bytes back; they read as zeros until they are written again.

        Args:
            begin: of a page.
            end: of a page, or of all bytes.
        """
        self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    @property
    def resident_bytes(self) -> int:
        """Bytes that take memory now, as the kernel counts them.

        Raises:
            OSError: it does not say.
        """
        pages = (ctypes.c_ubyte * (self._n_bytes // PAGE_BYTES))()
        address = ctypes.c_void_p(self.storage.data_ptr())
        if _LIBC.mincore(address, ctypes.c_size_t(self._n_bytes), pages):
            raise OSError(ctypes.get_errno(), "mincore of streamed weights")
        return sum(page & 1 for page in pages) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """Weights of one layer: where they lie, [begin, end) of the storage, and what to read there."""

    begin: int
    end: int
    parts: tuple[Part, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes in memory."""
        return self.end - self.begin


class StreamedLayers:
    """Cache of at most `capacity` layers, each read before its user computes with it.

    A layer that somebody holds does not leave. Users on one thread, or one after the other, come in
    the order of their visits; one that waits in the middle of a layer takes that layer's place
    away from the others, so with two users `capacity` is 3 at least.

    Args:
        layers: of the model, from the bottom.
        copier: reads them; it is this object's.
        capacity: 2 at least.
        release: gives the pages of [begin, end) of the storage back.
    """

    def __init__(
        self,
        layers: Sequence[StreamedLayer],
        copier: Copier,
        *,
        capacity: int,
        release: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers, self._copier, self._clock = layers, copier, clock
        self.capacity, self._release = capacity, release
        self.slot_bytes = max(layer.n_bytes for layer in layers)
        self._lock = threading.Lock()
        self._resident: set[int] = set()  # or on their way
        self._coming: dict[int, Transfer] = {}
        self._held: Counter[int] = Counter()
        self.moved = Moved()

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def all_fit(self) -> bool:
        """True where no layer has to leave for another."""
        return self.capacity >= len(self._layers)

    @property
    def bytes_per_s(self) -> float:
        """Speed at which layers come (see `Copier.bytes_per_s`)."""
        return self._copier.bytes_per_s

    @property
    def resident(self) -> frozenset[int]:
        """Layers in memory or on their way there."""
        with self._lock:
            return frozenset(self._resident)

    @contextmanager
    def step(self, layer: int) -> Iterator[None]:
        """Hold a layer of a pass after which the next one begins at the bottom.

        Raises:
            OSError: its file could not be read.
        """
        with self._holding(coming(self.depth, layer, up=True, returns=False)):
            yield

    @contextmanager
    def forward(self, layer: int) -> Iterator[None]:
        """Hold a layer while its forward runs; see `around.AroundLayer` and `step`."""
        order = coming(self.depth, layer, up=True, returns=torch.is_grad_enabled())
        with self._holding(order):
            yield

    @contextmanager
    def backward(self, layer: int) -> Iterator[None]:
        """Hold a layer while its backward runs; see `step`."""
        with self._holding(coming(self.depth, layer, up=False)):
            yield

    def close(self) -> None:
        """End the reading; nobody computes any more."""
        with self._lock:
            for transfer in self._coming.values():
                transfer.cancel()
            self._coming.clear()
        self._copier.close()

    @contextmanager
    def _holding(self, order: tuple[int, ...]) -> Iterator[None]:
        layer = order[0]
        with self._lock:
            joins = self._held[layer] > 0
            self._held[layer] += 1
            if not joins:  # its holder has said what comes next
                self._plan(order)
            transfer = self._coming.get(layer)
        try:
            if transfer is not None:
                self._arrive(layer, transfer)
            yield
        finally:
            with self._lock:
                self._held[layer] -= 1

    def _plan(self, order: tuple[int, ...]) -> None:
        """Let the next layers of an order come, as far as those that others hold leave room."""
        others = {layer for layer, users in self._held.items() if users and layer != order[0]}
        free = [layer for layer in order if layer not in others]
        room = max(1, self.capacity - len(others & self._resident))
        wanted = next_moves(free, self._resident - others, room)
        for old in wanted.evict:
            self._evict(old)
        for new in wanted.load:
            self._resident.add(new)
            self._coming[new] = self._copier.start(self._layers[new].parts)

    def _arrive(self, layer: int, transfer: Transfer) -> None:
        begun = self._clock()
        try:
            transfer.wait()
        finally:
            with self._lock:
                self.moved.waited_s += self._clock() - begun
                if self._coming.pop(layer, None) is not None:
                    self._account(layer)
                    if transfer.error is not None:
                        self._evict(layer)

    def _evict(self, layer: int) -> None:
        transfer = self._coming.pop(layer, None)
        if transfer is not None:
            transfer.cancel()
            self._account(layer)
        self._release(self._layers[layer].begin, self._layers[layer].end)
        self._resident.discard(layer)

    def _account(self, layer: int) -> None:
        self.moved.count(self._layers[layer].n_bytes, self._copier.seconds)
