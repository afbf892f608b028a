"""What a run without an agent tells: lines of JSON, for events and twice a second for progress."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TextIO

from windrow_sidecar.finetune.report import Action, Progress, WorkerEvent

PROGRESS_EVERY_S = 0.5


class LineReporter:
    """Writes lines for whoever started this process. Use as a context manager.

    Args:
        out: where to.
        progress: asked twice a second.
    """

    def __init__(self, out: TextIO, progress: Callable[[], Progress]) -> None:
        self._out, self._progress = out, progress
        self._closing = threading.Event()
        self._one_line = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> LineReporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._line(progress=asdict(self._progress()))

    def event(self, event: WorkerEvent) -> None:
        """Write it, after the progress that it came with."""
        self._line(progress=asdict(self._progress()))
        self._line(event=asdict(event))

    def take_command(self) -> Action | None:
        """Nobody asks for anything."""
        return None

    def _run(self) -> None:
        while not self._closing.wait(PROGRESS_EVERY_S):
            self._line(progress=asdict(self._progress()))

    def _line(self, **said: object) -> None:
        with self._one_line:
            self._out.write(json.dumps(said) + "\n")
            self._out.flush()
