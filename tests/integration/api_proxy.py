"""A proxy before a real API server, whose answers a test can refuse, delay or lose."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web

_HOP = frozenset({"transfer-encoding", "connection", "content-encoding", "content-length"})


@dataclass
class Fault:
    """What happens to some requests.

    Attributes:
        hits: whether a request (method, path with query) is hit.
        how: "refuse": it gets `status` and never arrives; "lose": it arrives, and its answer does
            not come back; "mute": of a watch, nothing comes any more; "expire": a watch is told
            that its version is kept no longer.
        times: how many are hit.
        hit: how many were.
    """

    hits: Callable[[str, str], bool]
    how: str
    status: int = 500
    retry_after: str = ""
    times: int = 1_000_000
    hit: int = 0


class ApiProxy:
    """Forwards what its clients ask, with their credentials, until a test names a fault.

    Args:
        kubeconfig: of the API server.
        folder: a kubeconfig for the proxy is written there.

    Attributes:
        kubeconfig: the one to use.
        faults: in force now; the first that hits counts.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        config = yaml.safe_load(Path(kubeconfig).read_text())
        cluster = config["clusters"][0]["cluster"]
        self._server = cluster["server"]
        self._authority = folder / "authority.pem"
        self._authority.write_bytes(base64.b64decode(cluster.pop("certificate-authority-data")))
        self.faults: list[Fault] = []
        self._watches: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        port = self._call(self._begin())
        cluster["server"] = f"http://127.0.0.1:{port}"
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def close(self) -> None:
        try:
            self._call(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def break_watches(self) -> None:
        """End all watches that are open; their clients begin new ones."""
        self._call(self._abort_watches())

    def _call(self, what):
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=30)

    async def _begin(self) -> int:
        trust = ssl.create_default_context(cafile=str(self._authority))
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trust, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        application = web.Application(client_max_size=1 << 26)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def _end(self) -> None:
        await self._abort_watches()
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.close()
        # A client that was killed leaves connections with something unsent; they would wait for it.
        for connection in list(self._loop._transports.values()):
            connection.abort()
        for _ in range(5):  # what is closed says so on the loop
            await asyncio.sleep(0)

    async def _abort_watches(self) -> None:
        for connection in tuple(self._watches):
            connection.abort()

    def _fault(self, request: web.Request) -> Fault | None:
        for fault in self.faults:
            if fault.hit < fault.times and fault.hits(request.method, request.path_qs):
                return fault
        return None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        fault = self._fault(request)
        if fault is not None and fault.how != "mute":
            fault.hit += 1
        if fault is not None and fault.how == "refuse":
            headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
            said = {"kind": "Status", "code": fault.status, "message": "the test says no"}
            return web.json_response(said, status=fault.status, headers=headers)
        if fault is not None and fault.how == "expire":
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            return web.Response(body=json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP | {"host"}}
        body = await request.read()
        async with self._client.request(
            request.method, f"{self._server}{request.path_qs}", headers=headers, data=body or None
        ) as found:
            kept = {k: v for k, v in found.headers.items() if k.lower() not in _HOP}
            if "watch=true" not in request.query_string:
                content = await found.read()
                if fault is not None and fault.how == "lose":
                    await asyncio.sleep(3600)  # until the client has had enough
                if "Content-Encoding" in found.headers:
                    kept["Content-Encoding"] = found.headers["Content-Encoding"]
                return web.Response(body=content, status=found.status, headers=kept)
            return await self._forward_watch(request, found, kept)

    async def _forward_watch(
        self, request: web.Request, found: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        stream = web.StreamResponse(status=found.status, headers=headers)
        await stream.prepare(request)
        connection = request.transport
        self._watches.add(connection)
        try:
            async for piece in found.content.iter_any():
                fault = self._fault(request)
                if fault is not None and fault.how == "mute":
                    fault.hit += 1
                else:
                    await stream.write(piece)
        except (ConnectionError, aiohttp.ClientError):
            pass  # the watcher has gone
        finally:
            self._watches.discard(connection)
        return stream
