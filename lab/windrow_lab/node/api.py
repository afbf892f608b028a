"""The few calls of the Kubernetes API that a node needs, over plain JSON."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from windrow.errors import UserError, WindrowError

log = logging.getLogger(__name__)

Json = dict[str, Any]

_STRATEGIC_MERGE = "application/strategic-merge-patch+json"
# The server ends a watch after this time; one that stays silent for longer is dead.
_WATCH_SECONDS = 240
_RETRY_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)


class NodeApiError(WindrowError):
    """The API server refused a call."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(f"{message} ({code})")


class Api:
    """One connection pool to one API server. An async context manager."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Api:
        """Connect as the current context of a kubeconfig says (bearer token, embedded authority).

        Raises UserError when the file is missing or authenticates in another way.
        """
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            context = _named(config["contexts"], config["current-context"])["context"]
            cluster = _named(config["clusters"], context["cluster"])["cluster"]
            token = _named(config["users"], context["user"])["user"]["token"]
            authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is not a kubeconfig with a token and an embedded authority: {error!r}",
                field="kubeconfig",
                remedy="Use the file that the local control plane writes.",
            ) from error
        return cls(
            httpx.AsyncClient(
                base_url=cluster["server"],
                headers={"Authorization": f"Bearer {token}"},
                verify=ssl.create_default_context(cadata=authority),
                timeout=httpx.Timeout(10),
                limits=httpx.Limits(max_connections=None),
                # A proxy of the user's shell has no business between us and the loopback.
                trust_env=False,
            )
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def get(self, path: str, **params: str) -> Json:
        """Read one object or list."""
        return await self._call("GET", path, params=params)

    async def create(self, path: str, body: Json) -> Json:
        """Create an object below a collection, or call a subresource."""
        return await self._call("POST", path, json=body)

    async def patch(self, path: str, body: Json) -> Json:
        """Apply a strategic merge patch, which keeps list entries of others (conditions)."""
        return await self._call(
            "PATCH", path, content=json.dumps(body), headers={"Content-Type": _STRATEGIC_MERGE}
        )

    async def delete(self, path: str, body: Json | None = None) -> Json:
        """Delete an object; `body` holds DeleteOptions."""
        return await self._call("DELETE", path, json=body or {})

    async def watch(self, path: str) -> AsyncIterator[tuple[str, Json]]:
        """List a collection and follow it, for ever, over errors and restarts of the server.

        Yields ("LISTED", list) first and after each gap; what is missing in the list was deleted
        meanwhile. Then ("ADDED" | "MODIFIED" | "DELETED", object).
        """
        failures = 0
        while True:
            try:
                listed = await self.get(path)
                yield "LISTED", listed
                failures = 0
                async for event in self._follow(path, listed["metadata"]["resourceVersion"]):
                    yield event
            except (httpx.TransportError, NodeApiError) as error:
                log.info("watch of %s broke: %r", path, error)
                await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])
                failures += 1

    async def _follow(self, path: str, version: str) -> AsyncIterator[tuple[str, Json]]:
        while True:
            params = {
                "watch": "1",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(_WATCH_SECONDS),
            }
            timeout = httpx.Timeout(10, read=_WATCH_SECONDS + 30)
            async with self._client.stream("GET", path, params=params, timeout=timeout) as answer:
                if answer.is_error:
                    raise NodeApiError(answer.status_code, "watch refused")
                async for line in answer.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise NodeApiError(event["object"].get("code", 0), "watch ended")
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield event["type"], event["object"]

    async def _call(self, method: str, path: str, **arguments: Any) -> Json:  # noqa: ANN401
        answer = await self._client.request(method, path, **arguments)
        if answer.is_error:
            try:
                message = answer.json()["message"]
            except (ValueError, KeyError, TypeError):
                message = answer.text
            raise NodeApiError(answer.status_code, f"{method} {path}: {message}")
        body: Json = answer.json()
        return body


def _named(entries: list[Json], name: str) -> Json:
    for entry in entries:
        if entry["name"] == name:
            return entry
    raise KeyError(name)
