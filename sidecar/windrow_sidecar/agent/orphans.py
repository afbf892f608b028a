"""End the workers that a killed agent left behind.

Decode takes a dead worker's chunks back on the agent's word, so that word must be true: a worker
that still writes its last checkpoint would otherwise write into what is KV again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

_log = logging.getLogger(__name__)

_PATTERN = "worker-*.pid"
_LOOK_EVERY_S = 0.05


def note_worker(root: Path, slot: int, pid: int) -> None:
    """Write down a worker's process, for the next agent."""
    began = _began(pid)
    if began is not None:
        (root / f"worker-{slot}.pid").write_text(f"{pid} {began}\n", encoding="ascii")


def forget_worker(root: Path, slot: int) -> None:
    """Remove the note of a worker that has been reaped."""
    (root / f"worker-{slot}.pid").unlink(missing_ok=True)


async def _nothing(_pid: int) -> None:
    """Do nothing: the worker has no GPU work."""


async def end_orphans(
    root: Path, *, grace_s: float, end_gpu_work: Callable[[int], Awaitable[None]] = _nothing
) -> None:
    """Wait until every worker of an earlier agent is gone; kill what is left after the grace.

    `end_gpu_work`: of a process, before it is killed.
    """
    for file in _notes(root):
        pid, _, began = file.read_text(encoding="ascii").strip().partition(" ")
        if pid.isdigit():
            await _end(int(pid), began, grace_s, end_gpu_work)
        file.unlink(missing_ok=True)


def _notes(root: Path) -> list[Path]:
    return sorted(root.glob(_PATTERN))


async def _end(
    pid: int, began: str, grace_s: float, end_gpu_work: Callable[[int], Awaitable[None]]
) -> None:
    if _began(pid) != began:
        return
    _log.warning("worker %d of an earlier agent still lives: waiting for its end", pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = asyncio.get_running_loop().time() + grace_s
    while _began(pid) == began:
        if asyncio.get_running_loop().time() > deadline:
            await end_gpu_work(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_LOOK_EVERY_S)


def _began(pid: int) -> str | None:
    """Return when a process started, in clock ticks; with the pid this is unique. None: it is gone.

    A zombie is gone: it runs nothing and holds nothing.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else fields[19]
