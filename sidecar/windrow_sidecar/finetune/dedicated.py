"""Finetuning on a device of its own: the denominator of eta, and a job without a cluster."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from dataclasses import replace

import torch

from windrow.eventlog import EventLog, TaskletEvent
from windrow_sidecar.finetune.boundaries import TorchBoundaries
from windrow_sidecar.finetune.checkpoint import JobFolder
from windrow_sidecar.finetune.device import OpenGate, OwnMemory
from windrow_sidecar.finetune.failures import failure
from windrow_sidecar.finetune.job import Job, Session, open_session, read_job
from windrow_sidecar.finetune.ledger import Ledger, Standing
from windrow_sidecar.finetune.lines import LineReporter
from windrow_sidecar.finetune.measurement import Step, endless, measure
from windrow_sidecar.finetune.model import find_model, load_base
from windrow_sidecar.finetune.precision import WeightForm
from windrow_sidecar.finetune.runner import Ending, Runner
from windrow_sidecar.finetune.stream import MicroLimits, StepDone
from windrow_sidecar.finetune.tasklets import PHASE_WORDS, Tasklet

log = logging.getLogger(__name__)

# Tokens of a micro-batch where nobody waits for the device.
MICRO_BATCH_TOKENS = 1024
# Where layers take turns in memory: a transfer for so many. Five hide one of an 8B layer on an H200
# (`schedule.micro_batches_to_hide`); each keeps one boundary activation a layer.
MICRO_BATCHES_A_VISIT = 5


def run_dedicated(options: argparse.Namespace) -> int:
    """Measure (`--seconds`, `--steps`), or run the job to its end.

    Raises:
        UserError: the job cannot be honoured.
    """
    units = take_cores(options.units)
    job = read_job(options.job)
    folder = options.log_dir or job.destination / ".windrow" / job.uid
    events = EventLog(folder / f"dedicated-{os.getpid()}.events.jsonl", source="dedicated")
    if options.seconds is None and options.steps is None:
        return _run_to_the_end(job, units, events)
    job = replace(job, spec=endless(job.spec))
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


def take_cores(units: int | None) -> int:
    """Move this process to the last `units` of its cores (None: all); returns how many."""
    cpus = sorted(os.sched_getaffinity(0))
    units = min(units or len(cpus), len(cpus))
    os.sched_setaffinity(0, cpus[-units:])
    torch.set_num_threads(units)
    return units


def open_alone(job: Job) -> Session:
    """Load a job into this process's own memory.

    Raises:
        UserError: it cannot be honoured.
    """
    base = load_base(
        find_model(job.spec.model.name, job.spec.model.revision), form=WeightForm.of(job.spec)
    )
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


def _run_to_the_end(job: Job, units: int, events: EventLog) -> int:
    """Run the job, and tell of it on standard output (see `lines`)."""
    standing = Standing()
    for signal_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_, lambda *_: setattr(standing, "stop_asked", "asked to stop"))
    with LineReporter(sys.stdout, standing.report) as reporter:
        try:
            return int(_run(job, units, events, standing, reporter))
        except Exception as error:
            # The edge of the process: whatever went wrong, who started it hears of it.
            event, ending = failure(error, standing.progress.checkpoint_path)
            log.exception("the job failed")
            reporter.event(event)
            return int(ending)
        finally:
            events.flush()


def _run(
    job: Job, units: int, events: EventLog, standing: Standing, reporter: LineReporter
) -> Ending:
    folder = JobFolder(job.destination, job.uid, job.epoch)
    folder.claim()
    session = open_alone(job)
    ledger = Ledger(session, folder, reporter, events, standing)
    runner = Runner(session.stream, OpenGate(units), OwnMemory(), ledger, reporter, standing)
    return runner.run()
