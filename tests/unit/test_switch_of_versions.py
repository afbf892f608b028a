"""The name of an adapter gets another version while clients ask for it: none of them fails."""

from __future__ import annotations

import asyncio
from collections import Counter

import aiohttp
import pytest
from aiohttp import web

from windrow_operator.server_calls import NotLoaded, Servers
from windrow_operator.serving import Instance

NAME, ONE, TWO = "team.tone", "/one", "/two"


class LikeSGLang:
    """A server that treats names as SGLang 0.5.22 and 0.5.23 do (tokenizer_control_mixin).

    Loads and unloads have a lock, which serves them in their order. An unload takes the name away
    and waits for requests that use the adapter. A request for a name that was taken away loads what
    the name had, with the same lock, unless the name has something by then.

    Attributes:
        names: directories by name.
        gone: set once an unload has taken a name away.
        queued: set once a load waits for an unload.
        ahead: how many times a request for the name is there before whatever follows an unload.
        unloads: calls so far.
    """

    def __init__(self) -> None:
        self.names, self._had, self._used = {}, {}, Counter()
        self._lock, self._idle = asyncio.Lock(), asyncio.Condition()
        self.gone, self.queued = asyncio.Event(), asyncio.Event()
        self.ahead, self.unloads, self._requests = 0, 0, []

    async def load(self, name: str, path: str) -> str:
        if self._lock.locked():
            self.queued.set()
        async with self._lock:
            if name in self.names:
                return f"{name} is already loaded"
            self.names[name] = self._had[name] = path
            return ""

    async def unload(self, name: str) -> None:
        async with self._lock:
            path = self.names.pop(name)
            self.unloads += 1
            if self.ahead:
                self.ahead -= 1
                self._requests.append(asyncio.create_task(self.answer(name)))
                await asyncio.sleep(0)  # until it waits for the lock
            self.gone.set()
            async with self._idle:
                await self._idle.wait_for(lambda: not self._used[path])

    async def answer(self, name: str, ends: asyncio.Event | None = None) -> str:
        """Return the directory of the version by which a request was answered."""
        if name not in self.names:
            await self.load(name, self._had[name])
        path = self.names[name]
        self._used[path] += 1
        if ends is not None:
            await ends.wait()
        async with self._idle:
            self._used[path] -= 1
            self._idle.notify_all()
        return path

    def app(self) -> web.Application:
        async def models(_request):
            known = [{"id": name, "root": path} for name, path in self.names.items()]
            return web.json_response({"data": known})

        async def load(request):
            body = await request.json()
            why = await self.load(body["lora_name"], body["lora_path"])
            return web.json_response({"success": not why, "error_message": why})

        async def unload(request):
            await self.unload((await request.json())["lora_name"])
            return web.json_response({"success": True})

        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/load_lora_adapter", load)
        app.router.add_post("/unload_lora_adapter", unload)
        return app


class InOrder(Servers):
    """Calls whose load follows the unload once that has begun, however slow the machine is."""

    def __init__(self, session, server: LikeSGLang) -> None:
        super().__init__(session)
        self._server = server

    async def _behind(self) -> None:
        await self._server.gone.wait()
        self._server.gone.clear()


class LoadsFirst(LikeSGLang):
    """A server that is reached by a switch's load before its unload."""

    def __init__(self) -> None:
        super().__init__()
        self._refused = asyncio.Event()

    async def load(self, name: str, path: str) -> str:
        why = await super().load(name, path)
        if why:
            self._refused.set()
        return why

    async def unload(self, name: str) -> None:
        self.gone.set()
        await self._refused.wait()
        await super().unload(name)


def scene(act, kind=LikeSGLang) -> None:
    """Run `act(server, switch)`; `switch` has the server's name point to a directory."""

    async def run() -> None:
        server = kind()
        runner = web.AppRunner(server.app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        instance = Instance("d/decode-0", "0", "decode", url)
        try:
            async with aiohttp.ClientSession() as session:
                calls = InOrder(session, server)

                async def switch(path: str) -> None:
                    await calls.load_everywhere([(instance, path)], NAME, pinned=False)

                await switch(ONE)
                async with asyncio.timeout(60):
                    await act(server, switch)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_requests_that_come_while_a_name_switches_wait_and_get_the_new_version():
    async def act(server, switch):
        ends = asyncio.Event()
        long = asyncio.create_task(server.answer(NAME, ends))
        await asyncio.sleep(0)
        switching = asyncio.create_task(switch(TWO))
        await server.queued.wait()
        late = [asyncio.create_task(server.answer(NAME)) for _ in range(3)]
        await asyncio.sleep(0)
        ends.set()
        await switching
        assert await long == ONE
        assert await asyncio.gather(*late) == [TWO] * 3
        assert (server.names, server.unloads) == ({NAME: TWO}, 1)

    scene(act)


def test_where_a_request_brings_the_old_version_back_the_switch_is_tried_again():
    async def act(server, switch):
        server.ahead = 2
        await switch(TWO)
        assert await asyncio.gather(*server._requests) == [ONE] * 2
        assert (server.names, server.unloads) == ({NAME: TWO}, 3)

    scene(act)


def test_a_server_on_which_requests_always_come_first_keeps_the_old_version_and_is_named():
    async def act(server, switch):
        server.ahead = 100
        with pytest.raises(NotLoaded, match=r"decode-0 .* requests for it came first"):
            await switch(TWO)
        assert await server.answer(NAME) == ONE

    scene(act)


def test_a_load_that_reaches_the_server_first_is_sent_again():
    async def act(server, switch):
        await switch(TWO)
        assert (server.names, server.unloads) == ({NAME: TWO}, 1)

    scene(act, LoadsFirst)
