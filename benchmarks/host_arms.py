"""The arms of `host_cost`, which take turns in one process over the shim: written to found.json.

A layer's time is from where it begins to where the next one of its pass begins, or the loss, so
what is between two tasklets (gate, memory, hooks, log) counts: means over the layers of a step. The
first layer of a step makes the packed copies of the adapter for all: that has a figure of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from benchmarks import shapes
from windrow.eventlog import EventLog
from windrow.protocol import WorkerEvent
from windrow.rundir import ENV_LAYER_PROGRAM
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute import queued
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.colocated.slot import WorkerSlot
from windrow_sidecar.finetune.colocated.slot_device import slot_device
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.job.assembly import JobSpec, TrainingSession, read_job
from windrow_sidecar.finetune.job.gate import OpenGate
from windrow_sidecar.finetune.job.ledger import JobState, Ledger, tasklet_event
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.memory.training_memory import OwnMemory
from windrow_sidecar.finetune.model import capabilities
from windrow_sidecar.finetune.model.loading import BaseModel, load_base
from windrow_sidecar.finetune.model.precision import WeightForm
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.standalone.baseline import PlainLoop
from windrow_sidecar.finetune.standalone.dedicated import open_alone
from windrow_sidecar.finetune.training.checkpoint import JobFolder
from windrow_sidecar.heap import settle_heap
from windrow_sidecar.qos.view import Action, Grant

EPOCH, UNITS, BOUND_US = 1, 132, 50_000
_BLOCK, _ARENA = 2 << 20, 96 << 30
_WARM = 3  # rounds
_COUNTED = 4  # each so many rounds launches are counted, and time is not taken


class Marks:
    """Begins of the layers of a step: in CPU time of the process, or counted in launches."""

    def __init__(self) -> None:
        shim = ctypes.CDLL(None)
        self._counters = [
            getattr(shim, f"windrow_shim_{name}")
            for name in ("kernels", "products", "copies", "graph_launches")
        ]
        # Triton launches by the driver's calls.
        self._counters.append(ctypes.CDLL("libcuda.so.1").windrow_shim_triton_launches)
        for counter in self._counters:
            counter.restype = ctypes.c_longlong
        self.counts, self.planned = False, 0
        self._begun: list[tuple[str, int, int]] = []

    def note(self, phase: str, layer: int) -> None:
        """A layer begins."""
        now = sum(c() for c in self._counters) if self.counts else time.process_time_ns()
        self._begun.append((phase, layer, now))

    def of_layer(self) -> Layer:
        """Return the figures of a layer of the step that was noted, and begin again."""
        spans: dict[str, list[int]] = {"fwd": [], "bwd": []}
        first = optimizer = 0
        for (phase, layer, at), (next_phase, next_layer, then) in pairwise(self._begun):
            if phase == "fwd" == next_phase and layer == 0:
                first = then - at
            elif phase == "fwd" and next_phase in ("fwd", "up"):
                spans["fwd"].append(then - at)
            elif phase in ("down", "bwd") and next_phase == "bwd" and abs(layer - next_layer) == 1:
                spans["bwd"].append(then - at)
            elif phase == "opt":
                optimizer = then - at
        depth = 1 + max(layer for phase, layer, _ in self._begun if phase == "bwd")
        self._begun.clear()
        forward = statistics.fmean(spans["fwd"])
        # Behind the loss there is a step to the first tasklet of the backward, but no layer.
        backward = sum(spans["bwd"]) / (depth - 1)
        typical = statistics.median(spans["fwd"]) + statistics.median(spans["bwd"])
        return Layer(forward + backward, typical, max(0.0, first - forward) / depth, optimizer)


@dataclass(frozen=True, slots=True)
class Layer:
    """Figures of a layer of a step, in nanoseconds or launches.

    Attributes:
        both: forward and backward, means over the layers: what is around tasklets counts with it.
        typical: the same of the median layer.
        once: a layer's share of what the first layer of a step does for all: copies of the adapter.
        optimizer: norm of the gradient, clipping and AdamW, of the whole step.
    """

    both: float
    typical: float
    once: float
    optimizer: int


class Nobody:
    """Takes reports and gives no command (see `JobReporter`)."""

    def event(self, event: WorkerEvent) -> None:
        """Drop it."""

    def take_command(self) -> None:
        """Return none."""


def marked(stream: TaskletStream, marks: Marks, *, backward: str = "backward") -> None:
    """Have a stream note where its layers begin; a tasklet may have several of them.

    `backward`: the method of its stack that runs a layer back.
    """
    stack: Any = stream.parts.stack
    for phase, word in (("forward", "fwd"), (backward, "bwd")):
        run = getattr(stack, phase)

        def noted(
            at: Any, layer: int, *rest: Any, run: Any = run, word: str = word, **named: Any
        ) -> Any:
            marks.note(word, layer)
            return run(at, layer, *rest, **named)

        setattr(stack, phase, noted)
    head: Any = stream.parts.head
    loss = head.loss_and_gradient

    def of_loss(*rest: Any, **named: Any) -> Any:
        marks.note("up", stack.depth)
        made = loss(*rest, **named)
        marks.note("down", stack.depth)
        return made

    head.loss_and_gradient = of_loss
    optimizer: Any = stream._optimizer
    take = optimizer.step

    def of_step(number: int) -> Any:
        marks.note("opt", 0)
        made = take(number)
        marks.note("end", 0)
        return made

    optimizer.step = of_step


def standalone(
    session: TrainingSession, device: ComputeDevice, events: EventLog
) -> Callable[[], None]:
    """One optimizer step of the dedicated worker's loop."""
    stream, gate = session.stream, OpenGate(UNITS, device)
    memory = OwnMemory(stream, activation_budget=session.activation_budget)

    def step() -> None:
        begun = stream.position.step
        while stream.position.step == begun:
            memory.settle()
            tasklet = stream.peek()
            assert tasklet is not None
            memory.starving(tasklet)
            gate.launch(tasklet)
            stream.run(tasklet)
            gate.landed(tasklet)
        gate.quiet(None)
        for ran in gate.take_ran():
            events.append(tasklet_event(session, ran))
        events.flush()

    return step


def plain(loop: PlainLoop, marks: Marks) -> Callable[[], None]:
    """One step of plain PEFT, whose layers note their begin by hooks."""
    for layer, module in enumerate(loop._model.get_base_model().get_decoder().layers):

        def before(_: Any, args: Any, layer: int = layer) -> None:
            del args
            marks.note("fwd", layer)

        def after(_: Any, args: Any, out: Any, layer: int = layer) -> None:
            del args
            made: Tensor = out[0] if isinstance(out, tuple) else out
            made.register_hook(lambda _: marks.note("bwd", layer))  # type: ignore[no-untyped-call]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    clip, take = torch.nn.utils.clip_grad_norm_, loop._adamw.step

    def clipped(*given: Any) -> Tensor:
        marks.note("opt", 0)
        return clip(*given)

    def taken() -> None:
        take()
        marks.note("end", 0)

    torch.nn.utils.clip_grad_norm_ = clipped  # type: ignore[assignment]
    loop._adamw.step = taken  # type: ignore[method-assign, assignment]

    def step() -> None:
        loop.step()

    return step


def right_at_load() -> None:
    """Kernels compute nothing: what loading compares is taken to be right, and losses finite."""
    torch.allclose = lambda *_, **__: True
    torch.equal = lambda *_: True
    torch.isfinite = lambda _: torch.ones((), dtype=torch.bool)  # type: ignore[assignment]
    # Of positions and pads transformers learns so on a GPU: rows have one length, and stand alone.
    masking_utils.find_packed_sequence_indices = lambda _: None
    masking_utils.fast_all = lambda _: True
    capabilities.sees_before = lambda *_, **__: False
    value = queued.Reading.value
    queued.Reading.value = lambda self: value(self) * 0 + 1.0  # type: ignore[method-assign]


def job_of(folder: Path, rows: int, row_tokens: int, layers: int) -> JobSpec:
    """Write the model's shape, rows of equal length and a job without end; return the job."""
    shapes.SHAPES["measured"] = shapes.SHAPES["llama-3-8b"] | {"num_hidden_layers": layers}
    model = shapes.write_shape(folder / "model", "measured")
    text = "the quick brown fox jumps over the lazy dog " * (row_tokens // 40 + 2)
    (folder / "rows.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 16)
    spec = {
        "model": {"name": str(model)},
        "dataset": {
            "source": str(folder / "rows.jsonl"),
            "format": "text",
            "evalFraction": 0.0,
        },
        "adapter": {"lora": {"rank": 16, "alpha": 32, "targetModules": "all-linear"}},
        "training": {
            "maxSteps": 1_000_000,
            "batchSize": rows,
            "packing": False,  # as PEFT beside it
            "maxSequenceLength": row_tokens,
            "learningRate": "1e-4",
        },
        "checkpoint": {"everySteps": 1_000_000, "keep": 1},
        "output": {"destination": str(folder / "out")},
    }
    about = {"namespace": "default", "name": "host-cost", "uid": "host-cost", "epoch": EPOCH}
    (folder / "job.json").write_text(json.dumps({**about, "spec": spec}))
    return read_job(folder / "job.json")


def lent(folder: Path, layers: int) -> tuple[Arena, Arena]:
    """Decode that idles and has lent all of its arena, and the worker's side of it."""
    shape = {"layers": layers, "kv_heads": 8, "head_dim": 128, "dtype_bytes": 2}
    one = Geometry(**shape, block_bytes=_BLOCK, chunks=1, layout="token-major")
    geometry = Geometry(
        **shape, block_bytes=_BLOCK, chunks=_ARENA // one.chunk_bytes, layout="token-major"
    )
    decode = Arena.create(geometry, reserved_chunks=0, driver="cuda")
    decode.lend(geometry.chunks, owner=EPOCH)
    decode.serve(str(folder / "a.sock"))
    decode.page.beat(0)
    decode.page.publish_grant(Grant(Action.GO, UNITS, in_flight_bound_us=BOUND_US))
    return decode, Arena.attach(str(folder / "a.sock"))


def beside(
    decode: Arena, slot: WorkerSlot, job: JobSpec, events: EventLog, marks: Marks
) -> Iterator[Callable[[], None]]:
    """Yield one optimizer step beside idle decode with enough memory, and one that keeps half."""
    state = JobState()
    context = slot.take(job, state)
    session = context.session
    marked(session.stream, marks)
    ledger = Ledger(
        session, JobFolder(job.destination, job.uid, job.epoch), Nobody(), events, state
    )
    runner = Runner(session.stream, slot.gate, context.memory, ledger, Nobody(), state)
    planned: Any = session.stream.parts.stack.around_layer
    budget = session.activation_budget
    keep_for, graph = budget.keep_for, budget.parts(1 << 20)["graphs"] / (1 << 20)
    half = graph / session.stream.parts.stack.depth / 2
    chosen: list[bool] = [False]

    def keep(tokens: int) -> None:
        keep_for(tokens)
        if chosen[0]:
            planned.bytes_per_token = half

    session.stream._keep_for = keep
    for is_half in (False, True):

        def step(*, is_half: bool = is_half) -> None:
            chosen[0] = is_half
            session.stream.replan()
            begun = session.stream.position.step
            while session.stream.position.step == begun:
                decode.page.beat(0)
                runner.cycle()
            marks.planned = (
                0 if planned.bytes_per_token is None else session.stream.parts.stack.depth
            )

        yield step


def main() -> None:
    """Run the arms in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    options = parser.parse_args()
    right_at_load()
    job = job_of(options.folder, options.rows, options.row_tokens, options.layers)
    decode, arena = lent(options.folder, options.layers)
    ground = slot_device(arena, EPOCH, WholeDevice("finetune", 2))
    assert ground.memory is not None
    ground.memory.settle()
    ground.partition.activate(UNITS)
    directory = Path(job.spec.model.name)
    base: BaseModel = load_base(
        directory, form=WeightForm.of(job.spec), device=ground.device, random_weights=1
    )
    marks = Marks()
    events = EventLog(options.folder / "events.jsonl", source="dedicated")
    alone = open_alone(job, ground.device, shallow_clone(base))
    marked(alone.stream, marks)
    os.environ[ENV_LAYER_PROGRAM] = "packed"
    packed = open_alone(job, ground.device, shallow_clone(base))
    del os.environ[ENV_LAYER_PROGRAM]
    assert packed.stream.parts.stack.program == "packed", packed.notes
    marked(packed.stream, marks)
    os.environ[ENV_LAYER_PROGRAM] = "graphs"
    graphs = open_alone(job, ground.device, shallow_clone(base))
    del os.environ[ENV_LAYER_PROGRAM]
    assert graphs.stream.parts.stack.program == "graphs", graphs.notes
    marked(graphs.stream, marks, backward="backward_by_graphs")
    os.environ[ENV_LAYER_PROGRAM] = "compiled"
    compiled = open_alone(job, ground.device, shallow_clone(base))
    del os.environ[ENV_LAYER_PROGRAM]
    is_compiled = compiled.stream.parts.stack.program == "compiled"
    if is_compiled:
        marked(compiled.stream, marks)
    else:
        print(f"no arm of compiled layers: {compiled.program_why}")
    loop = PlainLoop(job, events, UNITS, ground.device, random_weights=1)
    slot = WorkerSlot(EPOCH, arena, ground, lambda _: base)
    whole, half = beside(decode, slot, job, events, marks)
    arms = {
        "standalone": standalone(alone, ground.device, events),
        "packed": standalone(packed, ground.device, events),
        "graphs": standalone(graphs, ground.device, events),
        "beside": whole,
        "beside-half": half,
        "peft": plain(loop, marks),
    }
    if is_compiled:
        arms["compiled"] = standalone(compiled, ground.device, events)
    settle_heap()
    found: dict[str, Any] = {
        arm: {"us": [], "once_us": [], "launches": 0.0, "optimizer": 0, "planned": 0}
        for arm in arms
    }
    for n in range(_WARM + options.rounds):
        marks.counts = n % _COUNTED == 0
        for arm, step in arms.items():
            step()
            layer = marks.of_layer()
            found[arm]["planned"], marks.planned = marks.planned, 0
            if marks.counts:
                found[arm]["launches"] = layer.typical
                found[arm]["optimizer"] = layer.optimizer
            elif n >= _WARM:
                found[arm]["us"].append(layer.both / 1e3)
                found[arm]["once_us"].append(layer.once / 1e3)
    (options.folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
