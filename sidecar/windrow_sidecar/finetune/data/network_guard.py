"""Refuse connections of this process to addresses that its jobs may not reach.

The clients that read rows or write checkpoints (aiohttp, httpx, botocore) resolve names, and
redirects name further ones. All of them resolve by `socket.getaddrinfo` and connect by
`socket.connect`, so addresses are checked there: the address that was checked is the address that
is dialled. Native clients (gRPC) do not pass here; a worker has none.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from windrow.access import NetworkAccess

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_resolve = socket.getaddrinfo


class SourceRefused(PermissionError):
    """A host that the job may not reach; says why and who can allow it."""


class NetworkGuard:
    """Guard of what the jobs of this process may reach.

    One process may serve jobs of several namespaces only where the policy shares workers; then a
    connection is refused where no job of the process may make it.

    Args:
        environment: of the process; its proxies may be dialled, and resolve names themselves.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._accesses: dict[object, NetworkAccess] = {}
        self._resolved: dict[tuple[str, int], set[str]] = {}  # hosts by address and port
        self._proxies = frozenset(_proxies(environment))

    def admit(self, job: object, access: NetworkAccess) -> None:
        """Let connections of a job through, by its access."""
        with self._lock:
            self._accesses[job] = access

    def forget(self, job: object) -> None:
        """End what `admit` began."""
        with self._lock:
            self._accesses.pop(job, None)

    def resolve(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> list[Any]:  # noqa: ANN401
        """Resolve a host as `socket.getaddrinfo` does, and keep the addresses that may be dialled.

        Raises:
            SourceRefused: none of them may.
        """
        found = _resolve(host, port, *args, **kwargs)
        name = host.decode() if isinstance(host, bytes) else host
        if not self._accesses or not name:
            return found
        kept, why = [], ""
        for each in found:
            address, number = str(each[4][0]), int(each[4][1])
            if refused := self._refusal(name, number, address):
                why = refused
                continue
            with self._lock:
                self._resolved.setdefault((address, number), set()).add(name)
            kept.append(each)
        if not kept:
            raise SourceRefused(why)
        return kept

    def check(self, address: tuple[Any, ...]) -> None:
        """Check an address that is about to be dialled.

        Raises:
            SourceRefused: no job may reach it.
        """
        if not self._accesses:
            return
        host, port = str(address[0]), int(address[1])
        with self._lock:
            of_name = (self._resolved.get((host, number), ()) for number in (port, 0))
            names = {host, *itertools.chain(*of_name)}
        refused = [self._refusal(name, port, host) for name in sorted(names)]
        if all(refused):
            raise SourceRefused(refused[0])

    def _refusal(self, host: str, port: int, address: str) -> str:
        if host in self._proxies:
            return ""
        with self._lock:
            accesses = list(self._accesses.values())
        refused = [
            each.host_refusal(host, port) or each.address_refusal(host, port, address)
            for each in accesses
        ]
        return refused[0] if refused and all(refused) else ""


def _proxies(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if name.lower() in _PROXIES and (host := urlsplit(value).hostname):
            yield host


_installed: NetworkGuard | None = None


def install() -> NetworkGuard:
    """Return the guard of this process, which checks every connection from now on.

    An audit hook cannot be removed, so there is one guard for the process. Without jobs it refuses
    nothing.
    """
    global _installed
    if _installed is None:
        guard = _installed = NetworkGuard(os.environ)
        socket.getaddrinfo = guard.resolve

        def look(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "socket.connect" and isinstance(arguments[1], tuple):
                guard.check(arguments[1])

        sys.addaudithook(look)
    return _installed


def forget(job: object) -> None:
    """End what `NetworkGuard.admit` began for a job, if anything."""
    if _installed is not None:
        _installed.forget(job)
