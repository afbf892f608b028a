"""Repeat what a worker writes on the agent's own output, where `kubectl logs` finds it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from windrow.rundir import worker_line

_EVERY_S = 0.5
# Of one look: a worker that writes without end must not hold the agent up.
_MOST_BYTES = 64 * 1024


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class WorkerLogFollower:
    """Follows one log from where it stands now; complete lines only, but for the last.

    Args:
        log: of the worker; it need not be there yet.
        job: namespace/name that each line is marked with.
        emit: takes each marked line.
    """

    def __init__(self, log: Path, job: str, emit: Callable[[str], None] = _print) -> None:
        self._log, self._job, self._emit = log, job, emit
        self._at = log.stat().st_size if log.exists() else 0
        self._begun = b""

    async def run(self) -> None:
        """Follow until cancelled; what came last is told then."""
        try:
            while True:
                self.look()
                await asyncio.sleep(_EVERY_S)
        finally:
            self.look()
            if self._begun:
                self._tell(self._begun)

    def look(self) -> None:
        """Tell what has come since the last look."""
        try:
            with self._log.open("rb") as lines:
                lines.seek(self._at)
                fresh = lines.read(_MOST_BYTES)
        except FileNotFoundError:
            return
        self._at += len(fresh)
        *whole, self._begun = (self._begun + fresh).split(b"\n")
        for line in whole:
            self._tell(line)

    def _tell(self, line: bytes) -> None:
        self._emit(worker_line(self._job, line.decode(errors="replace").rstrip("\r")))
