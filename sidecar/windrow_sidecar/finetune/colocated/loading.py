"""Load a further job on a thread while the worker's other jobs train.

On a thread of its own: it takes the job's folder, has the rows read by another process, and reads
and verifies the last checkpoint; all of that waits, or computes without the interpreter's lock.
What is left for the training thread is to put the adapter into the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from windrow.conditions import Reason
from windrow.protocol import Action, Ending, WorkerEvent
from windrow_sidecar.finetune.colocated.standby import JobOrder
from windrow_sidecar.finetune.data.readers import Readers, ReadingPause, RowsBeingRead, RowsWanted
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.job.bucket import open_folder
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.training.checkpoint import Checkpoint, Fenced, JobFolder
from windrow_sidecar.finetune.training.health import READING, TAKING_FOLDER, VERIFYING

log = logging.getLogger(__name__)

Verdict = tuple[WorkerEvent, Ending]
NOT_BEGUN = "it had not begun"
# The agent kills a worker whose job does not end within 25 s, and the other jobs with it: a folder
# that does not answer is left as it is before that.
FORGET_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """A job whose rows and checkpoint are read; only its adapter is missing."""

    job: JobSpec
    folder: JobFolder
    rows: DataSplit
    checkpoint: Checkpoint | None  # to go on from


class GivenUp(Exception):
    """The job was asked to end before it was loaded."""


class Loading:
    """Load one job; folders or rows that do not answer hold up no other job.

    Args:
        job: reads it; called on the thread.
        order: names it.
        job_state: of the job; its stall watch is renewed as rows come.
        readers: have the rows read.
        rows_for: says what to read; called on the thread.
        pace: when the rows may be read.
    """

    def __init__(
        self,
        job: Callable[[], JobSpec],
        order: JobOrder,
        job_state: JobState,
        readers: Readers,
        rows_for: Callable[[JobSpec], RowsWanted],
        pace: ReadingPause,
    ) -> None:
        self._job, self._order, self._job_state = job, order, job_state
        self._readers, self._rows_for, self._pace = readers, rows_for, pace
        self._lock = threading.Lock()
        self._rows: RowsBeingRead | None = None
        self._found: LoadedJob | Exception | None = None
        self._claimed: JobFolder | None = None
        self._forgotten_s: float | None = None  # when its job was deleted
        self.verdict: Verdict | None = None  # that it was given up with
        # A daemon: a disk that never answers must not keep the worker from ending.
        threading.Thread(target=self._run, name=f"load-{order.job_uid}", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True where there is a result, an error, or a verdict."""
        return self.verdict is not None or self._found is not None

    def result(self) -> LoadedJob:
        """Return what was made ready, once it is over without a verdict.

        Raises:
            UserError, Transient, Fenced, OSError: why it could not be.
        """
        assert self._found is not None
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def forget(self) -> None:
        """End it for a job that was deleted: a verdict comes once its checkpoints are removed.

        To be called until there is one; a folder that does not answer is not waited for.
        """
        now_s = time.monotonic()
        with self._lock:
            if self.is_over:
                return
            first, self._forgotten_s = self._forgotten_s is None, self._forgotten_s or now_s
            rows, waited_s = self._rows, now_s - self._forgotten_s
        if first and rows is not None:
            rows.end()
        if waited_s > FORGET_WITHIN_S:
            why = f"its folder does not answer, its checkpoints stay; {NOT_BEGUN}"
            self.give_up(_stopped(f"the job was deleted; {why}"))

    def give_up(self, verdict: Verdict) -> bool:
        """End it at once, whatever it waits for; False: it was over before."""
        with self._lock:
            if self.is_over:
                return False
            self.verdict = verdict
            rows = self._rows
        if rows is not None:
            rows.end()
        return True

    def _run(self) -> None:
        found: LoadedJob | Exception
        try:
            found = self._make_ready()
        except GivenUp as error:
            found = error
        except Exception as error:
            # The edge of a thread: the waiting thread hears of it.
            log.info("job %s is not ready", self._order.job_uid, exc_info=True)
            found = error
        with self._lock:
            forgotten = self._forgotten_s is not None
            if not forgotten:
                self._found = found
        if forgotten:
            removed = _stopped(self._remove_checkpoints())
            with self._lock:
                self.verdict = self.verdict or removed

    def _remove_checkpoints(self) -> str:
        """Remove those of a job that was deleted; returns what to say of it."""
        if self._claimed is None:
            return f"the job was deleted; {NOT_BEGUN}"
        try:
            self._claimed.forget_checkpoints()
        except (Fenced, OSError) as error:
            return f"the job was deleted, its checkpoints stay: {error}; {NOT_BEGUN}"
        return f"the job was deleted, its checkpoints are removed; {NOT_BEGUN}"

    def _make_ready(self) -> LoadedJob:
        during = self._job_state.stall.during
        job = self._job()
        wanted = self._rows_for(job)
        folder = open_folder(job)
        with during(TAKING_FOLDER):
            folder.claim()
            self._claimed = folder
            job = job.of_folder(folder)
        with during(READING):
            of_job = replace(wanted, begun=job.begun, served_by=job.served_by)
            rows = self._begin_rows(of_job).wait(self._job_state.stall.renew, self._pace)
        with during(VERIFYING):
            checkpoint = folder.newest()
        return LoadedJob(job, folder, rows, checkpoint)

    def _begin_rows(self, wanted: RowsWanted) -> RowsBeingRead:
        with self._lock:
            if self.verdict is not None or self._forgotten_s is not None:
                raise GivenUp
            self._rows = self._readers.begin(wanted)
            return self._rows


def ended_unloaded(asked: Action) -> Verdict:
    """Return the ending of a job that was asked to end before it was loaded."""
    if asked == "ABORT":
        return WorkerEvent("STOPPED", Reason.STALE_EPOCH, "aborted"), Ending.FENCED
    return _stopped(f"asked to stop; {NOT_BEGUN}")


def _stopped(detail: str) -> Verdict:
    return WorkerEvent("STOPPED", Reason.STOPPED, detail), Ending.STOPPED
