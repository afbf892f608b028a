"""Report a job that was named on the engine's command line: to the engine's log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from windrow.eventlog import EventLog
from windrow.proto import agent_pb2
from windrow.protocol import Action, JobProgress, WorkerEvent
from windrow_sidecar.finetune.colocated.standby import JobOrder

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 5.0


class LocalLink:
    """Takes the place of a stream to the agent (see `JobLink`), where there is no agent.

    Args:
        socket: not used.
        hello: names the job.
        progress: asked every few seconds.
        log_file: flushed as often.
        take, orphaned: not used: nobody sends further jobs, and nobody can fall silent.
        name: of the job; empty: its UID.
    """

    def __init__(
        self,
        socket: Path,
        hello: agent_pb2.WorkerHello,
        progress: Callable[[], JobProgress],
        log_file: EventLog | None = None,
        take: Callable[[JobOrder], None] = lambda order: None,
        orphaned: Callable[[str], None] = lambda why: None,
        *,
        name: str = "",
    ) -> None:
        del socket, take, orphaned
        self._job, self._progress, self._log_file = name or hello.job_uid, progress, log_file
        self.end_asked: Action | None = None
        self._said_step = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-progress", daemon=True)

    def __enter__(self) -> LocalLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._thread.join(timeout=5.0)

    def finish(self) -> None:
        """Stop reporting."""
        self._closing.set()

    def event(self, event: WorkerEvent) -> None:
        """Log it."""
        self._say_progress()
        words = [event.reason, event.detail, event.field, event.adapter_path]
        level = logging.ERROR if event.kind == "FAILED" else logging.INFO
        log.log(level, "job %s %s: %s", self._job, event.kind, "; ".join(filter(None, words)))

    def take_command(self) -> Action | None:
        """Return None: signals of the engine end its jobs, nobody commands them."""
        return None

    def credentials(self) -> tuple[Mapping[str, str], ...]:
        """Return none: Secrets are the cluster's (`check_local` refuses a job that names one)."""
        return {}, {}, {}, {}

    def _run(self) -> None:
        while not self._closing.wait(PROGRESS_EVERY_S):
            self._say_progress()

    def _say_progress(self) -> None:
        now = self._progress()
        if self._log_file is not None:
            self._log_file.flush()
        if now.step == self._said_step or not now.total_steps:
            return
        self._said_step = now.step
        loss = "" if now.loss is None else f", loss {now.loss:.4f}"
        log.info(
            "job %s: step %d of %d%s, %d tokens, %.1f s of compute",
            *(self._job, now.step, now.total_steps, loss, now.tokens, now.busy_seconds),
        )
