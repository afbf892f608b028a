"""Reserve ports on the loopback interface until their process listens."""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Self

from windrow.errors import UserError

LOOPBACK = "127.0.0.1"


class ReservedPort:
    """A port that is bound here, shareable with a server that binds it with SO_REUSEPORT.

    Close it once that server listens. Until then no other program gets the port.
    """

    def __init__(self, port: int = 0, *, field: str = "port") -> None:
        """Reserve `port`, or any free one for 0; raises UserError naming `field` when in use."""
        if port:
            _require_free(port, field)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._socket.bind((LOOPBACK, port))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the reservation up."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def free_port() -> int:
    """Return a port that is free now, for programs that cannot share a reservation."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        number: int = probe.getsockname()[1]
        return number


def _require_free(port: int, field: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise UserError(
                f"port {port} of {LOOPBACK} cannot be used: {error.strerror}",
                field=field,
                remedy="Choose another one, or leave it out to get any free one.",
                reason="PortInUse",
            ) from error
