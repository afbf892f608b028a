"""Time for which a checkpoint holds the stream, at the size of a rank-16 adapter of 8B.

A stream of short tasklets runs on one core while checkpoints of 503 MB are copied, written, synced
and hashed on whatever core is free. What counts is the longest time by which anything that the
stream does (a tasklet, a commit, the optimizer's step, the beginning of the checkpoint) took longer
than it takes without one: waits for copies, for Python's lock and for page faults are all in it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.engine.shapes import RANK, adapter_parameters, stepped_optimizer
from benchmarks.harness import Baseline, Result, middle
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.finetune.training.checkpoint import JobFolder, Position
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.checkpoint_writer import CheckpointWriter
from windrow_sidecar.heap import settle_heap

GOAL_MS = 50.0
# A tasklet takes some milliseconds; a micro-batch has so many of them, a step two micro-batches.
WIDE, TASKLETS = 512, 200
Times = Mapping[str, list[float]]


class _Job:
    """The stream of a job over the adapter, each of its acts timed, and its checkpoints."""

    def __init__(self, folder: Path, device: ComputeDevice) -> None:
        self._device, at = device, device.torch
        self._parameters = adapter_parameters(at)
        self._optimizer = stepped_optimizer(self._parameters)
        self._gradients = {n: torch.full_like(p, 0.0) for n, p in self._parameters.items()}
        self._operands = torch.randn(2, WIDE, WIDE, device=at)
        self._product = torch.empty(WIDE, WIDE, device=at)
        self._steps = 1
        home = JobFolder(folder, "holding", 1)
        home.claim()
        self.writer = CheckpointWriter(home, Origin(), keep=1, saved=lambda _: None)

    def tasklet(self) -> None:
        """A bit of a layer."""
        torch.mm(*self._operands, out=self._product)

    def commit(self) -> None:
        """The gradients of a micro-batch, which are there already, join the sum."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._gradients[name]
        self._optimizer.commit()

    def step(self) -> None:
        """The optimizer's."""
        self._optimizer.step(self._steps)
        self._steps += 1

    def begin(self) -> None:
        """A checkpoint, meanwhile."""
        self.writer.begin(Position(self._steps), self._optimizer.snapshot())

    def ms(self, act: Callable[[], None]) -> float:
        """Milliseconds of one of these, until the device is through with it."""
        began = time.perf_counter()
        act()
        self._device.mark().wait()
        return (time.perf_counter() - began) * 1e3

    def copied_at_once(self) -> None:
        """Copy what a checkpoint holds to memory that exists already."""
        taken = self._optimizer.snapshot()
        taken.take()
        taken.release()


def holding(*, rounds: int, device: ComputeDevice) -> list[Result]:
    """Measure after a step, where they are begun; and where the next step follows at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _holding(_Job(Path(folder), device), rounds)
    finally:
        torch.set_num_threads(threads)


def _holding(job: _Job, rounds: int) -> list[Result]:
    _step_of(job)
    settle_heap()
    quiet = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        for act, times in _step_of(job).items():
            quiet[act] += times
    usual = {act: statistics.median(times) for act, times in quiet.items()}
    held: list[float] = []
    written: list[float] = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        took = {"begin": [job.ms(job.begin)]} | _step_of(job)
        job.writer.settle(wait=True)
        written.append(time.perf_counter() - began)
        held.append(_longest(took, usual))
    at_once = []
    for _ in range(rounds + 1):
        job.commit()
        at_once.append(job.ms(job.begin) + job.ms(job.step) - usual["step"])
        job.writer.settle(wait=True)
    copies = [job.ms(job.copied_at_once) for _ in range(rounds)]
    copy = Baseline("one core copies all of it, ms", middle(copies)[0])
    name = f"stream held by a checkpoint, rank {RANK} of an 8B shape"
    return [
        _result(f"{name}: a job's first", held[:1], copy),
        _result(f"{name}: later ones", held[1:], copy),
        # No goal: steps shorter than the copy are not those of an 8B model.
        _result(f"{name}: the optimizer steps at once", at_once[1:], copy, goal=None),
        Result(f"{name}: until it is whole", middle(written[1:])[0], "s", "lower"),
    ]


def _result(
    name: str, held_ms: list[float], copy: Baseline, goal: float | None = GOAL_MS
) -> Result:
    value, spread = middle(held_ms)
    return Result(name, value, "ms", "lower", goal, spread, copy)


def _step_of(job: _Job) -> dict[str, list[float]]:
    """Run one; milliseconds of each act."""
    took: dict[str, list[float]] = {"tasklet": [], "commit": [], "add": []}
    for commit in ("commit", "add"):  # the second one adds to the sums of the first
        took["tasklet"] += [job.ms(job.tasklet) for _ in range(TASKLETS)]
        took[commit].append(job.ms(job.commit))
    return took | {"step": [job.ms(job.step)]}


def _longest(times: Times, usual: Mapping[str, float]) -> float:
    """The longest time by which an act took longer than it does without a checkpoint."""
    return max(max(took) - usual.get(act, 0.0) for act, took in times.items())
