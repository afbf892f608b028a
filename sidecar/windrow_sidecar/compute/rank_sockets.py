"""Keep others off the TCP connections by which the ranks of one machine talk.

Gloo listens on loopback, without a password, and takes any process that connects with the number
that it awaits. All containers of a pod share that interface. So ranks compare their connections,
over the private file that they have met in: each has to lead to another rank. Then the kernel drops
later connections, by a filter on the sockets that listen.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Protocol

import psutil

log = logging.getLogger(__name__)

_SO_ATTACH_FILTER: Final = 26
# BPF's "return 0": of each packet nothing is kept. See Documentation/networking/filter.rst.
_DROP_ALL: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)
_KEY: Final = "windrow-connections"

# Address and port of one end.
End = tuple[str, int]
# Own end and the other one's.
Connection = tuple[End, End]


class Store(Protocol):
    """Words that ranks leave for each other (torch's `FileStore`)."""

    def set(self, key: str, value: str) -> None:
        """Say something to all."""

    def get(self, key: str) -> bytes:
        """Return what is said under a key, once it is."""


class StrangerConnected(RuntimeError):
    """Error of a group of ranks: a process that is none of them is connected to one."""


class RankSockets:
    """TCP sockets that this process has opened since this was made."""

    def __init__(self) -> None:
        self._before = {each.fd for each in psutil.Process().net_connections("tcp")}

    def check(self, store: Store, rank: int, ranks: int) -> None:
        """Require that every connection leads to another rank; all ranks call this.

        Args:
            store: in a file that nobody else can write.
            rank: of this process.
            ranks: how many there are.

        Raises:
            StrangerConnected: one leads elsewhere.
        """
        mine = [(tuple(s.laddr), tuple(s.raddr)) for s in self._new() if s.raddr]
        store.set(f"{_KEY}-{rank}", json.dumps(mine))
        others = [
            (tuple(own), tuple(other))
            for each in range(ranks)
            if each != rank
            for own, other in json.loads(store.get(f"{_KEY}-{each}"))
        ]
        if found := strangers(mine, others):
            (address, port) = found[0]
            raise StrangerConnected(
                f"rank {rank} is connected to {address}:{port}, where no other rank is: another "
                "process of this pod has connected to it"
            )

    def refuse_further(self) -> None:
        """Have the kernel drop connections to these sockets from now on."""
        for each in self._new():
            if each.status == psutil.CONN_LISTEN:
                drop_connections(each.fd)

    def _new(self) -> Iterable[Any]:
        return (s for s in psutil.Process().net_connections("tcp") if s.fd not in self._before)


def strangers(mine: Sequence[Connection], others: Collection[Connection]) -> list[End]:
    """Return the other ends of connections that no other rank has, each seen from its side."""
    known = {(other, own) for own, other in others}
    return [other for own, other in mine if (own, other) not in known]


def drop_connections(listening: int) -> None:
    """Have the kernel drop what comes to a listening socket; those accepted before go on."""
    kept = ctypes.create_string_buffer(_DROP_ALL)
    program = struct.pack("@HP", 1, ctypes.addressof(kept))
    with socket.socket(fileno=os.dup(listening)) as same:
        try:
            same.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        except OSError as error:  # a sandbox's own kernel
            log.warning("others of this pod may connect to a rank, to no use: %s", error)
