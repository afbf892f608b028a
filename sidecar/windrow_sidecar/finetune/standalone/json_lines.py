"""What a run without an agent tells: lines of JSON, for events and twice a second for progress."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

from windrow_sidecar.finetune.job.report import Action, JobProgress, WorkerEvent

PROGRESS_EVERY_S = 0.5


class Lines:
    """Where all jobs of a process write, a line at a time."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._one_line = out, threading.Lock()

    def write(self, **said: object) -> None:
        """Write a line; any thread may."""
        with self._one_line:
            self._out.write(json.dumps(said) + "\n")
            self._out.flush()


class LineReporter:
    """Tells whoever started this process of one job. Use as a context manager.

    Args:
        lines: where to.
        job: its number among those of the process, from 0.
        progress: asked twice a second.
    """

    def __init__(self, lines: Lines, job: int, progress: Callable[[], JobProgress]) -> None:
        self._lines, self._job, self._progress = lines, job, progress
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> LineReporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._tell_progress()

    def event(self, event: WorkerEvent) -> None:
        """Write it, after the progress that it came with."""
        self._tell_progress()
        self._lines.write(job=self._job, event=asdict(event))

    def take_command(self) -> Action | None:
        """Nobody asks for anything."""
        return None

    def _run(self) -> None:
        while not self._closing.wait(PROGRESS_EVERY_S):
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._lines.write(job=self._job, progress=asdict(self._progress()))
