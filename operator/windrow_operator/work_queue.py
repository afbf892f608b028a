"""Queue what has changed, and the jobs that wait for one of a few workers.

No two workers have the same job, and nobody has to look at everything to find what has changed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

_AT_ONCE = 100  # things in one go; admission and streams have their turn in between

_T = TypeVar("_T")


async def in_pieces(things: Iterable[_T], at_once: int = _AT_ONCE) -> AsyncIterator[_T]:
    """Yield `things` as they are at the call; after each `at_once`, let others have their turn."""
    for number, thing in enumerate(list(things), 1):
        yield thing
        if number % at_once == 0:
            await asyncio.sleep(0)


class Changes:
    """Keys of what has changed, once for each reader, in the order of their first change.

    Args:
        readers: who takes them, each at a time of its own.
    """

    def __init__(self, *readers: str) -> None:
        self._changed: dict[str, dict[str, None]] = {reader: {} for reader in readers}

    def mark(self, key: str) -> None:
        """Note that what `key` names has changed."""
        for keys in self._changed.values():
            keys[key] = None

    def mark_all(self, keys: Iterable[str]) -> None:
        """Note that each of `keys` has changed."""
        new = dict.fromkeys(keys)
        for changed in self._changed.values():
            changed.update(new)

    def waits(self, reader: str) -> bool:
        """Return whether something has changed since `reader` last asked."""
        return bool(self._changed[reader])

    def take(self, reader: str, at_most: int | None = None) -> list[str]:
        """Return what has changed since `reader` last asked, or so much of it."""
        changed = self._changed[reader]
        taken = list(itertools.islice(changed, at_most))
        for key in taken:
            del changed[key]
        return taken


class WorkQueue:
    """Keys that are due, the smallest rank first.

    A key that is added while a worker has it is handled again when that worker is done: the worker
    may have changed what it is about, so that its place is to be found again.
    """

    def __init__(self) -> None:
        self._due: dict[str, Any] = {}  # rank by key
        self._heap: list[tuple[Any, str]] = []
        self._busy: set[str] = set()
        self._again: set[str] = set()  # of those that are busy
        self._some, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        """Return how many keys are due or in a worker's hands."""
        return len(self._due) + len(self._busy)

    def add(self, key: str, rank: Any) -> None:  # noqa: ANN401 - anything with an order
        """Let `key` have a turn; nothing changes where it waits for one already."""
        if key in self._busy:
            self._again.add(key)
        elif key not in self._due:
            self._due[key] = rank
            heapq.heappush(self._heap, (rank, key))
            self._some.set()
            self._idle.clear()

    async def take(self) -> str:
        """Wait for a key that is due and take it; `done` has to follow."""
        while not self._heap:
            self._some.clear()
            await self._some.wait()
        _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._busy.add(key)
        return key

    def done(self, key: str) -> bool:
        """Give a key back; return whether it was added meanwhile and is to be added again."""
        self._busy.discard(key)
        again = key in self._again
        self._again.discard(key)
        if not len(self):
            self._idle.set()
        return again

    async def drained(self) -> None:
        """Wait until nothing is due and no worker has anything."""
        await self._idle.wait()


class DueKeys:
    """Keys that are due at a time; of two times for a key the earlier one counts."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def put(self, key: str, at: float) -> None:
        """Let `key` be due at `at`, unless it is due before."""
        known = self._at.get(key)
        if known is None or at < known:
            self._at[key] = at
            heapq.heappush(self._heap, (at, key))

    def take_due(self, now: float) -> list[str]:
        """Remove and return the keys that are due by now."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                due.append(key)
        return due

    def next_at(self) -> float | None:
        """Return when the next key is due; None: none is."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
