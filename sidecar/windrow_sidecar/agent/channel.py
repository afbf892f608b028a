"""One end of a bidirectional stream: anyone may send, one task writes, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class OutgoingQueue(Generic[M]):
    """A queue in front of `write`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M] = asyncio.Queue()

    def send(self, message: M) -> None:
        """Queue a message; what is queued when the stream ends is lost with it."""
        self._queue.put_nowait(message)

    async def pump(self, write: Callable[[M], Awaitable[object]]) -> None:
        """Write what is sent, until cancelled."""
        while True:
            await write(await self._queue.get())
