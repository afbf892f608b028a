"""A process of the cluster that runs again when it ends, as a Deployment's would; and its start."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

from windrow.errors import Transient, WindrowError
from windrow_lab.machine.processes import Child, Keeper, ProcessCommand

log = logging.getLogger(__name__)

_TAIL_LINES = 20


class ClusterError(WindrowError):
    """The operator or the node did not come up; the message ends with the tail of its log."""


class Service:
    """Keeps one command running until `stop`. Safe to use from several threads."""

    def __init__(
        self,
        name: str,
        command: ProcessCommand,
        keeper: Keeper,
        restart_after: timedelta = timedelta(seconds=1),
    ) -> None:
        self.name, self.command = name, command
        self.restarts = 0
        self._keeper, self._restart_after = keeper, restart_after
        self._lock = threading.Lock()
        self._stopping = False
        self._timer: threading.Timer | None = None
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        """The process of now; after a crash the one that ended, until the next runs."""
        assert self._child is not None, "start() comes first"
        return self._child

    def start(self) -> None:
        """Start the process; raises OSError when it cannot be started."""
        child = self._keeper.start(self.command)
        with self._lock:
            self._child = child
            stopped_meanwhile = self._stopping
        if stopped_meanwhile:
            child.stop()
        else:
            child.exited.add_done_callback(self._on_exit)

    def stop(self, grace: timedelta = timedelta(seconds=5)) -> None:
        """End the process; it does not run again."""
        with self._lock:
            self._stopping = True
            timer, child = self._timer, self._child
        if timer is not None:
            timer.cancel()
        if child is not None:
            child.stop(grace)

    def resume(self) -> None:
        """Start the process after `stop`; raises OSError when it cannot be started."""
        with self._lock:
            self._stopping = False
        self.start()

    def _on_exit(self, exited: Future[int]) -> None:
        with self._lock:
            if self._stopping:
                return
            # Not on this thread, which delivers the keeper's answers.
            self._timer = threading.Timer(self._restart_after.total_seconds(), self._start_again)
            self._timer.daemon = True
        log.warning("%s ended with status %s; it is started again", self.name, exited.result())
        self._timer.start()

    def _start_again(self) -> None:
        self.restarts += 1
        try:
            self.start()
        except (OSError, Transient) as error:
            log.warning("%s could not be started again: %s", self.name, error)


def await_ready(service: Service, ready: Callable[[], bool], deadline: float) -> None:
    """Return once a service is ready; `deadline`: of time.monotonic.

    Raises:
        ClusterError: it has ended, or is not ready in time.
    """
    while not ready():
        ended = service.child.poll()
        if ended is not None or time.monotonic() > deadline:
            what = f"ended with status {ended}" if ended is not None else "is not ready in time"
            tail = service.command.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            raise ClusterError("\n".join([f"the {service.name} {what}; its log:", *tail]))
        time.sleep(0.05)


def leads(operator: Service, state: Path) -> bool:
    """Return whether the operator leads, by the state file that it writes."""
    try:
        found = json.loads(state.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    # The file may be that of an earlier life of the operator.
    return bool(found.get("leads")) and found.get("pid") == operator.child.pid
