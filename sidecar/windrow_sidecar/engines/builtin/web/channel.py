"""Send messages over a socket without ever blocking: neither side can hold up the other.

Frames are a length and a pickle; both ends are ours (a socketpair between parent and child). What
the socket does not take at once is kept and sent with the next flush.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class PeerGone(Exception):
    """The other process has ended, or has closed its end."""


class SocketChannel:
    """One end. One thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for select and event loops."""
        return self._sock.fileno()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait for the peer to read."""
        return len(self._outgoing)

    def send(self, message: Any) -> None:  # noqa: ANN401 - any of `messages`
        """Queue a message and send what the socket takes. Raises PeerGone."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._outgoing += _LENGTH.pack(len(body))
        self._outgoing += body
        self.flush()

    def flush(self) -> None:
        """Send what is still queued, as far as the socket takes it. Raises PeerGone."""
        while self._outgoing:
            try:
                sent = self._sock.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerGone(str(error)) from error
            del self._outgoing[:sent]

    def receive(self) -> list[Any]:
        """Return all whole messages that have arrived, oldest first. Raises PeerGone at the end."""
        while True:
            try:
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return self._unpack()
            except OSError as error:
                raise PeerGone(str(error)) from error
            if not data:
                raise PeerGone("end of stream")
            self._incoming += data

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives, the peer is gone, or the time is over. Sends meanwhile."""
        writing = [self._sock] if self._outgoing else []
        _, writable, _ = select.select([self._sock], writing, [], timeout_s)
        if writable:
            self.flush()

    def close(self) -> None:
        """Close this end; the peer's next receive raises PeerGone."""
        self._sock.close()

    def _unpack(self) -> list[Any]:
        messages = []
        begin = 0
        while len(self._incoming) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming, begin)
            end = begin + _LENGTH.size + length
            if len(self._incoming) < end:
                break
            messages.append(pickle.loads(self._incoming[begin + _LENGTH.size : end]))
            begin = end
        if begin:
            del self._incoming[:begin]
        return messages
