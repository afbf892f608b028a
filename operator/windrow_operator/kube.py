"""Call the API server: plain dictionaries in and out, one class, no decisions."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
import kopf
import yaml
from kubernetes.aio import client, config

from windrow.crd import API_VERSION, Kind
from windrow.errors import Transient, UserError
from windrow.kubeconfig import Kubeconfig, impersonation_headers, require_usable

Body = dict[str, Any]

FIELD_MANAGER = "windrow-operator"
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_APPLY = "application/apply-patch+yaml"
_TIMEOUT_S = 10.0
_INVALID = 422  # Unprocessable: the server's own code for a name that is none
# Of a path: names and kinds. `.` and `..` would lead to another object.
_WORD = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._:-]+")
_PIECE = 250  # objects of one answer to a listing
_WATCH_S = 300  # then the server ends a watch, and another goes on
# A request that is asked to come back later is repeated, if it is soon and not for ever.
_BUSY_TRIES, _LONGEST_BUSY_S = 4, 5.0


class ApiError(Transient):
    """The API server refused or did not answer."""

    def __init__(self, status: int, message: str, retry_after_s: float = 1.0) -> None:
        self.status = status
        later = timedelta(seconds=retry_after_s)
        super().__init__(f"API server: {message} ({status})", retry_after=later)

    @property
    def is_refusal(self) -> bool:
        """True where the same call would get the same answer: it was understood, and refused."""
        return 400 <= self.status < 500 and self.status != 429


class Conflict(ApiError):
    """Conflict of a write: another client wrote first, or the object exists already."""


class ObjectNotFound(ApiError):
    """Error of a request for an object that does not exist."""


def kind_path(kind: Kind, namespace: str | None = None, name: str = "", sub: str = "") -> str:
    """Return the path of our own kinds: a collection, an object or a subresource."""
    where = f"/namespaces/{namespace}" if namespace else ""
    tail = "".join(f"/{part}" for part in (name, sub) if part)
    return f"/apis/{API_VERSION}{where}/{kind.plural}{tail}"


class Kube:
    """A client of one API server."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        # Called for each call with method, path, status (0: no answer), seconds.
        self.on_call: Callable[[str, str, int, float], None] = lambda *_: None
        self._may_write: Callable[[], None] = lambda: None

    def variant(
        self,
        *,
        timeout_s: float | None = None,
        may_write: Callable[[], None] | None = None,
    ) -> Self:
        """Return a client over the same connections.

        Args:
            timeout_s: for one answer.
            may_write: called before everything that could change an object; what it raises is
                raised instead.
        """
        other = copy.copy(self)
        if timeout_s is not None:
            other._timeout = aiohttp.ClientTimeout(total=timeout_s)
        if may_write is not None:
            other._may_write = may_write
        return other

    @classmethod
    async def connect(cls, kubeconfig: str | Path, *, in_pod: bool = False) -> Self:
        """Return a client; nothing is asked of the server yet.

        Args:
            kubeconfig: file with the credentials, or several with colons between them; empty:
                those of the pod's service account, or kubectl's own file.
            in_pod: whether there is a service account.

        Raises:
            UserError: there are no credentials that can be read.
        """
        settings = client.Configuration()
        try:
            if not str(kubeconfig) and in_pod:
                config.load_incluster_config(client_configuration=settings)
                # A proxy of the environment is for the world outside of the cluster.
                settings.client_session_kwargs = {"trust_env": False}
            else:
                path = str(kubeconfig) or None
                user = Kubeconfig(path or os.environ.get("KUBECONFIG", "")).user()
                if impersonation_headers(user):
                    raise UserError(
                        "the operator acts as itself alone, and the kubeconfig says `as`",
                        field=str(kubeconfig) or "kubeconfig",
                        remedy="Give it the credentials of its own account.",
                    )
                require_usable(user)
                await config.load_kube_config(path, client_configuration=settings)
        except (config.ConfigException, OSError, yaml.YAMLError) as error:
            raise UserError(
                f"no cluster to work in: {error}",
                field=str(kubeconfig) or "kubeconfig",
                remedy="Name one by --kubeconfig or KUBECONFIG, or run the operator in a pod.",
            ) from error
        return cls(client.ApiClient(settings))

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._api.configuration.host)

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()

    async def credentials(self) -> kopf.ConnectionInfo:
        """Return what kopf needs to reach the same server."""
        settings = self._api.configuration
        scheme, _, token = (
            (await settings.get_api_key_with_prefix("BearerToken")) or ""
        ).partition(" ")
        return kopf.ConnectionInfo(
            server=settings.host,
            ca_path=settings.ssl_ca_cert,
            insecure=not settings.verify_ssl,
            certificate_path=settings.cert_file,
            private_key_path=settings.key_file,
            scheme=scheme or None,
            token=token or None,
        )

    async def get(self, path: str) -> Body:
        """Return the object at `path`; raise NotFound when there is none."""
        return await self._request("GET", path)

    async def list(self, path: str, *, labels: str = "") -> list[Body]:
        """Return the objects of a collection; none when its kind is unknown."""
        found: dict[str, Body] = {}
        async for piece in self.pieces(path, labels=labels):
            found |= {body["metadata"]["uid"]: body for body in piece}
        return list(found.values())

    async def first(self, path: str, *, labels: str = "", limit: int) -> Sequence[Body]:
        """Return at most `limit` objects of a collection; none when its kind is unknown."""
        try:
            piece = await self._request(
                "GET", f"{path}?{urlencode({'labelSelector': labels, 'limit': limit})}"
            )
        except ObjectNotFound:
            return []
        return list(piece.get("items") or ())

    async def pieces(self, path: str, *, labels: str = "") -> AsyncIterator[Sequence[Body]]:
        """Yield the objects of a collection, so that thousands hold nothing else up for long.

        Where the listed version is no longer kept, the listing starts over: objects come twice.
        """
        selector = {"labelSelector": labels} if labels else {}
        token = ""
        while True:
            query = {**selector, "limit": _PIECE, **({"continue": token} if token else {})}
            try:
                piece = await self._request("GET", f"{path}?{urlencode(query)}")
            except ObjectNotFound:
                return
            except ApiError as error:
                if error.status != 410 or not token:
                    raise
                token = ""
                continue
            yield list(piece.get("items") or ())
            token = (piece.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    async def list_at(self, path: str, *, labels: str = "") -> tuple[Sequence[Body], str]:
        """Return the objects of a collection, and the version from which `watch` goes on.

        Raises ObjectNotFound when its kind is unknown.
        """
        while True:
            found, version, token = dict[str, Body](), "", ""
            try:
                while not version or token:
                    query = {"limit": str(_PIECE)}
                    query |= {"labelSelector": labels} if labels else {}
                    query |= {"continue": token} if token else {}
                    piece = await self._request("GET", f"{path}?{urlencode(query)}")
                    for body in piece.get("items") or ():
                        found[body["metadata"]["uid"]] = body
                    metadata = piece["metadata"]
                    # All pieces are of the first one's version.
                    version = version or str(metadata["resourceVersion"])
                    token = metadata.get("continue") or ""
            except ApiError as error:
                if error.status != 410 or not token:
                    raise
                continue  # the listed version is no longer kept
            return list(found.values()), version

    async def watch(
        self,
        path: str,
        version: str,
        *,
        labels: str = "",
        opened: Callable[[], None] = lambda: None,
        seconds: int = _WATCH_S,
    ) -> AsyncIterator[Body]:
        """Yield what happens to a collection after a version: `type` and `object` of each event.

        Ends without an error after about `seconds`, as the server does it. Errors come as events of
        the type ERROR too.

        Args:
            path: of the collection.
            version: of a listing, an object or a bookmark.
            labels: a selector; empty: all objects.
            opened: called once the server has accepted.
            seconds: after which the server ends it.
        """
        _check_path(path)
        query = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        query |= {"timeoutSeconds": str(seconds)} | ({"labelSelector": labels} if labels else {})
        headers = {"Accept": "application/json"}
        verb, url, sent, _, _ = await self._api.param_serialize(
            "GET",
            f"{path}?{urlencode(query)}",
            header_params=headers,
            auth_settings=["BearerToken"],
        )
        # A server that hangs sends nothing, bookmarks neither; they come once a minute.
        timeout = aiohttp.ClientTimeout(total=seconds + _TIMEOUT_S, sock_connect=_TIMEOUT_S)
        begun_s, code = time.monotonic(), 0
        try:
            answer = await self._api.call_api(verb, url, sent, None, _request_timeout=timeout)
            response = answer.response
            code = int(response.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, f"watch {path}: {error or type(error).__name__}") from error
        finally:
            self.on_call("GET", path, code, time.monotonic() - begun_s)
        async with response:
            try:
                if code >= 400:
                    raise _error(response, f"watch {path}: {_reason(await response.read())}")
                opened()
                async for line in _lines(response.content):
                    yield dict(json.loads(line))
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                raise ApiError(0, f"watch {path}: {error or type(error).__name__}") from error

    async def create(self, path: str, body: Mapping[str, Any]) -> Body:
        """Create an object; raise Conflict when it exists."""
        return await self._request("POST", path, body)

    async def try_create(self, path: str, body: Mapping[str, Any]) -> Body:
        """Ask whether an object would be created; nothing is stored."""
        return await self._request("POST", f"{path}?dryRun=All", body)

    async def replace(self, path: str, body: Mapping[str, Any]) -> Body:
        """Replace an object; raise Conflict when its resourceVersion is no longer the newest."""
        return await self._request("PUT", path, body)

    async def merge(self, path: str, body: Mapping[str, Any]) -> Body:
        """Merge `body` into an object; lists are replaced as a whole."""
        return await self._request("PATCH", path, body, _MERGE)

    async def strategic_merge(self, path: str, body: Mapping[str, Any]) -> Body:
        """Merge `body` into an object; entries of lists are merged by their names."""
        return await self._request("PATCH", path, body, _STRATEGIC)

    async def apply(self, path: str, body: Mapping[str, Any]) -> Body:
        """Apply `body` by the server; fields that we own and no longer name are removed."""
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": "true"})
        return await self._request("PATCH", f"{path}?{query}", body, _APPLY)

    async def delete(self, path: str) -> None:
        """Delete an object; nothing happens when there is none."""
        try:
            await self._request("DELETE", path)
        except ObjectNotFound:
            return

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Body:
        _check_path(path)
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        for left in reversed(range(_BUSY_TRIES)):
            if method != "GET":
                self._may_write()
            prepared = await self._api.param_serialize(
                method, path, header_params=headers, auth_settings=["BearerToken"]
            )
            verb, url, sent, _, _ = prepared
            begun_s, code = time.monotonic(), 0
            try:
                response = await self._api.call_api(
                    verb, url, sent, body, _request_timeout=self._timeout
                )
                content, code = await response.read(), int(response.status)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise ApiError(0, f"{method} {path}: {error or type(error).__name__}") from error
            finally:
                self.on_call(method, path, code, time.monotonic() - begun_s)
            if response.status < 400:
                return dict(json.loads(content)) if content else {}
            refused = _error(response, f"{method} {path}: {_reason(content)}")
            pause_s = refused.retry_after.total_seconds()
            if not left or not _is_busy(response) or pause_s > _LONGEST_BUSY_S:
                raise refused
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of an answer, of any length: an object may have a MiB and more."""
    rest = bytearray()
    async for part in content.iter_any():
        rest += part
        *whole, last = rest.split(b"\n")
        rest = bytearray(last)
        for line in whole:
            if line:
                yield bytes(line)


def _check_path(path: str) -> None:
    """Refuse a path that names another object than its words say: clients resolve `..` in it.

    Raises:
        ApiError: as the API server refuses a name.
    """
    words = path.partition("?")[0].split("/")[1:]
    if not all(_WORD.fullmatch(word) for word in words):
        raise ApiError(_INVALID, f"{path!r} is not the path of an object")


def _is_busy(response: aiohttp.ClientResponse) -> bool:
    """Return whether the server did nothing and asks to come back, as client-go understands it."""
    return response.status == 429 or (response.status >= 500 and "Retry-After" in response.headers)


def _error(response: aiohttp.ClientResponse, message: str) -> ApiError:
    status = response.status
    if status == 404:
        return ObjectNotFound(status, message)
    if status == 409:
        return Conflict(status, message)
    asked = response.headers.get("Retry-After", "")
    return ApiError(status, message, float(asked) if asked.isdecimal() else 1.0)


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content).get("message", ""))
    except (ValueError, AttributeError):
        return content[:200].decode(errors="replace")
