"""One job on a device of its own: how it is loaded, and the denominator of eta."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import torch

from windrow.errors import UserError
from windrow.eventlog import EventLog, TaskletEvent
from windrow_sidecar.finetune.boundaries import TorchBoundaries
from windrow_sidecar.finetune.job import Job, Session, open_session, read_job
from windrow_sidecar.finetune.measurement import Step, endless, measure
from windrow_sidecar.finetune.model import BaseModel, find_model, load_base
from windrow_sidecar.finetune.precision import WeightForm
from windrow_sidecar.finetune.stream import MicroLimits, StepDone
from windrow_sidecar.finetune.tasklets import PHASE_WORDS, Tasklet

# Tokens of a micro-batch where nobody waits for the device.
MICRO_BATCH_TOKENS = 1024
# Where layers take turns in memory: a transfer for so many. Five hide one of an 8B layer on an H200
# (`schedule.micro_batches_to_hide`); each keeps one boundary activation a layer.
MICRO_BATCHES_A_VISIT = 5


def measure_alone(options: argparse.Namespace) -> int:
    """Measure a job for `--seconds` or `--steps`.

    Raises:
        UserError: the job cannot be honoured, or there are several.
    """
    units = take_cores(options.units)
    if len(options.job) > 1:
        raise UserError("--seconds and --steps measure one job", remedy="Name one.")
    job = read_job(options.job[0])
    job = replace(job, spec=endless(job.spec))
    events = event_log(job, options.log_dir)
    session = open_alone(job)
    measured = measure(
        lambda: _step(session, units, events),
        engine="windrow",
        units=units,
        seconds=options.seconds,
        steps=options.steps,
    )
    events.flush()
    measured.write(options.json)
    return 0


def event_log(job: Job, folder: Path | None) -> EventLog:
    """Return the log of a job, in `folder` or in the job's own."""
    folder = folder or job.destination / ".windrow" / job.uid
    return EventLog(folder / f"dedicated-{os.getpid()}.events.jsonl", source="dedicated")


def take_cores(units: int | None) -> int:
    """Move this process to the last `units` of its cores (None: all); returns how many."""
    cpus = sorted(os.sched_getaffinity(0))
    units = min(units or len(cpus), len(cpus))
    os.sched_setaffinity(0, cpus[-units:])
    torch.set_num_threads(units)
    return units


def base_of(job: Job) -> BaseModel:
    """Load the base model that a job names.

    Raises:
        UserError: it cannot be had.
    """
    directory = find_model(job.spec.model.name, job.spec.model.revision)
    return load_base(directory, form=WeightForm.of(job.spec))


def open_alone(job: Job, base: BaseModel | None = None) -> Session:
    """Load a job into this process's own memory, over `base` where that is loaded already.

    Raises:
        UserError: it cannot be honoured.
    """
    base = base or base_of(job)
    together = MICRO_BATCHES_A_VISIT if base.frozen else 1
    limits = MicroLimits(MICRO_BATCH_TOKENS, micro_batches=together)
    return open_session(job, base, boundaries=TorchBoundaries(), limits=lambda: limits)


def _step(session: Session, units: int, events: EventLog) -> Step:
    """Run one optimizer step."""
    stream, before = session.stream, session.stream.position.tokens_done
    while True:
        tasklet = stream.peek()
        assert tasklet is not None  # endless
        start_ns = time.monotonic_ns()
        outcome = stream.run(tasklet)
        events.append(_event(session, tasklet, start_ns, units))
        if isinstance(outcome, StepDone):
            at = outcome.position
            return Step(at.tokens_done - before, at.loss or 0.0)


def _event(session: Session, tasklet: Tasklet, start_ns: int, units: int) -> TaskletEvent:
    return TaskletEvent(
        session.job.uid,
        session.job.epoch,
        tasklet.step,
        PHASE_WORDS[tasklet.phase],
        tasklet.layer,
        tasklet.real_tokens,
        session.stream.position.tokens_done,
        start_ns,
        time.monotonic_ns(),
        units,
    )
