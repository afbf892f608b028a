"""Bound the connections of callers that have not shown yet that they may call.

Anybody who reaches a port can open connections and say nothing. Of those that are not proven so
many are kept, each for so long; one more ends the oldest. A connection that is proven counts no
more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from ssl import SSLContext
from typing import Final

MOST_UNPROVEN: Final = 64
PROVEN_WITHIN: Final = timedelta(seconds=10)
_HANDSHAKE_WITHIN_S: Final = 5.0


@dataclass(eq=False)
class Connections:
    """The open connections of one port that are not proven. Used from one event loop.

    Attributes:
        most: that are kept.
        within: how long each may take to be proven.
    """

    most: int = MOST_UNPROVEN
    within: timedelta = PROVEN_WITHIN
    _unproven: dict[asyncio.Transport, asyncio.TimerHandle] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return how many are open and not proven."""
        return len(self._unproven)

    def opened(self, transport: asyncio.Transport) -> None:
        """Take up a connection; with too many, the oldest one ends."""
        loop = asyncio.get_running_loop()
        end = loop.call_later(self.within.total_seconds(), transport.abort)
        self._unproven[transport] = end
        while len(self._unproven) > self.most:
            oldest = next(iter(self._unproven))
            self.forget(oldest)
            oldest.abort()

    def forget(self, transport: object) -> None:
        """Count a connection no more: it has ended, or its caller has shown that it may call."""
        end = self._unproven.pop(transport, None)  # type: ignore[call-overload]
        if end is not None:
            end.cancel()


class _Counted(asyncio.Protocol):
    """Another protocol, whose connection is counted."""

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner, self._connections = inner, connections
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._inner.connection_made(transport)
        self._connections.opened(transport)  # type: ignore[arg-type]

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.forget(self._transport)
        self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


async def listen(
    factory: Callable[[], asyncio.Protocol],
    connections: Connections,
    host: str,
    port: int,
    tls: SSLContext | None,
) -> asyncio.Server:
    """Return a server of `factory` whose connections are counted.

    Args:
        factory: makes the protocol of a connection.
        connections: counts them.
        host: to listen on.
        port: to listen on; 0: any.
        tls: how it is encrypted; None: it is not.

    Raises:
        OSError: the port is taken.
    """
    return await asyncio.get_running_loop().create_server(
        lambda: _Counted(factory(), connections),
        host,
        port,
        ssl=tls,
        reuse_address=True,
        ssl_handshake_timeout=_HANDSHAKE_WITHIN_S if tls else None,
    )
