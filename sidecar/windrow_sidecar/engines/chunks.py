"""Track which chunks of the arena an engine's own page allocator holds, and their pages.

Page `p` is in chunk `p // pages_per_chunk`. Page 0 is the engine's padding, as in SGLang: it is
never allocated, so chunk 0 is never given away. Knows neither an engine nor a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from windrow_sidecar._core import DRAINING, FREE, LENT, RESERVED, Arena, Geometry


class KvChunks(Protocol):
    """The owner's side of an `Arena`; over ranks that of `RankChunks`."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the arena."""
        ...

    def take_kv(self) -> int:
        """Return the lowest chunk that KV may have, which is KV's from now on; -1: none."""
        ...

    def return_kv(self, chunk: int) -> None:
        """Take back a chunk that has no KV any more."""
        ...

    def states(self) -> bytes:
        """Return one byte a chunk."""
        ...


class ChunkHoldings:
    """The allocator's side of the arena. The scheduler's thread only.

    The worker gives chunks back at any time. Counts follow when `refresh` looks, so that what is
    available and what is lent add up between two looks.

    Args:
        arena: of this process; over ranks its chunks as all ranks have agreed on them.
        pages_per_chunk: KV pages in a chunk.
        n_pages: pages that the engine allocates: ids 1 to `n_pages`, both included.

    Attributes:
        returned_pages: pages of chunks that decode may take at any moment.
        lent_pages: pages of chunks that a worker holds.
    """

    def __init__(self, arena: KvChunks, *, pages_per_chunk: int, n_pages: int) -> None:
        self._arena, self.pages_per_chunk, self._n_pages = arena, pages_per_chunk, n_pages
        self._held = [False] * arena.geometry.chunks
        self._states = b""
        self._returned: set[int] = set()
        self._used_by_worker: set[int] = set()
        self.returned_pages = self.lent_pages = 0
        while self.take() is not None:
            pass

    def pages_of(self, chunk: int) -> range:
        """Ids of the pages in a chunk."""
        first = chunk * self.pages_per_chunk
        return range(max(1, first), min(first + self.pages_per_chunk, self._n_pages + 1))

    def held(self) -> list[int]:
        """Chunks that hold KV or may, ascending."""
        return [chunk for chunk, held in enumerate(self._held) if held]

    def was_lent(self, chunk: int) -> bool:
        """Return whether a worker has had the chunk since the last call for it."""
        found = chunk in self._used_by_worker
        self._used_by_worker.discard(chunk)
        return found

    def take(self) -> int | None:
        """Hold one more chunk; None where the arena has none to give."""
        chunk = self._arena.take_kv()
        if chunk < 0:
            return None
        self._held[chunk] = True
        if chunk in self._returned:
            self._returned.discard(chunk)
            self.returned_pages -= len(self.pages_of(chunk))
        elif self._states:  # it came back from a worker since the last look
            self.lent_pages -= len(self.pages_of(chunk))
        return chunk

    def give(self, chunk: int) -> None:
        """Hand a chunk without KV to the arena, which may lend it."""
        self._arena.return_kv(chunk)
        self._held[chunk] = False
        self._returned.add(chunk)
        self.returned_pages += len(self.pages_of(chunk))

    def refresh(self) -> None:
        """Look which chunks have been lent or given back since the last look."""
        states = self._arena.states()
        if states == self._states:
            return
        self._states = states
        ours = {c for c, s in enumerate(states) if s in (FREE, RESERVED) and not self._held[c]}
        lent = [c for c, s in enumerate(states) if s in (LENT, DRAINING)]
        self._returned = ours
        self._used_by_worker.update(lent)
        self.returned_pages = sum(len(self.pages_of(c)) for c in ours)
        self.lent_pages = sum(len(self.pages_of(c)) for c in lent)

    def emptiest(self, free_pages: Sequence[int], *, at_most: int, keep_pages: int) -> list[int]:
        """Chunks whose pages are all free, from the highest id, leaving `keep_pages` free.

        `free_pages`: how many pages of each chunk are free.
        """
        found: list[int] = []
        spare = sum(free_pages) - keep_pages
        for chunk in range(len(self._held) - 1, 0, -1):
            n = len(self.pages_of(chunk))
            if len(found) == at_most or spare < n:
                break
            if self._held[chunk] and n and free_pages[chunk] == n:
                found.append(chunk)
                spare -= n
        return found

    def most_lendable(self) -> int:
        """Return how many chunks a worker could ever have, with no request in decode.

        Decode keeps a chunk's worth of free pages, the arena one chunk in reserve, and lending
        another one beside it (see `plan_lending`).
        """
        free = [len(self.pages_of(chunk)) for chunk in range(len(self._held))]
        empty = self.emptiest(free, at_most=len(free), keep_pages=self.pages_per_chunk)
        return max(0, len(empty) - 2)

    def reclaim_of_the_dead(self, arena: Arena) -> None:
        """Take back what `arena`, whose chunks these are, lends while nobody is attached."""
        owners = {
            info.owner
            for chunk, held in enumerate(self._held)
            if not held and (info := arena.chunk(chunk)).state in (LENT, DRAINING)
        }
        if owners and not arena.peers():
            for owner in owners:
                arena.reclaim(owner)
        self.refresh()
