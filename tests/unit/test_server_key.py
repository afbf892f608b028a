"""A server that asks for a key gets the policy's, and says so where it has none or another."""

from __future__ import annotations

import asyncio
import base64

import aiohttp
import pytest
from aiohttp import web

from windrow.errors import UserError
from windrow_operator.secrets import read_server_key
from windrow_operator.server_calls import NotLoaded, Servers
from windrow_operator.serving import Instance


def load(token):
    """Load an adapter into a server whose key is `k`."""

    async def answer(request):
        if request.headers.get("Authorization") != "Bearer k":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [], "success": True})

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                one = Instance("d/decode-0", "u", "decode", f"http://127.0.0.1:{port}", token)
                await Servers(session).load_everywhere([(one, "/a")], "d.tone", pinned=False)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def test_the_key_opens_the_server():
    load("k")


@pytest.mark.parametrize(
    ("token", "said"), [("", "asks for a key"), ("no", "does not take the key")]
)
def test_without_the_key_the_policys_field_is_named(token, said):
    with pytest.raises(NotLoaded, match=rf"{said}.*serverKeySecret.*401"):
        load(token)


class Secrets:
    """An API server with one Secret."""

    def __init__(self, **body):
        self.body = body

    async def get(self, path):
        assert path == "/api/v1/namespaces/d/secrets/sglang"
        return self.body


def test_the_key_is_read_from_a_labelled_secret():
    data = {"api-key": base64.b64encode(b"k\n").decode(), "other": "eA=="}
    labels = {"windrow.dev/credentials": "true"}
    opened = Secrets(metadata={"labels": labels}, data=data)
    assert asyncio.run(read_server_key(opened, "d", "sglang", "api-key")) == "k"
    with pytest.raises(UserError, match="holds no credentials"):
        asyncio.run(read_server_key(opened, "d", "sglang", "missing"))
    with pytest.raises(UserError, match="is not meant for jobs"):
        asyncio.run(read_server_key(Secrets(metadata={}, data=data), "d", "sglang", "api-key"))


def test_a_key_is_not_shown():
    assert "secret" not in repr(Instance("d/x", "u", "decode", "http://h", "secret"))
