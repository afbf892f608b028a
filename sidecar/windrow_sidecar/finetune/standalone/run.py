"""Run jobs on a device of their own, without a cluster: one, or several over one base model."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.eventlog import EventLog
from windrow.protocol import Ending, WorkerEvent
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.finetune.engine.sizing import Estimates
from windrow_sidecar.finetune.job.assembly import (
    MICRO_BATCH_TOKENS,
    JobSpec,
    TrainingSession,
    read_job,
)
from windrow_sidecar.finetune.job.bucket import open_own_folder
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.job.gate import OpenGate
from windrow_sidecar.finetune.job.job_handle import JobHandle
from windrow_sidecar.finetune.job.joint_turns import (
    JointRuntime,
    JointTurns,
    JointWatch,
    open_joint,
    why_apart,
)
from windrow_sidecar.finetune.job.ledger import JobState, Ledger
from windrow_sidecar.finetune.job.multiplexer import JobMultiplexer, worst
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.job.tracking import services_of
from windrow_sidecar.finetune.memory.training_memory import OwnMemory
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.model.shallow_clone import check_shared, shallow_clone
from windrow_sidecar.finetune.standalone.dedicated import (
    base_of,
    event_log,
    open_alone,
    take_units,
)
from windrow_sidecar.finetune.standalone.json_lines import LineReporter, Lines
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.checkpoint import JobFolder
from windrow_sidecar.finetune.training.health import (
    LOADING,
    LOADING_AFTER_S,
    READING,
    TAKING_FOLDER,
    Unhealthy,
)

log = logging.getLogger(__name__)


def run_together(options: argparse.Namespace) -> int:
    """Run the jobs that `--job` names to their end; returns an `Ending`.

    Raises:
        UserError: a manifest cannot be read, or two jobs are indistinguishable.
    """
    device = find_device(options.device)
    units = take_units(device, options.units)
    jobs = [read_job(path, options.output) for path in options.job]
    check_apart(jobs)
    together = JobGroup(jobs, units, options.log_dir, device, options.parent, fresh=options.fresh)
    return int(together.run())


def check_apart(jobs: Sequence[JobSpec]) -> None:
    """Refuse jobs that would write into one folder.

    Raises:
        UserError: names them.
    """
    seen: dict[Path, JobSpec] = {}
    for job in jobs:
        other = seen.setdefault(job.destination.resolve(), job)
        if other is not job:
            raise UserError(
                f"{other.name} and {job.name} would both write to {job.spec.output.destination}",
                field="spec.output.destination",
                remedy="Give each job a destination of its own.",
            )


class Unbegun(BaseException):
    """A signal asks to stop, and no job has begun; no library may take it for an error."""


class JobGroup:
    """Jobs over one base model, reported on standard output (see `json_lines`).

    Args:
        jobs: one or more.
        units: of the device, in use.
        log_dir: of the event logs; None: in each job's folder.
        device: that computes.
        parent: the process with whose end they stop; 0: there is none.
        fresh: True forgets what earlier runs left in a bucket.
    """

    def __init__(
        self,
        jobs: Sequence[JobSpec],
        units: int,
        log_dir: Path | None,
        device: ComputeDevice,
        parent: int = 0,
        *,
        fresh: bool = False,
    ) -> None:
        self._fresh = fresh
        self._jobs, self._log_dir, self._device = jobs, log_dir, device
        self._parent, self._loading = parent, True
        self._estimates = Estimates()
        self._gate = OpenGate(units, device, self._estimates)
        self._lines = Lines.to_standard_output(lambda: self._stop("nobody reads its output"))
        self._standings = [JobState() for _ in jobs]
        self._endings: dict[int, Ending] = {}
        self._own_base: BaseModel | None = None

    def run(self) -> Ending:
        """Run all to their ends; returns the worst of them (see `worst`)."""
        with ExitStack() as until_all_is_told:
            reporters = [
                until_all_is_told.enter_context(LineReporter(self._lines, n, job_state.report))
                for n, job_state in enumerate(self._standings)
            ]
            try:
                for signal_ in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(signal_, self._ask_to_stop)
                job_handle = self._load(reporters, until_all_is_told)
            except Unbegun:
                for n in set(range(len(self._jobs))) - self._endings.keys():
                    why = f"{self._standings[n].stop_asked}; it had not begun"
                    reporters[n].event(WorkerEvent("STOPPED", Reason.STOPPED, why))
                    self._endings[n] = Ending.STOPPED
                job_handle = []
            if job_handle:
                multiplexer = JobMultiplexer(job_handle, joint=self._join_rows)
                del job_handle  # what a job holds goes with its end
                multiplexer.run()
        return worst(self._endings.values())

    def _load(self, reporters: Sequence[LineReporter], until_told: ExitStack) -> list[JobHandle]:
        """Load what can be loaded, and tell of what cannot.

        Raises:
            Unbegun: a signal asks to stop.
        """
        base: BaseModel | None = None
        job_handle = []
        for n, (job, reporter) in enumerate(zip(self._jobs, reporters, strict=True)):
            stall = self._standings[n].stall
            try:
                events = event_log(job, self._log_dir)
                until_told.callback(events.flush)
                stall.watch(partial(self._give_up, n, reporter, events))
                until_told.callback(stall.close)
                with stall.during(LOADING, LOADING_AFTER_S):
                    base = base or self._base()
                    own = shallow_clone(base) if len(self._jobs) > 1 else base
                    self._own_base = base
                job_handle.append(self._job_handle(n, job, own, reporter, events))
            except Exception as error:
                # The edge of a job: the others run without it.
                log.exception("%s cannot begin", job.name)
                self._endings[n] = self._failed(n, reporter, error)
        self._loading = False
        return job_handle

    def _base(self) -> BaseModel:
        """Load what all of them share."""
        wanted = {
            job.name: (job.spec.model.name, job.spec.model.revision, *astuple(form))
            for job in self._jobs
            for form in (WeightForm.of(job.spec),)
        }
        check_shared(wanted)
        return base_of(self._jobs[0], self._device)

    def _job_handle(
        self, n: int, job: JobSpec, base: BaseModel, reporter: LineReporter, events: EventLog
    ) -> JobHandle:
        services_of(job)  # what cannot be reported is refused before anything is read
        folder = open_own_folder(job, self._parent, fresh=self._fresh)
        job_state = self._standings[n]

        def waits_for(who: str) -> None:
            detail = f"{who}, of a run that was ended, still writes to {folder.root}: waiting"
            reporter.event(WorkerEvent("WARNED", Reason.FENCED, detail))

        with job_state.stall.during(TAKING_FOLDER):
            folder.claim(waits_for, job_state.stall.renew)
            job = replace(job, epoch=folder.epoch).of_folder(folder)
        with job_state.stall.during(READING):
            session = self._open(job, base, job_state.stall.renew)
        stream = session.stream
        memory = OwnMemory(stream, activation_budget=session.activation_budget)
        ledger = Ledger(session, folder, reporter, events, job_state)
        weights = stream.parts.weights
        return JobHandle(
            job.name,
            stream,
            memory,
            Runner(
                *(stream, self._gate, memory, ledger, reporter, job_state),
                expected_s=lambda tasklet: self._estimates.expected_s(tasklet, weights),
            ),
            failed=lambda error: self._failed(n, reporter, error, ledger, folder),
            ended=lambda ending: self._endings.update({n: ending}),
            apart=why_apart(session, base),
            activation_budget=session.activation_budget,
        )

    def _join_rows(self) -> JointTurns:
        """Return what runs jobs whose rows pass together."""
        assert self._own_base is not None
        tokens = MICRO_BATCH_TOKENS[self._device.torch.type]
        runtime = JointRuntime(TorchBoundaries(), lambda: MicroLimits(tokens), self._device)
        stream, budget = open_joint(shallow_clone(self._own_base), runtime)
        memory = OwnMemory(stream, activation_budget=budget)
        return JointTurns(stream, memory, budget, self._gate, JointWatch())

    def _open(self, job: JobSpec, base: BaseModel, alive: Callable[[], None]) -> TrainingSession:
        """Put a job together; `alive`: called at each row that is read."""
        return open_alone(job, self._device, base, self._estimates, alive)

    def _failed(
        self,
        n: int,
        reporter: LineReporter,
        error: Exception,
        ledger: Ledger | None = None,
        folder: JobFolder | None = None,
    ) -> Ending:
        if ledger is not None:
            ledger.failed()
        if folder is not None:
            folder.keep_figures()
        event, ending = failure(error, self._standings[n].last_checkpoint)
        reporter.event(event)
        return ending

    def _give_up(self, n: int, reporter: LineReporter, events: EventLog, found: Unhealthy) -> None:
        """End the process from beside its stuck thread; other jobs resume from checkpoints."""
        ending = self._failed(n, reporter, found)
        events.flush()
        os._exit(ending)

    def _ask_to_stop(self, *_: object) -> None:
        orphan = self._parent and os.getppid() != self._parent
        self._stop("who started it has ended" if orphan else "asked to stop")
        if self._loading:
            raise Unbegun

    def _stop(self, why: str) -> None:
        for job_state in self._standings:
            job_state.stop_asked = job_state.stop_asked or why
