"""What a job leaves behind as it runs: events, progress, metrics, checkpoints, the adapter."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, field, replace

from windrow.conditions import Reason
from windrow.eventlog import EventLog, LossEvent, TaskletEvent
from windrow_sidecar.finetune.adapters import CONFIG_FILE, WEIGHTS_FILE, save_adapter
from windrow_sidecar.finetune.checkpoint import JobFolder, sync_folder
from windrow_sidecar.finetune.job import Session
from windrow_sidecar.finetune.report import Progress, Reporter, WorkerEvent
from windrow_sidecar.finetune.stream import EvaluationDone, Outcome, Stage, StepDone
from windrow_sidecar.finetune.tasklets import PHASE_WORDS, Tasklet

METRICS_FILE = "metrics.jsonl"


@dataclass(slots=True)
class Standing:
    """What other threads read or set while the job runs; each field is replaced as a whole."""

    progress: Progress = field(default_factory=Progress)
    stop_asked: str = ""  # why; set by a signal handler
    busy_ns: int = 0
    held_chunks: int = 0

    def report(self) -> Progress:
        """Progress as of now."""
        return replace(self.progress, busy_seconds=self.busy_ns / 1e9, held_chunks=self.held_chunks)


class Ledger:
    """Writes down what happens to one job.

    Args:
        session: the job.
        folder: its folder, claimed.
        reporter: who is told.
        events: tasklets and losses go here.
        standing: progress goes here.
    """

    def __init__(
        self,
        session: Session,
        folder: JobFolder,
        reporter: Reporter,
        events: EventLog,
        standing: Standing,
    ) -> None:
        self._session, self._stream, self._folder = session, session.stream, folder
        self._reporter, self._events, self._standing = reporter, events, standing
        self._tuned_loss = 0.0

    def restore(self) -> None:
        """Go on from the newest good checkpoint, where there is one, and say so."""
        found = self._folder.newest()
        if found is None:
            self._progress()
            self._reporter.event(WorkerEvent("STARTED", Reason.STARTED, "from the beginning"))
            return
        self._stream.restore(found.position, found.tensors)
        self._progress(checkpoint_step=found.position.step, checkpoint_path=str(found.path))
        detail = f"from step {found.position.step}, {found.path}"
        self._reporter.event(WorkerEvent("STARTED", Reason.RESUMED, detail))

    def ran(self, tasklet: Tasklet, start_ns: int, end_ns: int, units: int) -> None:
        """Note a tasklet."""
        job = self._session.job
        self._standing.busy_ns += end_ns - start_ns
        self._events.append(
            TaskletEvent(
                job.uid,
                job.epoch,
                tasklet.step,
                PHASE_WORDS[tasklet.phase],
                tasklet.layer,
                tasklet.real_tokens,
                self._stream.position.tokens_done,
                start_ns,
                end_ns,
                units,
            )
        )

    def came(self, outcome: Outcome) -> None:
        """Note the end of a step or of an evaluation; writes a checkpoint where one is due."""
        if isinstance(outcome, EvaluationDone):
            self._loss(outcome.stage.value, outcome.loss)
            if outcome.stage is Stage.TUNED_EVALUATION:
                self._evaluated(outcome.loss)
            return
        at = outcome.position
        self._loss("training", at.loss or 0.0)
        self._progress(
            learning_rate=outcome.facts.learning_rate, gradient_norm=outcome.facts.gradient_norm
        )
        self._metrics(outcome)
        if at.step % self._session.job.spec.checkpoint.every_steps == 0:
            self.checkpoint()

    def checkpoint(self) -> str:
        """Write one, of everything up to the last committed micro-batch. Returns what to say of it.

        Raises:
            Fenced, OSError: it was not written.
        """
        position, keep = self._stream.position, self._session.job.spec.checkpoint.keep
        path = self._folder.save(position, self._stream.tensors(), keep=keep)
        self._progress(checkpoint_step=position.step, checkpoint_path=str(path))
        self._reporter.event(WorkerEvent("CHECKPOINTED", "", str(path)))
        self._events.flush()
        return f"step {position.step} is in {path}"

    def succeeded(self) -> None:
        """Write the last checkpoint and the adapter.

        Raises:
            Fenced, OSError: they were not written.
        """
        self.checkpoint()
        folder = self._folder
        draft = folder.root / "adapter"
        with folder.writing():
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            save_adapter(self._session.model, draft)
            # The configuration last: with it the folder is an adapter for everyone who looks.
            for name in (WEIGHTS_FILE, CONFIG_FILE):
                os.replace(draft / name, folder.destination / name)
            sync_folder(folder.destination)
            draft.rmdir()
        self._reporter.event(
            WorkerEvent(
                "SUCCEEDED",
                Reason.COMPLETED,
                f"{self._stream.total_steps} steps",
                adapter_path=str(folder.destination),
                base_eval_loss=self._stream.position.base_eval_loss or 0.0,
                tuned_eval_loss=self._tuned_loss,
            )
        )

    def _evaluated(self, tuned: float) -> None:
        base, self._tuned_loss = self._stream.position.base_eval_loss or 0.0, tuned
        detail = f"held-out loss {base:.4f} before, {tuned:.4f} after"
        self._reporter.event(
            WorkerEvent("EVALUATED", "", detail, base_eval_loss=base, tuned_eval_loss=tuned)
        )

    def _loss(self, stage: str, loss: float) -> None:
        job, step = self._session.job, self._stream.position.step
        self._events.append(LossEvent(job.uid, job.epoch, step, stage, loss, time.monotonic_ns()))

    def _progress(self, **changed: float | int | str) -> None:
        at = self._stream.position
        self._standing.progress = replace(
            self._standing.progress,
            step=at.step,
            total_steps=self._stream.total_steps,
            loss=at.loss or 0.0,
            tokens=at.tokens_done,
            **changed,  # type: ignore[arg-type]
        )

    def _metrics(self, done: StepDone) -> None:
        line = {
            "step": done.position.step,
            "loss": done.position.loss,
            **asdict(done.facts),
            "tokens": done.position.tokens_done,
            "epoch": self._session.job.epoch,
            "unix_seconds": time.time(),
        }
        with (self._folder.root / METRICS_FILE).open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
