"""A proxy on loopback for native clients, which would pass by the guard of the network.

What it dials goes by Python's sockets, which the guard of this process checks.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import socket
import socketserver
import threading
from urllib.parse import urlsplit

_HEAD_BYTES = 64 * 1024
_DIALS_WITHIN_S = 10.0
_PIECE_BYTES = 64 * 1024


class GuardedProxy:
    """A proxy for HTTP, and for TLS by CONNECT, that asks for a password that only its user has."""

    def __init__(self) -> None:
        password = secrets.token_urlsafe(16)
        self._wanted = base64.b64encode(f"windrow:{password}".encode()).decode()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.wanted = f"Basic {self._wanted}"
        self.url = f"http://windrow:{password}@127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="proxy", daemon=True).start()

    def close(self) -> None:
        """Take no further connection."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    wanted = ""


class _Handler(socketserver.BaseRequestHandler):
    """Passes on one request, or one tunnel."""

    def handle(self) -> None:
        asked: socket.socket = self.request
        head, rest = _head(asked)
        lines = head.split("\r\n")
        parts = lines[0].split(" ")
        if len(parts) != 3:
            _refuse(asked, "400 Bad Request", "is not a request of HTTP")
            return
        method, target, version = parts
        headers = [line for line in lines[1:] if line]
        named = {line.partition(":")[0].strip().lower(): line.partition(":")[2] for line in headers}
        assert isinstance(self.server, _Server)
        if not secrets.compare_digest(
            named.get("proxy-authorization", "").strip(), self.server.wanted
        ):
            _refuse(asked, "407 Proxy Authentication Required", "asks for its user's password")
            return
        url = urlsplit(f"//{target}" if method == "CONNECT" else target)
        try:
            port = url.port or (443 if method == "CONNECT" else 80)
            dialled = socket.create_connection((url.hostname or "", port), _DIALS_WITHIN_S)
        except (OSError, ValueError) as error:
            _refuse(asked, "502 Bad Gateway", f"cannot reach {url.hostname}: {error}")
            return
        with dialled:
            dialled.settimeout(None)
            if method == "CONNECT":
                asked.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                path = url._replace(scheme="", netloc="").geturl() or "/"
                kept = [line for line in headers if not line.lower().startswith(_OF_HOP)]
                # Another request on this connection may be for another host.
                passed = [f"{method} {path} {version}", *kept, "Connection: close", "", ""]
                dialled.sendall("\r\n".join(passed).encode("latin-1"))
            dialled.sendall(rest)
            back = threading.Thread(target=_copy, args=(dialled, asked), daemon=True)
            back.start()
            if method == "CONNECT":
                _copy(asked, dialled)
            else:
                _copy(asked, dialled, ends=False)
            back.join()


_OF_HOP = ("proxy-", "connection:")


def _head(asked: socket.socket) -> tuple[str, bytes]:
    read = b""
    while b"\r\n\r\n" not in read and len(read) < _HEAD_BYTES:
        piece = asked.recv(_PIECE_BYTES)
        if not piece:
            break
        read += piece
    head, _, rest = read.partition(b"\r\n\r\n")
    return head.decode("latin-1"), rest


def _copy(source: socket.socket, sink: socket.socket, *, ends: bool = True) -> None:
    """Copy until one side ends; `ends`: tell the sink so."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            sink.sendall(piece)
    if ends:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _refuse(asked: socket.socket, status: str, why: str) -> None:
    words = f"windrow: {why}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(words)}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(OSError):
        asked.sendall(head.encode("latin-1") + words)
