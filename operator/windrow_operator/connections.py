"""Bound the connections of callers that have not shown yet that they may call.

Anybody who reaches a port can open connections and say nothing. Of those that are not proven so
many are kept, each for so long; one more ends the oldest of the address that has most, so that a
flood from one address ends its own connections. A connection that is proven counts no more.
Connections whose TLS handshake has not ended are counted apart: they cost a caller nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from ssl import SSLContext
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

log = logging.getLogger(__name__)

MOST_UNPROVEN: Final = 64
PROVEN_WITHIN: Final = timedelta(seconds=10)
MOST_HANDSHAKES: Final = 256
HANDSHAKE_WITHIN: Final = timedelta(seconds=5)


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
    _of_address: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        """Return how many are open and not proven."""
        return len(self._unproven)

    def opened(self, transport: asyncio.Transport) -> None:
        """Take up a connection; with too many, the oldest of the busiest address ends."""
        loop = asyncio.get_running_loop()
        self._unproven[transport] = loop.call_later(self.within.total_seconds(), transport.abort)
        self._of_address[_address(transport)] += 1
        while len(self._unproven) > self.most:
            oldest = self._dispensable()
            self.forget(oldest)
            oldest.abort()

    def forget(self, transport: object) -> None:
        """Count a connection no more: it has ended, or its caller has shown that it may call."""
        end = self._unproven.pop(transport, None)  # type: ignore[call-overload]
        if end is None:
            return
        end.cancel()
        address = _address(transport)  # type: ignore[arg-type]
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]

    def _dispensable(self) -> asyncio.Transport:
        most = max(self._of_address.values())
        return next(each for each in self._unproven if self._of_address[_address(each)] == most)


def _address(transport: asyncio.BaseTransport) -> str:
    """Return the address that a connection came from; it is kept after the connection's end."""
    return str((transport.get_extra_info("peername") or ("",))[0])


def counts_between_calls(connections: Connections) -> Middleware:
    """Return the middleware of a port that anybody may ask: callers count while they ask nothing.

    A connection that stays open for the next call is one that says nothing until that comes.
    """

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.forget(request.transport)
        try:
            return await handler(request)
        finally:
            transport = request.transport
            if transport is not None and not transport.is_closing():
                connections.opened(transport)

    return counted


class _Counted(asyncio.Protocol):
    """Another protocol, whose connection is counted.

    The first bytes may come before `connection_made`: with the end of a handshake.
    """

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self._inner, self._connections = inner, connections
        self._transport: asyncio.BaseTransport | None = None
        self._early: list[bytes] = []
        self._has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._has_ended:
            return
        self._transport = transport
        self._inner.connection_made(transport)
        self._connections.opened(transport)  # type: ignore[arg-type]
        for data in self._early:
            self._inner.data_received(data)
        self._early.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self._has_ended = True
        if self._transport is not None:
            self._connections.forget(self._transport)
            self._inner.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._transport is None:
            self._early.append(data)
        else:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._transport is not None else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _Arriving(asyncio.Protocol):
    """A connection until its TLS handshake has ended, counted among `handshakes`."""

    def __init__(self, then: _Counted, tls: SSLContext, handshakes: Connections) -> None:
        self._then, self._tls, self._handshakes = then, tls, handshakes
        self._task: asyncio.Task[None] | None = None  # the loop itself keeps none

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # the first bytes are of the handshake
        self._handshakes.opened(transport)
        self._task = asyncio.get_running_loop().create_task(self._secure(transport))

    async def _secure(self, transport: asyncio.Transport) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport,
                self._then,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=self._handshakes.within.total_seconds(),
            )
        except OSError as error:  # of TLS and timeouts too
            log.debug("a TLS handshake has failed: %s", error)
            return
        finally:
            self._handshakes.forget(transport)
        if secured is not None:  # the connection has not ended meanwhile
            self._then.connection_made(secured)


async def listen(
    factory: Callable[[], asyncio.Protocol],
    connections: Connections,
    host: str,
    port: int,
    tls: SSLContext | None,
    handshakes: Connections | None = None,
) -> asyncio.Server:
    """Return a server of `factory` whose connections are counted.

    Args:
        factory: makes the protocol of a connection.
        connections: counts them.
        host: to listen on.
        port: to listen on; 0: any.
        tls: how it is encrypted; None: it is not.
        handshakes: counts those whose TLS handshake has not ended. Default: `MOST_HANDSHAKES` of
            them, each for `HANDSHAKE_WITHIN`.

    Raises:
        OSError: the port is taken.
    """
    arriving = Connections(MOST_HANDSHAKES, HANDSHAKE_WITHIN) if handshakes is None else handshakes

    def protocol() -> asyncio.Protocol:
        counted = _Counted(factory(), connections)
        return counted if tls is None else _Arriving(counted, tls, arriving)

    return await asyncio.get_running_loop().create_server(protocol, host, port, reuse_address=True)
