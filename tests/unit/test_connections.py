"""Connections that say nothing: how many are kept, for how long, and that the others are served."""

import asyncio
from datetime import timedelta

import pytest
from aiohttp import web

from windrow_operator.connections import Connections, listen


class Talk:
    """A client's connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, server):
        host, port = server.sockets[0].getsockname()[:2]
        return cls(*await asyncio.open_connection(host, port))

    async def get(self, path):
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1])

    async def has_ended(self):
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


@pytest.fixture
async def served():
    """A server that counts; `/known` proves a caller."""
    connections = Connections(most=3, within=timedelta(days=1))

    async def answer(request):
        if request.path == "/known":
            connections.forget(request.transport)
        return web.Response()

    application = web.Application()
    application.router.add_get("/{any}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    server = await listen(runner.server, connections, "127.0.0.1", 0, None)
    opened = []

    async def dial():
        opened.append(await Talk.dial(server))
        return opened[-1]

    yield connections, dial
    for talk in opened:
        talk.writer.close()
    server.close()
    await runner.cleanup()


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
