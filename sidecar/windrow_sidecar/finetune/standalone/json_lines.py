"""Report a standalone run as lines of JSON: each event, and progress twice a second."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

from windrow.protocol import Action, JobProgress, WorkerEvent

PROGRESS_EVERY_S = 0.5


class Lines:
    """Standard output of a process, to which its jobs write line by line, even if nobody reads.

    Args:
        out: where to.
        unread: called once, on the thread that writes, when the reader has gone.
    """

    def __init__(self, out: TextIO, unread: Callable[[], None] = lambda: None) -> None:
        self._out, self._unread, self._one_line = out, unread, threading.Lock()
        self._is_read = True

    @classmethod
    def to_standard_output(cls, unread: Callable[[], None]) -> Lines:
        """Keep standard output for them; what anybody else prints goes to standard error."""
        out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        return cls(out, unread)

    def write(self, **said: object) -> None:
        """Write a line; any thread may."""
        with self._one_line:
            if not self._is_read:
                return
            try:
                self._out.write(json.dumps(said) + "\n")
                self._out.flush()
            except OSError:
                self._is_read = False
        if not self._is_read:
            self._unread()


class LineReporter:
    """Report one job to the process that started this one. Use as a context manager.

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
        """Return None: there is no controller."""
        return None

    def _run(self) -> None:
        while not self._closing.wait(PROGRESS_EVERY_S):
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._lines.write(job=self._job, progress=asdict(self._progress()))
