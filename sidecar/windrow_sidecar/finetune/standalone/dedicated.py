"""Load one job onto a device of its own, and measure its rate there (eta's denominator)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from windrow.errors import UserError
from windrow.eventlog import EventLog
from windrow.outputs import OWN_FOLDER
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.compute.partition import UnknownLevel
from windrow_sidecar.finetune.adapter.layer_programs import wanted_program
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.engine.sizing import (
    Estimates,
    WholeRows,
    micro_batches_a_visit,
)
from windrow_sidecar.finetune.engine.stages import StepDone
from windrow_sidecar.finetune.job.assembly import (
    MICRO_BATCH_TOKENS,
    JobSpec,
    TaskletRuntime,
    TrainingSession,
    open_session,
    read_job,
)
from windrow_sidecar.finetune.job.gate import OpenGate
from windrow_sidecar.finetune.job.ledger import tasklet_event
from windrow_sidecar.finetune.memory.training_memory import OwnMemory
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.loading import BaseModel, find_model, load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.standalone.measurement import Step, endless, measure
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.tensor_parallel.sharding import Sharding

# Of a tasklet on a device that queues, where nobody waits: what is around a tasklet takes the host
# longer than to launch the graphs of a layer. A command is heard after so many of them.
QUEUED_LAYERS = 8


def measure_alone(options: argparse.Namespace) -> int:
    """Measure a job for `--seconds` or `--steps`.

    Raises:
        UserError: the job cannot be honoured, or there are several.
    """
    device = find_device(options.device)
    units = take_units(device, options.units)
    if len(options.job) > 1:
        raise UserError("--seconds and --steps measure one job", remedy="Name one.")
    job = read_job(options.job[0], options.output)
    job = replace(job, spec=endless(job.spec))
    events = event_log(job, options.log_dir)
    base = base_of(job, device, random_weights=options.random_weights)
    estimates = Estimates()
    session, gate = open_alone(job, device, base, estimates), OpenGate(units, device, estimates)
    memory = OwnMemory(session.stream, activation_budget=session.activation_budget)
    measured = measure(
        lambda: _step(session, gate, memory, events),
        engine="windrow",
        units=units,
        seconds=options.seconds,
        steps=options.steps,
    )
    events.flush()
    stack = session.stream.parts.stack
    graphs = stack.graphs
    measured = replace(
        measured,
        layer_program=stack.program,
        layer_program_why=session.program_why or (graphs.refused if graphs is not None else ""),
        graph_bytes=graphs.driver_bytes if graphs is not None else 0,
        graph_bytes_expected=graphs.expected_bytes if graphs is not None else 0,
    )
    measured.write(options.json)
    return 0


def event_log(job: JobSpec, folder: Path | None) -> EventLog:
    """Return the event log of a job, in `folder` or in the job's own directory."""
    folder = folder or job.destination / OWN_FOLDER / job.uid
    return EventLog(folder / f"dedicated-{os.getpid()}.events.jsonl", source="dedicated")


def take_units(device: ComputeDevice, units: int | None) -> int:
    """Compute on the last `units` of the device (None: all) from now on; returns how many.

    Raises:
        UserError: the device has no share of that size.
    """
    if device.torch.type == "cpu":
        return take_cores(units)
    if units is None:
        return device.total_units()
    from windrow_sidecar.compute.cuda import CudaPartition

    try:
        CudaPartition("finetune", device.name).activate(units)
    except UnknownLevel as error:
        raise UserError(error.problem, field="--units", remedy="Choose one of them.") from error
    return units


def take_cores(units: int | None) -> int:
    """Move this process to the last `units` of its cores (None: all); returns how many.

    Raises:
        UserError: it has not so many.
    """
    cpus = sorted(os.sched_getaffinity(0))
    units = len(cpus) if units is None else units
    if not 0 < units <= len(cpus):
        raise UserError(
            f"{units} cores: this process has {len(cpus)}",
            field="--units",
            remedy=f"Write 1 to {len(cpus)}, or leave it out for all.",
        )
    os.sched_setaffinity(0, cpus[-units:])
    torch.set_num_threads(units)
    return units


def base_of(job: JobSpec, device: ComputeDevice, *, random_weights: int | None = None) -> BaseModel:
    """Load the base model that a job names onto a device; `random_weights`: see `load_base`.

    Raises:
        UserError: it cannot be had.
    """
    directory = find_model(job.spec.model.name, job.spec.model.revision)
    form = WeightForm.of(job.spec)
    return load_base(directory, form=form, device=device, random_weights=random_weights)


def open_alone(
    job: JobSpec,
    device: ComputeDevice | None = None,
    base: BaseModel | None = None,
    estimates: Estimates | None = None,
    alive: Callable[[], None] = lambda: None,
    rows: DataSplit | None = None,
    sharding: Sharding | None = None,
) -> TrainingSession:
    """Load a job onto a device (default: the host), over `base` where that is loaded already.

    `estimates`: what tasklets take there, as the gate learns it. Where layers take turns, as many
    micro-batches visit each together as hide its transfer. `alive`: called at each row. `rows`: of
    the job, where they have been read; `sharding`: of a base that is cut over ranks.

    Raises:
        UserError: it cannot be honoured.
    """
    device = device or HostDevice()
    base, known = base or base_of(job, device), estimates or Estimates()
    frozen, tokens = base.frozen, MICRO_BATCH_TOKENS[device.torch.type]

    def limits() -> MicroLimits:
        of_each = session.micro_batch_tokens(tokens)
        together = micro_batches_a_visit(frozen, known, of_each, job.spec.training.batch_size)
        return MicroLimits(tokens, micro_batches=together)

    # Layers that take turns in memory are visited one by one.
    sizing = WholeRows(QUEUED_LAYERS if device.queues and frozen is None else 1)
    # A packed layer sums nothing over ranks.
    program = wanted_program() if sharding is None else "eager"
    runtime = TaskletRuntime(
        TorchBoundaries(), limits, sizing=lambda: sizing, device=device, program=program
    )
    session = open_session(job, base, runtime, rows=rows, alive=alive, sharding=sharding)
    return session


def _step(session: TrainingSession, gate: OpenGate, memory: OwnMemory, events: EventLog) -> Step:
    """Run one optimizer step to its end."""
    stream, before = session.stream, session.stream.position.tokens_done
    while True:
        memory.settle()
        tasklet = stream.peek()
        assert tasklet is not None  # endless
        memory.starving(tasklet)
        gate.launch(tasklet)
        outcome = stream.run(tasklet)
        gate.landed(tasklet)
        if isinstance(outcome, StepDone):
            gate.quiet(None)
            for ran in gate.take_ran():
                events.append(tasklet_event(session, ran))
            events.flush()  # it may be stopped or killed at any moment
            at = outcome.position
            return Step(at.tokens_done - before, at.loss or 0.0, outcome.facts.gradient_norm)
