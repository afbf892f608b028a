"""Write what a job leaves behind: events, progress, figures, checkpoints, the adapter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from windrow.adapter_files import CONFIG_FILE, digest_of_folder
from windrow.conditions import Reason
from windrow.errors import Transient
from windrow.eventlog import EventLog, LossEvent, TaskletEvent
from windrow.protocol import JobProgress, WorkerEvent
from windrow_sidecar.compute.captures import taken_for_graphs
from windrow_sidecar.finetune.adapter.adapters import save_adapter
from windrow_sidecar.finetune.engine.stages import EvaluationDone, JobStage, Outcome
from windrow_sidecar.finetune.job.assembly import TrainingSession
from windrow_sidecar.finetune.job.hub import HubRepository
from windrow_sidecar.finetune.job.in_flight import Ran
from windrow_sidecar.finetune.job.model_card import CARD_FILE, model_card
from windrow_sidecar.finetune.job.report import JobReporter
from windrow_sidecar.finetune.job.scalars import Scalars
from windrow_sidecar.finetune.job.tracking import Tracking, services_of
from windrow_sidecar.finetune.tasklets import PHASE_WORDS
from windrow_sidecar.finetune.training.checkpoint import (
    Checkpoint,
    Completion,
    JobFolder,
    is_disk_full,
    no_room,
)
from windrow_sidecar.finetune.training.checkpoint_writer import CheckpointWriter, Saved
from windrow_sidecar.finetune.training.health import GradientWatch, StallWatch
from windrow_sidecar.memory.allocator import memory_stats


class CheckpointUnreachable(Transient):
    """A job's checkpoint is on storage that this pod does not have; another slot's may."""


@dataclass(slots=True)
class JobState:
    """State that other threads read or set while the job runs; fields are replaced as a whole."""

    progress: JobProgress = field(default_factory=JobProgress)
    stop_asked: str = ""  # why; set by a signal handler
    busy_ns: int = 0
    held_chunks: int = 0
    tokens_restored: int = 0  # real tokens of steps that were done before this process
    joined_with: int = 0  # other jobs whose rows pass in the same tasklets
    apart: str = ""  # why it has turns of its own beside others; "": it is joined, or alone
    # Of a GPU with decode: the mode, why it is so, and that as a reason of a condition.
    sharing: tuple[str, str, str] = ("", "", "")
    stall: StallWatch = field(default_factory=StallWatch)

    @property
    def last_checkpoint(self) -> str | None:
        """The last good one, "" where there is none; None: nobody has looked for it yet."""
        return self.progress.checkpoint_path if self.progress.total_steps else None

    def join(self, others: int, why: str) -> None:
        """Note beside how many other jobs its rows pass; 0: they have turns of their own.

        `why`: they have, where there are others in the worker.
        """
        self.joined_with, self.apart = others, why

    def report(self) -> JobProgress:
        """Progress as of now."""
        memory = memory_stats()
        return replace(
            self.progress,
            busy_seconds=self.busy_ns / 1e9,
            held_chunks=self.held_chunks,
            joined_with=self.joined_with,
            sharing=self.sharing[0],
            sharing_reason=self.sharing[1],
            sharing_code=self.sharing[2],
            allocator_held_bytes=memory.get("reserved_bytes.all.current", 0),
            allocator_requested_bytes=memory.get("requested_bytes.all.current", 0),
            graph_bytes=taken_for_graphs(),
        )


def tasklet_event(session: TrainingSession, ran: Ran) -> TaskletEvent:
    """Return what the event log says of a tasklet of that job."""
    tasklet = ran.tasklet
    return TaskletEvent(
        session.job.uid,
        session.job.epoch,
        tasklet.step,
        PHASE_WORDS[tasklet.phase],
        tasklet.layer,
        tasklet.real_tokens,
        session.stream.position.tokens_done,
        ran.begin_ns,
        ran.end_ns,
        ran.units,
        ran.queued_ns,
    )


class Ledger:
    """Record what happens to one job, and write its checkpoints and adapter.

    Args:
        session: the job.
        folder: its folder, claimed.
        reporter: receives the reports.
        events: tasklets and losses go here.
        job_state: progress goes here.
        newest: returns the checkpoint to go on from (default: reads the folder).
        forgets: whether checkpoints go once the adapter is written: nobody can go on from them.
    """

    def __init__(
        self,
        session: TrainingSession,
        folder: JobFolder,
        reporter: JobReporter,
        events: EventLog,
        job_state: JobState,
        newest: Callable[[], Checkpoint | None] | None = None,
        *,
        forgets: bool = False,
    ) -> None:
        self._forgets = forgets
        self._newest = newest or folder.newest
        self._session, self._stream, self._folder = session, session.stream, folder
        self._reporter, self._events, self._job_state = reporter, events, job_state
        self._tuned_loss: float | None = None
        self._hub = HubRepository.of(session.job)
        spec = session.job.spec
        self._tracking = Tracking(services_of(session.job, folder.root))
        self._scalars = Scalars(
            folder.root,
            session.job.epoch,
            tensorboard=spec.training.tensorboard,
            memory_bytes=session.device.peak_bytes,
            also=self._tracking.log,
        )
        self._writer = CheckpointWriter(
            folder,
            session.origin,
            keep=spec.checkpoint.keep,
            saved=self._saved,
            failed=self._not_saved,
        )
        self._checkpoint_due = self._told_not_saved = False
        self._gradients = GradientWatch()

    def restore(self) -> bool:
        """Go on from the newest good checkpoint, or the one that the job names, and say so.

        Return whether work is left; False where an earlier worker wrote the
        adapter: reported now.

        Raises:
            UserError: it is of another base, adapter or order of rows.
            CheckpointUnreachable: the operator knows of one, and nothing of it is here.
            OSError: the disk has no room for a checkpoint.
        """
        if self._forgets and (done := self._folder.completion()) is not None:
            self._progress(step=done.step, tokens=done.tokens, loss=done.loss)
            self._tell_completion(done, "an earlier worker wrote the adapter")
            return False
        if self._hub is not None:
            self._hub.check()
        found = self._newest()
        self._newest = self._folder.newest  # what was handed over takes memory
        if passed_over := self._folder.passed_over:
            goes_on = found.path if found else "the beginning"
            detail = f"passed over {'; '.join(passed_over)}; the job goes on from {goes_on}"
            self._reporter.event(WorkerEvent("WARNED", Reason.CHECKPOINT_UNREADABLE, detail))
        own = found is not None and not found.is_named
        if not own and not passed_over and self._session.job.checkpoint:
            raise CheckpointUnreachable(
                f"{self._session.job.checkpoint} is not there: this slot's pod does not see what "
                "the job has done so far. Mount the same storage in every pod that it may run on, "
                "or write to s3://"
            )
        if found is not None:  # before the disk is: its remedy may be to delete the checkpoint
            found.check(self._session.origin)
        self._folder.check_room(self._stream.checkpoint_bytes)
        if found is None:
            self._progress()
            self._started(Reason.STARTED, "from the beginning")
            return True
        self._stream.restore(found.position, found.tensors)
        self._job_state.tokens_restored = found.position.tokens_done
        self._scalars.begin(found.position.tokens_done)
        if own:
            self._progress(checkpoint_step=found.position.step, checkpoint_path=found.path)
        else:
            # Another job's may go at any time: this one gets its own as soon as it can.
            self._progress()
            self._checkpoint_due = True
        moved = found.origin.moved(self._session.origin)
        self._started(Reason.RESUMED, f"from step {found.position.step}, {found.path}{moved}")
        return True

    def ran(self, ran: Ran, share: float = 1.0) -> None:
        """Note a tasklet; `share`: of its time, where it was not this job's alone."""
        self._job_state.busy_ns += round(share * (ran.end_ns - ran.begin_ns))
        self._events.append(tasklet_event(self._session, ran))

    def came(self, outcome: Outcome) -> None:
        """Note the end of a step or of an evaluation; begins a checkpoint where one is due.

        Raises:
            Unhealthy: training on makes nothing better.
            Fenced: another worker has the job.
        """
        if isinstance(outcome, EvaluationDone):
            self._loss(outcome.stage.value, outcome.loss)
            self._scalars.evaluation(self._stream.position.step, outcome)
            self._evaluated(outcome)
            return
        at = outcome.position
        self._loss("training", at.loss or 0.0)
        self._progress(
            learning_rate=outcome.facts.learning_rate, gradient_norm=outcome.facts.gradient_norm
        )
        self._scalars.step(outcome)
        self._gradients.see(at.step, outcome.facts.gradient_norm)
        if at.step % self._session.job.spec.checkpoint.every_steps == 0:
            self.ask_for_checkpoint()

    def ask_for_checkpoint(self) -> None:
        """Have one written meanwhile, once the one that is being written is whole.

        Raises:
            Fenced: see `settle`.
        """
        self._checkpoint_due = True
        self.settle()

    def settle(self) -> None:
        """Report a checkpoint that is whole and begin the one that is due, between two tasklets.

        What servers that get the figures have to say is reported as well.

        A disk that is slower than checkpoints come makes them fewer; the stream never waits for it.
        One that the optimizer's step would have to wait for begins after it.

        Raises:
            Fenced: another worker has the job.
        """
        for reason, detail in self._tracking.news():
            self._reporter.event(WorkerEvent("WARNED", reason, detail))
        self._writer.settle()
        if not self._checkpoint_due:
            return
        if not (self._writer.is_writing or self._stream.before_optimizer):
            self._checkpoint_due = False
            self._writer.begin(self._stream.position, self._stream.snapshot())

    def checkpoint(self) -> str:
        """Write the last one, of all committed micro-batches; return what to say of it.

        Raises:
            Fenced, OSError: it was not written.
        """
        self._tracking.end("stopped")
        return self._last_checkpoint()

    def _last_checkpoint(self) -> str:
        saved = self._writer.finish(self._stream.position, self._stream.snapshot())
        return f"step {saved.position.step} is in {saved.path}"

    def forget(self) -> None:
        """Remove all checkpoints: the job was deleted.

        Raises:
            Fenced: another worker has the job.
        """
        self._tracking.end("deleted")
        self._writer.settle(wait=True)
        self._folder.forget_checkpoints()

    def succeeded(self) -> None:
        """Write the last checkpoint and the adapter; with the adapter, the job has succeeded.

        Raises:
            Fenced, OSError: the adapter was not written.
        """
        try:
            self._last_checkpoint()
        except OSError as error:
            self._not_saved(self._stream.position.step, error)
        at = self._stream.position
        done = Completion(
            at.step,
            at.tokens_done,
            self._stream.told,
            loss=at.loss,
            base_eval_loss=at.base_eval_loss,
            tuned_eval_loss=self._tuned_loss,
        )
        kept, digest = self._write_adapter(done)
        done = replace(done, adapter_digest=digest)
        if self._forgets:
            try:
                # In this order: who finds neither checkpoint nor note would start over.
                self._folder.complete(done)
                self._folder.forget_checkpoints()
            except OSError as error:
                kept = "; ".join(filter(None, (kept, f"its checkpoints stay: {error}")))
        told = "; ".join(filter(None, (kept, self._tracking.end("succeeded"))))
        self._tell_completion(done, told)

    def failed(self) -> None:
        """Tell the servers that get the figures that the job has failed, or is tried again."""
        self._tracking.end("failed")

    def _tell_completion(self, done: Completion, note: str = "") -> None:
        self._reporter.event(
            WorkerEvent(
                "SUCCEEDED",
                Reason.COMPLETED,
                "; ".join(filter(None, (done.detail, note))),
                adapter_path=self._folder.place,
                adapter_digest=done.adapter_digest,
                base_eval_loss=done.base_eval_loss,
                tuned_eval_loss=done.tuned_eval_loss,
            )
        )

    def _write_adapter(self, done: Completion) -> tuple[str, str]:
        """Write adapter and card to their places; return what to say of the Hub, and the digest."""
        session = self._session
        card = model_card(session.job.name, session.job.spec, session.rows, done)
        digests: list[str] = []

        def fill(folder: Path) -> None:
            save_adapter(session.adapted(), folder)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
            digests.append(digest_of_folder(folder))

        self._folder.put_adapter(fill, last=CONFIG_FILE)
        return self._hub.push(fill) if self._hub is not None else "", digests[0]

    def _not_saved(self, step: int, error: OSError) -> None:
        """Tell of the first checkpoint that could not be written since one that was."""
        if self._told_not_saved:
            return
        self._told_not_saved = True
        reason, why = Reason.CHECKPOINT_NOT_WRITTEN, str(error)
        if is_disk_full(error):
            reason, why = Reason.DISK_FULL, no_room(error)
        path = self._job_state.progress.checkpoint_path
        kept = f"the last good one is {path}" if path else "there is none yet"
        detail = f"the checkpoint of step {step} is not written, {kept}: {why}"
        self._reporter.event(WorkerEvent("WARNED", reason, detail))

    def _saved(self, checkpoint: Saved) -> None:
        self._told_not_saved = False
        at, path = checkpoint.position, checkpoint.path
        self._progress(checkpoint_step=at.step, checkpoint_path=path)
        self._reporter.event(WorkerEvent("CHECKPOINTED", "", path))
        self._events.flush()

    def _started(self, reason: Reason, where: str) -> None:
        self._tracking.begin()
        notes = self._session.all_notes
        detail = "; ".join((where, *notes))
        self._reporter.event(WorkerEvent("STARTED", reason, detail, notes=notes))

    def _evaluated(self, done: EvaluationDone) -> None:
        """Tell a loss on the held-out rows; both are known once the last one is."""
        base, step = self._stream.position.base_eval_loss, self._stream.position.step
        if done.stage is JobStage.TUNED_EVALUATION:
            self._tuned_loss = done.loss
            before = "unknown" if base is None else f"{base:.4f}"
            detail = f"held-out loss {before} before, {done.loss:.4f} after"
        else:
            when = f"step {step}" if step else "before the first step"
            detail = f"{when}: held-out loss {done.loss:.4f}"
        self._reporter.event(
            WorkerEvent(
                "EVALUATED", "", detail, base_eval_loss=base, tuned_eval_loss=self._tuned_loss
            )
        )

    def _loss(self, stage: str, loss: float) -> None:
        job, step = self._session.job, self._stream.position.step
        self._events.append(LossEvent(job.uid, job.epoch, step, stage, loss, time.monotonic_ns()))

    def _progress(self, **changed: float | str | None) -> None:
        at, rows = self._stream.position, self._session.rows
        now = {
            "step": at.step,
            # A checkpoint may be of a later step than the job asks for by now.
            "total_steps": max(self._stream.total_steps, at.step),
            "loss": at.loss,
            "tokens": at.tokens_done,
            "train_rows": rows.train_rows,
            "held_out_rows": rows.held_out_rows,
            "skipped_rows": rows.skipped,
            "cut_rows": rows.cut,
            "memory_bytes": self._session.device.peak_bytes(),
        }
        self._job_state.progress = replace(
            self._job_state.progress,
            **(now | changed),  # type: ignore[arg-type]
        )
