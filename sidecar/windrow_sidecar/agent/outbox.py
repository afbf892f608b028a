"""Keep job events until the operator must have received them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from windrow.proto import attach_pb2

_Key = tuple[str, int, int, str]
# Kinds are few and jobs come one after the other: this many are weeks of a busy slot.
_KEPT_MAX = 256


class EventOutbox:
    """The newest event of each kind and reason of each placement, in the order of happening.

    The wire acknowledges nothing, so every new stream gets all of them again; the operator knows
    them by (job UID, epoch, kind).
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[int, attach_pb2.JobEvent]] = {}
        self._sequence = 0
        self._changed = asyncio.Condition()

    async def add(self, event: attach_pb2.JobEvent) -> None:
        """Keep an event and wake the threads that wait for one."""
        key = (event.job_uid, event.epoch, event.kind, event.reason)
        self._kept.pop(key, None)
        self._sequence += 1
        self._kept[key] = (self._sequence, event)
        while len(self._kept) > _KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        async with self._changed:
            self._changed.notify_all()

    def forget(self, job_uid: str, epoch: int) -> None:
        """The operator has heard of this run's end, and so of everything before."""
        self._kept = {key: kept for key, kept in self._kept.items() if key[:2] != (job_uid, epoch)}

    def placed_again(self, job_uid: str, epoch: int) -> None:
        """The operator has placed the job again: earlier placements are over for it."""
        self._kept = {
            key: kept for key, kept in self._kept.items() if key[0] != job_uid or key[1] >= epoch
        }

    async def after(self, sequence: int) -> tuple[int, attach_pb2.JobEvent]:
        """The first event after that number (0: from the beginning), as soon as there is one."""
        async with self._changed:
            while True:
                for number, event in self._kept.values():
                    if number > sequence:
                        return number, event
                await self._changed.wait()

    async def note_carried(self) -> None:
        """The stream has carried one more."""
        async with self._changed:
            self._changed.notify_all()

    async def carried(self, everything: Callable[[], bool]) -> None:
        """Wait until the stream has carried what it should."""
        async with self._changed:
            await self._changed.wait_for(everything)

    @property
    def last(self) -> int:
        """Number of the newest event; 0: none yet."""
        return self._sequence
