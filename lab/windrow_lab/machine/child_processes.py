"""Hold the child processes of one run, and end them with it.

`windrow_lab.machine.processes.Keeper` starts it and speaks to it in JSON lines: requests on its
standard input, events on its standard output. However its parent ends, by a return or by SIGKILL,
the pipe closes (and the parent's pidfd becomes readable, which also covers a pipe that a fork still
holds), and everything below the keeper ends: it is the subreaper of its descendants, so those that
left their process group or lost their parent are found as well.

It imports little and has one thread, so that it starts in tens of milliseconds and may fork safely.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# Environment variable that marks the processes of one child, wherever they end up in the tree.
ENV_MARK = "WINDROW_KEPT_AS"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERM_GRACE_SECONDS = 0.5
_KILL_DEADLINE_SECONDS = 10.0


def descendants(root: int) -> set[int]:
    """Return the process ids below `root`, zombies excepted."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as stat:
                # The name may hold spaces and brackets: what follows the last bracket counts.
                state, parent = stat.read().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        for child in children.get(frontier.pop(), []):
            if child not in found:
                found.add(child)
                frontier.append(child)
    return found


def _mark_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            for pair in environ.read().split(b"\0"):
                name, _, value = pair.partition(b"=")
                if name == ENV_MARK.encode():
                    return value.decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    return ""


def _send_signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _send_to_group(group: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signum)


class _Kept:
    """The children of this keeper, by the id that the client gave them."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self._emit = emit
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._by_id: dict[str, subprocess.Popen[bytes]] = {}
        self._owned: list[str] = []

    def request(self, request: dict[str, Any]) -> None:
        """Do what one line of the client asks."""
        match request["op"]:
            case "start":
                self._start(request)
            case "signal":
                if child := self._by_id.get(request["id"]):
                    _send_to_group(child.pid, request["signum"])
            case "own":
                self._owned.append(request["path"])
            case "disown":
                self._owned.remove(request["path"])

    def _start(self, request: dict[str, Any]) -> None:
        keeper_pid = os.getpid()

        def in_child() -> None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper_pid:
                os._exit(1)
            os.nice(request["nice"])
            if request["cpus"]:
                os.sched_setaffinity(0, request["cpus"])

        try:
            with open(request["log"], "ab") as log:
                child = subprocess.Popen(
                    request["argv"],
                    env={**request["env"], ENV_MARK: request["id"]},
                    cwd=request["cwd"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A group of its own, in the session of the parent: niceness means nothing
                    # between sessions where Linux schedules them as groups.
                    process_group=0,
                    preexec_fn=in_child,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._emit({"event": "failed", "id": request["id"], "error": str(error)})
            return
        self._by_id[request["id"]] = child
        self._emit({"event": "started", "id": request["id"], "pid": child.pid})

    def reap(self) -> None:
        """Collect whatever ended, and end what a dead child left behind."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = next((i for i, child in self._by_id.items() if child.pid == pid), None)
            if ended is None:
                continue
            child = self._by_id.pop(ended)
            child.returncode = os.waitstatus_to_exitcode(status)
            self._end_rest_of(ended, group=pid)
            self._emit({"event": "exited", "id": ended, "status": child.returncode})

    def _end_rest_of(self, child_id: str, *, group: int) -> None:
        _send_to_group(group, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_DEADLINE_SECONDS
        while time.monotonic() < deadline:
            left = [pid for pid in descendants(os.getpid()) if _mark_of(pid) == child_id]
            if not left:
                return
            for pid in left:
                _send_signal(pid, signal.SIGKILL)
            time.sleep(0.005)

    def end_all(self) -> None:
        """End every descendant, then remove the directories that this keeper owns."""
        for child in self._by_id.values():
            _send_to_group(child.pid, signal.SIGTERM)
        self._await_none(_TERM_GRACE_SECONDS)
        deadline = time.monotonic() + _KILL_DEADLINE_SECONDS
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in left:
                _send_signal(pid, signal.SIGKILL)
            self._await_none(0.02)
        for path in self._owned:
            shutil.rmtree(path, ignore_errors=True)

    def _await_none(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while descendants(os.getpid()) and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)


def _emit(event: dict[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # The client is gone; its closed pipe ends this process in a moment.


def _serve(kept: _Kept, parent_pid: int) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    # Handlers, not SIG_IGN: exec would hand an ignored signal on to the children.
    ending: list[int] = []
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda signum, _: ending.append(signum))

    parent = os.pidfd_open(parent_pid)
    if os.getppid() != parent_pid:
        return
    buffer = b""
    with selectors.DefaultSelector() as selector:
        for descriptor in (0, wake_read, parent):
            selector.register(descriptor, selectors.EVENT_READ)
        while not ending:
            ready = {key.fd for key, _ in selector.select()}
            if parent in ready:
                return
            if wake_read in ready:
                os.read(wake_read, 4096)
                kept.reap()
            if 0 in ready:
                data = os.read(0, 1 << 16)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    kept.request(json.loads(line))


def main() -> None:
    """Serve one client until it is gone."""
    kept = _Kept(_emit)
    try:
        _serve(kept, int(sys.argv[1]))
    finally:
        kept.end_all()


if __name__ == "__main__":
    main()
