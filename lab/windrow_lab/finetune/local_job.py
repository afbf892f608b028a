"""A FinetuneJob on this machine alone: the worker of the sidecar as a process, and what it says."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from windrow.client import check_head, read_manifest
from windrow.crd import FINETUNE_JOB, FinetuneJobSpec, parse_job_spec
from windrow.crd.servable import check_servable
from windrow.errors import UserError
from windrow.holder import HOLDER, AlreadyHeld, check_free, wait_for_orphan
from windrow.outputs import OWN_FOLDER, check_alone, folder_of, is_bucket, path_of
from windrow.protocol import ENDS, Ending, JobProgress, WorkerEvent, error_of

WORKER = "windrow_sidecar.finetune.worker"
WORKER_LOG = "worker.log"
# A worker reports its progress twice a second, from a thread that needs nothing but Python's lock.
SILENT_AFTER_S = 120.0


@dataclass(frozen=True)
class LocalJob:
    """A manifest that is run here, and where it leaves what."""

    manifest: Path
    name: str
    folder: Path  # checkpoints, metrics.jsonl, worker.log, report.html
    destination: Path  # of a bucket: its folder on this machine
    spec: FinetuneJobSpec

    @property
    def place(self) -> str:
        """Destination of the adapter, as people name it."""
        named = self.spec.output.destination
        return path_of(named) if is_bucket(named) else str(self.destination)


@dataclass(frozen=True)
class RunSummary:
    """Summary of the worker's reports so far."""

    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens: int = 0
    memory_bytes: int = 0
    train_rows: int = 0
    held_out_rows: int = 0
    skipped_rows: int = 0
    cut_rows: int = 0
    notes: tuple[str, ...] = ()  # of the dataset
    checkpoint: str = ""
    adapter: str = ""
    base_eval_loss: float | None = None
    tuned_eval_loss: float | None = None
    events: tuple[str, ...] = ()  # `kind: detail`, each said once
    failure: str = ""
    field: str = ""  # of the failure, where it is a user error: what is wrong
    remedy: str = ""  # and what to write instead
    ended: str = ""  # kind of the last event, where it was one of the ends
    died: str = ""  # how the worker ended without a last word
    tokens_at_first: int | None = dataclasses.field(default=None, repr=False)


# What a summary takes over from the worker's progress, by name.
_FIGURES = tuple(
    {f.name for f in dataclasses.fields(RunSummary)}
    & {f.name for f in dataclasses.fields(JobProgress)}
)


def read_local_job(manifest: Path, output: str | None = None) -> LocalJob:
    """Check a manifest as `submit` does; `output`: instead of its destination.

    Raises:
        UserError: it is none, or its spec is wrong.
    """
    body = read_manifest(manifest)
    try:
        check_head(body, FINETUNE_JOB)
        given = body.get("spec", {})
        if output is not None and isinstance(given, dict):
            stated = given.get("output")
            kept = stated if isinstance(stated, dict) else {}
            given = {**given, "output": {**kept, "destination": output}}
        spec = parse_job_spec(given)
        check_servable(spec)
        folder = folder_of(body["metadata"], manifest)
    except UserError as error:
        where = f"{manifest}: {error.field}"
        raise UserError(error.problem, field=where, remedy=error.remedy) from error
    destination = check_alone(spec.output.destination)
    name = body["metadata"]["name"]
    return LocalJob(manifest, name, destination / OWN_FOLDER / folder, destination, spec)


# Of a spec, what only a cluster does.
_OF_CLUSTER = (
    *("suspend", "priority_class_name", "backoff_limit", "active_deadline_seconds"),
    "ttl_seconds_after_finished",
)


def without_cluster(spec: FinetuneJobSpec) -> list[str]:
    """Say which fields of a spec mean nothing here, where it has any."""
    fields = FinetuneJobSpec.model_fields
    named = [name for name in _OF_CLUSTER if getattr(spec, name) != fields[name].default]
    listed = ", ".join(
        [
            *(f"spec.{fields[name].alias}" for name in named),
            *(["spec.model.secretRef"] if spec.model.secret_ref else []),
            *(["spec.output.secretRef"] if spec.output.secret_ref else []),
            *(["spec.dataset.secretRef"] if spec.dataset.secret_ref else []),
        ]
    )
    if not listed:
        return []
    return [f"without a cluster, nothing follows from {listed}"]


def forget(job: LocalJob, tell: Callable[[str], None] = lambda line: None) -> None:
    """Remove what earlier runs of this manifest have left; the adapter stays until the next.

    `tell`: gets a line where one of them was ended and still writes its checkpoint.

    Raises:
        UserError: one of them is still running.
    """
    try:
        for file in job.folder.glob(f"{HOLDER}*"):
            wait_for_orphan(file, lambda who: tell(f"{who} still writes to {job.folder}: waiting"))
            check_free(file)
    except AlreadyHeld as held:
        raise UserError(
            f"{held} trains this job just now, in {job.folder}",
            field="--fresh",
            remedy="Wait until it ends, or stop it.",
        ) from held
    shutil.rmtree(job.folder, ignore_errors=True)


@contextmanager
def started(jobs: Sequence[LocalJob], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the worker of one or more jobs; it is ended on the way out.

    Its words for developers go to `worker.log` of the first job.

    Raises:
        UserError: a folder cannot be written.
    """
    for job in reversed(jobs):
        log = _log_of(job)
    command = [sys.executable, "-m", WORKER, "--standalone", "--parent", str(os.getpid())]
    for job in jobs:
        command += ["--job", str(job.manifest)]
    if len(jobs) == 1:
        command += ["--log-dir", str(jobs[0].folder)]
    with log:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Ctrl-C is for us: we pass it on once, and the worker writes a checkpoint.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate()


def _log_of(job: LocalJob) -> BinaryIO:
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        return (job.folder / WORKER_LOG).open("ab")
    except OSError as error:
        raise UserError(
            f"{job.folder} cannot be written: {error.strerror}",
            field="spec.output.destination",
            remedy="Name a directory that you may write, with room on its disk.",
        ) from error


def listen(
    process: subprocess.Popen[str], n_jobs: int, on_change: Callable[[int, RunSummary], None]
) -> list[RunSummary]:
    """Follow the worker until it ends; `on_change` sees each new state of a job, by its number.

    Raises:
        UserError: it could not begin with any of them.
    """
    summaries = [RunSummary() for _ in range(n_jobs)]
    silent = False
    for said in _lines(process):
        silent = said is None
        if said is None:
            break
        check_begun(said)
        n = said["job"]
        summaries[n] = understood(summaries[n], said)
        on_change(n, summaries[n])
    if silent:
        process.kill()
    process.wait()
    why = (
        f"it has said nothing for {SILENT_AFTER_S:.0f} s, and was ended"
        if silent
        else _end_of(process)
    )
    return [each if each.ended else replace(each, died=why) for each in summaries]


def unbegun(summary: RunSummary) -> RunSummary:
    """Return it as of a job that was asked to stop before its worker could say a word."""
    stopped = "stopped: asked to stop; it had not begun"
    return replace(summary, events=(*summary.events, stopped), ended="STOPPED", died="")


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any] | None]:
    """Yield what the worker says until it ends; None: it has been silent for too long."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    descriptor, rest = process.stdout.fileno(), b""
    while True:
        if not poll.poll(SILENT_AFTER_S * 1e3):
            yield None
            return
        if not (read := os.read(descriptor, 1 << 16)):
            return  # a line without an end is of a worker that was killed
        *lines, rest = (rest + read).split(b"\n")
        yield from map(json.loads, lines)


def _end_of(process: subprocess.Popen[str]) -> str:
    code = process.returncode
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"


def measured(process: subprocess.Popen[str]) -> str:
    """Wait for a worker that only measures; return what it printed.

    Raises:
        UserError: it could not begin.
    """
    assert process.stdout is not None
    out = process.stdout.read()
    process.wait()
    if process.returncode == Ending.USER_ERROR:
        check_begun(json.loads(out))
    return out.rstrip()


def check_begun(said: dict[str, Any]) -> None:
    """Raise what a worker says that does not begin: device, units, or the jobs do not fit."""
    if (error := error_of(said)) is not None:
        raise error


def check_apart(jobs: Sequence[LocalJob]) -> None:
    """Refuse manifests that would write into one folder, before anything starts.

    Raises:
        UserError: names them.
    """
    seen: dict[Path, LocalJob] = {}
    for job in jobs:
        if (other := seen.setdefault(job.destination.resolve(), job)) is not job:
            raise UserError(
                f"{other.manifest} and {job.manifest} would both write to {job.place}",
                field="spec.output.destination",
                remedy="Give each job a destination of its own.",
            )


def last_error(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1] if lines else "it is empty"


def understood(summary: RunSummary, said: dict[str, Any]) -> RunSummary:
    """Return what is known after a line of the worker."""
    if "progress" in said:
        now = JobProgress(**said["progress"])
        first = summary.tokens_at_first
        if first is None and now.total_steps:
            first = now.tokens
        return replace(
            summary,
            **{name: getattr(now, name) for name in _FIGURES},
            checkpoint=now.checkpoint_path,
            tokens_at_first=first,
        )
    event = WorkerEvent(**said["event"])
    summary = replace(
        summary,
        events=(*summary.events, *_said_first(summary, event)),
        ended=event.kind if event.kind in ENDS else "",
        notes=tuple(event.notes) or summary.notes,
    )
    if event.kind == "FAILED":
        return replace(summary, failure=event.detail, field=event.field, remedy=event.remedy)
    return replace(
        summary,
        adapter=event.adapter_path or summary.adapter,
        base_eval_loss=_newer(event.base_eval_loss, summary.base_eval_loss),
        tuned_eval_loss=_newer(event.tuned_eval_loss, summary.tuned_eval_loss),
    )


def _newer(said: float | None, known: float | None) -> float | None:
    return known if said is None else said


def _said_first(summary: RunSummary, event: WorkerEvent) -> Iterator[str]:
    """Yield the lines of an event that were not said yet: notes have lines of their own.

    The last checkpoint is often that of the last step, which has been reported.
    """
    notes = event.notes
    detail = event.detail.removesuffix("".join(f"; {note}" for note in notes))
    lines = [f"{event.kind.lower()}: {detail}".removesuffix(": ")]
    lines += [f"note: {note}" for note in notes]
    yield from (line for line in lines if line not in summary.events)


@dataclass
class Pace:
    """Tokens per second and time left, from the reports; loading does not count."""

    clock: Callable[[], float] = time.monotonic
    _begun: tuple[float, int, int] | None = None  # seconds, tokens, steps

    def see(self, summary: RunSummary) -> tuple[float, float | None]:
        """Return (tokens per second, seconds left or None)."""
        now = self.clock()
        if self._begun is None:
            if summary.total_steps:
                self._begun = now, summary.tokens, summary.step
            return 0.0, None
        begun, tokens, steps = self._begun
        elapsed, done = now - begun, summary.step - steps
        if elapsed <= 0 or done <= 0:
            return 0.0, None
        return (summary.tokens - tokens) / elapsed, elapsed * (
            summary.total_steps - summary.step
        ) / done
