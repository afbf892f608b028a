"""Waiting for what other processes do: for a condition, with a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from windrow_lab.machine.child_processes import descendants

T = TypeVar("T")
# Only a test that fails waits for so long; the slowest start, a cluster's, takes 20 s.
DEADLINE_SECONDS = 60.0


def wait_until(condition: Callable[[], T], what: str, *, seconds: float = DEADLINE_SECONDS) -> T:
    """Return the first true value of `condition`; fail after the deadline, saying `what` lacked."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return value


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended may still wait to be reaped."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def processes_below() -> set[int]:
    """Return what runs below this process, without the fork server of the tests.

    `support.forked_start` starts it when a test first starts a program, and keeps it.
    """
    return {pid for pid in descendants(os.getpid()) if b"agent.fork_server" not in _command(pid)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
