"""Connections that say nothing: how many are kept, for how long, and that the others are served."""

import asyncio
import ssl
from datetime import timedelta

import pytest
from aiohttp import web

from windrow_operator.connections import Connections, counts_between_calls, listen
from windrow_sidecar.testing.attached_operator import certificate


class Talk:
    """A client's connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, server, **how):
        host, port = server.sockets[0].getsockname()[:2]
        return cls(*await asyncio.open_connection(host, port, **how))

    async def get(self, path):
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1])

    async def has_ended(self):
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


def few(most=3):
    return Connections(most=most, within=timedelta(days=1))


async def serving(connections, tls=None, handshakes=None, middlewares=()):
    """A server that counts; `/known` proves a caller. Yields how to dial it."""

    async def answer(request):
        if request.path == "/known":
            connections.forget(request.transport)
        return web.Response()

    application = web.Application(middlewares=middlewares)
    application.router.add_get("/{any}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    server = await listen(runner.server, connections, "127.0.0.1", 0, tls, handshakes)
    opened = []

    async def dial(**how):
        opened.append(await Talk.dial(server, **how))
        return opened[-1]

    yield dial
    for talk in opened:
        talk.writer.close()
    server.close()
    await runner.cleanup()


@pytest.fixture
async def served():
    connections = few()
    async for dial in serving(connections):
        yield connections, dial


@pytest.fixture
async def secured(tmp_path):
    """A server with TLS; dialling it with `ssl=` makes a handshake."""
    key, cert = certificate()
    (tmp_path / "pair.pem").write_bytes(key + cert)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "pair.pem")
    trusting = ssl.create_default_context(cadata=cert.decode())
    connections, handshakes = few(), few()
    async for dial in serving(connections, tls, handshakes):
        yield connections, handshakes, dial, trusting


async def test_the_oldest_that_says_nothing_goes_and_those_that_are_proven_stay(served):
    connections, dial = served
    known = await dial()
    assert await known.get("/known") == 200
    silent = [await dial() for _ in range(5)]
    assert await silent[0].has_ended()
    assert await silent[1].has_ended()
    assert await silent[-1].get("/other") == 200  # the newest are served
    assert len(connections) == 3
    assert await known.get("/known") == 200


async def test_on_a_port_that_anybody_may_ask_callers_count_while_they_ask_nothing():
    connections = few()
    async for dial in serving(connections, middlewares=[counts_between_calls(connections)]):
        scraper = await dial()
        for _ in range(2):
            assert await scraper.get("/metrics") == 200
        silent = [await dial() for _ in range(3)]
        assert await scraper.has_ended()  # the oldest of those that asked nothing since
        assert await silent[-1].get("/healthz") == 200
        assert len(connections) == 3
        connections.within = timedelta(0)
        assert await silent[-1].get("/healthz") == 200
        assert await silent[-1].has_ended()


async def test_one_that_proves_nothing_in_time_ends(served):
    connections, dial = served
    connections.within = timedelta(0)
    assert await (await dial()).has_ended()
    assert len(connections) == 0


async def test_one_that_ends_is_counted_no_more(served):
    connections, dial = served
    talk = await dial()
    assert await talk.get("/other") == 200
    assert len(connections) == 1
    talk.writer.close()
    async with asyncio.timeout(30):
        while len(connections):  # noqa: ASYNC110 - the server is in this loop, and says nothing
            await asyncio.sleep(0)


async def test_of_connections_that_end_no_handshake_the_oldest_go(secured):
    connections, handshakes, dial, trusting = secured
    known = await dial(ssl=trusting)
    assert await known.get("/known") == 200
    silent = [await dial() for _ in range(5)]
    assert await silent[0].has_ended()
    assert await silent[1].has_ended()
    assert len(handshakes) == 3
    assert await (await dial(ssl=trusting)).get("/known") == 200  # a new caller is served
    assert await known.get("/known") == 200
    assert len(connections) == 0


async def test_a_connection_that_ends_no_handshake_in_time_ends(secured):
    _, handshakes, dial, _ = secured
    handshakes.within = timedelta(milliseconds=1)
    assert await (await dial()).has_ended()
    assert len(handshakes) == 0


async def test_words_that_are_no_handshake_end_the_connection(secured):
    connections, handshakes, dial, _ = secured
    talk = await dial()
    talk.writer.write(b"GET /known HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
    while not await talk.has_ended():
        pass
    assert (len(handshakes), len(connections)) == (0, 0)


class FromAddress:
    """A transport, as far as it is counted."""

    def __init__(self, address):
        self.address, self.has_ended = address, False

    def get_extra_info(self, name):
        return (self.address, 5)

    def abort(self):
        self.has_ended = True


async def test_a_flood_from_one_address_ends_its_own_connections():
    connections = few()
    first = FromAddress("10.0.0.1")
    connections.opened(first)
    flood = [FromAddress("10.0.0.2") for _ in range(20)]
    for each in flood:
        connections.opened(each)
    assert not first.has_ended
    assert [each.has_ended for each in flood] == [True] * 18 + [False] * 2
    for each in (first, *flood):
        connections.forget(each)
    assert len(connections) == 0
    assert not connections._of_address
