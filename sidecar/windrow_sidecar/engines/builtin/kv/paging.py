"""Allocate KV pages inside chunks that are taken from the arena and given back.

Page `p` is in chunk `p // pages_per_chunk`. Low ids are used first, so that high chunks empty and
can be lent. Knows no tensor; the arena is reached through `ChunkSource`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Protocol

from windrow.errors import InvariantBroken

# An empty chunk is kept for the next page: otherwise a request that ends and one that begins would
# hand the same chunk back and forth.
_EMPTY_CHUNKS_KEPT = 1


class ChunkSource(Protocol):
    """The owner's side of `_core.Arena`, as far as KV needs it."""

    def take_kv(self) -> int:
        """The lowest chunk that KV may have, -1 when there is none."""
        ...

    def return_kv(self, chunk: int) -> None:
        """Give a chunk back."""
        ...

    def counts(self) -> tuple[int, int, int, int, int]:
        """Chunks that are FREE, KV, LENT, RESERVED, DRAINING."""
        ...


class PagePool:
    """Allocates pages. Each call is all or nothing and costs microseconds."""

    def __init__(self, source: ChunkSource, *, pages_per_chunk: int) -> None:
        self._source, self._pages_per_chunk = source, pages_per_chunk
        self._free: dict[int, list[int]] = {}  # by chunk held: its free pages, descending
        self._with_room: list[int] = []  # chunks that have a free page, ascending
        self._n_free = 0

    @property
    def chunks_held(self) -> int:
        """Chunks that are KV now."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that could be had now, those of chunks not taken yet included."""
        free, _, _, reserved, _ = self._source.counts()
        return self._n_free + (free + reserved) * self._pages_per_chunk

    def allocate(self, n_pages: int) -> list[int] | None:
        """Return so many pages, or None (and change nothing) where the arena has no room."""
        while self._n_free < n_pages:
            chunk = self._source.take_kv()
            if chunk < 0:
                self._trim()
                return None
            self._hold(chunk)
        pages: list[int] = []
        while len(pages) < n_pages:
            chunk = self._with_room[0]
            free = self._free[chunk]
            while free and len(pages) < n_pages:
                pages.append(free.pop())
            if not free:
                self._with_room.pop(0)
        self._n_free -= n_pages
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Take pages back; chunks that are empty then go back to the arena, but for one."""
        for page in pages:
            chunk = page // self._pages_per_chunk
            free = self._free.get(chunk)
            if free is None or page in free:
                raise InvariantBroken(f"KV page {page} is released but was not in use")
            if not free:
                insort(self._with_room, chunk)
            insort(free, page, key=lambda p: -p)
            self._n_free += 1
        self._trim()

    def check(self, in_use: Iterable[int]) -> None:
        """Verify that every page is free or in use, and none twice. Raises InvariantBroken."""
        used = list(in_use)
        free = [page for pages in self._free.values() for page in pages]
        held = {
            chunk * self._pages_per_chunk + i
            for chunk in self._free
            for i in range(self._pages_per_chunk)
        }
        if len(used) + len(free) != len(held) or {*used, *free} != held:
            raise InvariantBroken(
                f"KV pages do not add up: {len(used)} in use, {len(free)} free, {len(held)} held"
            )
        kv_chunks = self._source.counts()[1]
        if kv_chunks != len(self._free):
            raise InvariantBroken(f"{len(self._free)} KV chunks held, the arena says {kv_chunks}")

    def _hold(self, chunk: int) -> None:
        first = chunk * self._pages_per_chunk
        self._free[chunk] = list(range(first + self._pages_per_chunk - 1, first - 1, -1))
        insort(self._with_room, chunk)
        self._n_free += self._pages_per_chunk

    def _trim(self) -> None:
        empty = [c for c in self._with_room if len(self._free[c]) == self._pages_per_chunk]
        for chunk in empty[_EMPTY_CHUNKS_KEPT:]:
            del self._free[chunk]
            self._with_room.remove(chunk)
            self._n_free -= self._pages_per_chunk
            self._source.return_kv(chunk)
