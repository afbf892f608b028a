"""Hand a job from a worker's process, as the agent starts it, to the engine that runs it itself.

The agent starts, watches, stops and reaps a process for each job, whatever runs the job. Where the
engine serves this socket, that process is a relay: it sends the order, waits for the ending, and
exits with it. SIGTERM asks the engine's thread to stop; the end of the relay does the same.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from windrow.protocol import Ending
from windrow_sidecar.finetune.colocated.standby import JobOrder

log = logging.getLogger(__name__)

_MOST_BYTES = 4096
_STOP = b"stop\n"


class OrderFromAgent:
    """One order that a relay has sent, with the connection that its ending goes back over.

    Attributes:
        job: to run.
        pid: of the relay, which the agent watches.
    """

    def __init__(self, connection: socket.socket, job: JobOrder, pid: int) -> None:
        self._connection, self.job, self.pid = connection, job, pid

    def await_stop(self) -> str:
        """Wait until the relay asks to stop or is gone; returns why. "": the job has ended."""
        try:
            said = self._connection.recv(_MOST_BYTES)
        except OSError:  # `ended` has closed it
            return ""
        return "SIGTERM" if said else "its process has ended"

    def ended(self, ending: int) -> None:
        """Tell the relay with which status to exit."""
        try:
            self._connection.sendall(json.dumps({"ending": ending}).encode() + b"\n")
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.info("the process of job %s is gone", self.job.job_uid)
        self._connection.close()


class OrderSocket:
    """Listens for relays.

    Args:
        path: of the socket; one that an engine before has left is replaced.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)  # the agent and its workers have this user
        self._socket.listen()

    def accept(self) -> OrderFromAgent | None:
        """Wait for an order; None: the socket is closed."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return None
            try:
                with connection.makefile("rb") as lines:
                    said = json.loads(lines.readline(_MOST_BYTES))
                order = JobOrder(str(said["job_uid"]), int(said["epoch"]))
                return OrderFromAgent(connection, order, int(said["pid"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("an order cannot be read: %r", error)
                connection.close()

    def close(self) -> None:
        """Take no order any more."""
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def relay_job(path: Path, order: JobOrder, on_stop: Callable[[Callable[[], None]], None]) -> int:
    """Have the engine run a job; returns its `Ending` once there is one.

    Args:
        path: of the engine's socket.
        order: what to run.
        on_stop: is given what a signal shall call.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
            said = {"job_uid": order.job_uid, "epoch": order.epoch, "pid": os.getpid()}
            connection.sendall(json.dumps(said).encode() + b"\n")
        except OSError:
            log.exception("the engine does not take the job")
            return Ending.DECODE_GONE
        on_stop(lambda: connection.sendall(_STOP))
        with connection.makefile("rb") as lines:
            answer = lines.readline(_MOST_BYTES)
    if not answer:
        log.error("the engine has ended")
        return Ending.DECODE_GONE
    return Ending(json.loads(answer)["ending"])
