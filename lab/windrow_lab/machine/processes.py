"""Child processes that end with the run that started them, however it ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from windrow.errors import Transient
from windrow_lab.machine.child_processes import ENV_MARK


@dataclass(frozen=True)
class ProcessCommand:
    """Command of a process, and how to run it.

    Attributes:
        argv: the program and its arguments; a program without a slash is looked up on env's PATH.
        log: standard output and error are appended here.
        env: the whole environment of the process.
        cwd: its working directory; None: the caller's.
        nice: added to the caller's niceness.
        cpus: CPUs it may run on; empty: those of the caller.
    """

    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: Path | None = None
    nice: int = 0
    cpus: Sequence[int] = ()


class Child:
    """A running process, and its exit as a future."""

    def __init__(self, keeper: Keeper, child_id: str, pid: int, exited: Future[int]) -> None:
        self._keeper, self._id = keeper, child_id
        self.pid = pid
        # Exit status; negative: the signal that ended it.
        self.exited = exited

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self.exited.result() if self.exited.done() else None

    def signal(self, signum: int) -> None:
        """Send a signal to the process and the rest of its group; nothing happens if it ended."""
        self._keeper.send({"op": "signal", "id": self._id, "signum": int(signum)})

    def stop(self, grace: timedelta = timedelta(seconds=5)) -> int:
        """End it with SIGTERM, after `grace` with SIGKILL, and return its exit status."""
        self.signal(signal.SIGTERM)
        try:
            return self.exited.result(timeout=grace.total_seconds())
        except FutureTimeout:
            self.signal(signal.SIGKILL)
            return self.exited.result(timeout=30)


class Keeper:
    """Starts children through a supervisor process that ends them when this process ends.

    Use as a context manager, or call `close`. Safe to use from several threads; the futures resolve
    on a thread of its own.
    """

    def __init__(self) -> None:
        self._ids = (f"{os.getpid()}-{n}" for n in itertools.count())
        self._write_lock = threading.Lock()
        self._starting: dict[str, Future[Child]] = {}
        self._running: dict[str, Child] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "windrow_lab.machine.child_processes", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not marked as a process of an outer keeper's child: when that child dies, this
            # supervisor is to live long enough to clean up after it.
            env={name: value for name, value in os.environ.items() if name != ENV_MARK},
            # Out of the terminal's foreground group: Ctrl-C is for the keeper's parent.
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read_events, name="keeper", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the supervisor, whose descendants are the children."""
        return self._process.pid

    def launch(self, command: ProcessCommand) -> Future[Child]:
        """Start a process; the future holds it, or OSError when it could not be started."""
        child_id = next(self._ids)
        started: Future[Child] = _unstoppable_future()
        self._starting[child_id] = started
        self.send(
            {
                "op": "start",
                "id": child_id,
                "argv": list(command.argv),
                "env": dict(command.env),
                "cwd": str(command.cwd) if command.cwd else None,
                "log": str(command.log),
                "nice": command.nice,
                "cpus": list(command.cpus),
            }
        )
        return started

    def start(self, command: ProcessCommand) -> Child:
        """Start a process and return it once it runs; raises OSError when it cannot."""
        return self.launch(command).result(timeout=30)

    def own(self, directory: Path) -> None:
        """Let the supervisor remove `directory` when this process ends without `disown`."""
        self.send({"op": "own", "path": str(directory)})

    def disown(self, directory: Path) -> None:
        """Take back `own`."""
        self.send({"op": "disown", "path": str(directory)})

    def send(self, request: dict[str, Any]) -> None:
        """Hand one request to the supervisor; raises Transient when it is gone."""
        assert self._process.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        try:
            with self._write_lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (BrokenPipeError, ValueError) as error:
            raise Transient("the supervisor of the local processes is gone") from error

    def close(self) -> None:
        """End all children at once and the supervisor with them; harmless when repeated."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Broken: the supervisor was killed, and its children with it.
        with self._write_lock, contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._on_event(json.loads(line))
        for started in self._starting.values():
            started.set_exception(Transient("the supervisor of the local processes is gone"))
        for child in self._running.values():
            child.exited.set_result(-signal.SIGKILL)
        self._running.clear()

    def _on_event(self, event: dict[str, Any]) -> None:
        child_id = event["id"]
        match event["event"]:
            case "started":
                child = Child(self, child_id, event["pid"], _unstoppable_future())
                self._running[child_id] = child
                self._starting.pop(child_id).set_result(child)
            case "failed":
                self._starting.pop(child_id).set_exception(OSError(event["error"]))
            case "exited":
                self._running.pop(child_id).exited.set_result(event["status"])


def _unstoppable_future() -> Future[Any]:
    # Marked as running: an asyncio task that waits for it may be cancelled, the future may not.
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
