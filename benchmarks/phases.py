"""Effect of a training phase on decode: does a step beside a worker take longer in one?

Decode on one of two cores, at points of batch and context, in turns alone, beside a trainer on the
other core (whose log says what it ran during each step), and beside an optimizer's step of an
adapter of rank 16 of an 8B model, over and over: that is bandwidth, where layers are products. A
stretch is a step's latency over that of the same point alone, in the same round. Two ways of
predicting it are held against each other on points that they were not fitted on: one factor for
everything, as stage 2 of the predictor has (its b1 and k1 are one number where there is one share),
and a factor for each phase.
Example: python -m benchmarks.phases --json /tmp/phases.json
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, write
from benchmarks.light.processes import Decode
from benchmarks.light.trainers import Trainer, at_work, decoding, share_within, two_cores
from windrow.eventlog import TaskletEvent
from windrow_lab.machine.devices import on_cpus

POINTS = tuple((batch, context) for context in (512, 2048) for batch in (4, 16, 32))
ROUNDS, SECONDS, GENERATED = 4, 1.5, 64
ARENA_BYTES = 512 << 20
FORWARD, LOSS, BACKWARD, OPTIMIZER = "forward", "loss", "backward", "optimizer"
WORDS = {"fwd": FORWARD, "loss": LOSS, "bwd": BACKWARD}
# A step counts for a phase that had so much of its time.
PURE, FEWEST_STEPS = 0.9, 5
# An adapter of rank 16 on all linears of a layer of 4096: 1.3 million parameters, eight layers.
_ELEMENTS, _TENSORS = 1 << 17, 80

Cell = tuple[tuple[int, int], str]  # point and phase


@dataclass(frozen=True)
class Step:
    """A decode step beside a worker: how many times as long as alone, and what ran at its begin."""

    point: tuple[int, int]
    round: int
    stretch: float
    phase: str  # that ran as it began
    pure: bool  # whether that had nearly all of its time


def main() -> None:
    """Measure and compare; or, with `--optimizer`, be the load."""
    parser = arguments(__doc__)
    parser.add_argument("--optimizer", action="store_true", help="step an optimizer for ever")
    options = parser.parse_args()
    if options.optimizer:
        _step_for_ever()
    cores, env = two_cores(), environment()
    batches = max(batch for batch, _ in POINTS)
    with decoding(arena_bytes=ARENA_BYTES, max_batch=batches) as (plan, decode, ends):
        trainer = Trainer(plan, "trainer", cores[1:], 1)
        ends.callback(trainer.close)
        trainer.await_first_step()
        optimizer = _OptimizerLoad(cores[1])
        ends.callback(optimizer.close)
        steps = _measured(decode, trainer, optimizer, 1 if options.quick else ROUNDS)
    write("phases", figures(steps), env, options.json)


def _measured(
    decode: Decode, trainer: Trainer, optimizer: _OptimizerLoad, rounds: int
) -> list[Step]:
    beside: list[tuple[tuple[int, int], int, float, dict[str, Any]]] = []
    steps: list[Step] = []
    for number in range(rounds):
        for point in POINTS if number % 2 else POINTS[::-1]:
            alone_us = statistics.median(_run(decode, point)["latencies_us"])
            with at_work([trainer]):
                beside.append((point, number, alone_us, _run(decode, point)))
            with at_work([optimizer]):
                found = _run(decode, point)
            steps += [
                Step(point, number, us / alone_us, OPTIMIZER, pure=True)
                for us in found["latencies_us"]
            ]
    tasklets = trainer.all_tasklets()
    for point, number, alone_us, found in beside:
        steps += _overlaid(tasklets, point, number, alone_us, found)
    return steps


def _run(decode: Decode, point: tuple[int, int]) -> dict[str, Any]:
    batch, context = point
    fixed = {"batch": batch, "context": context, "generated": GENERATED}
    return decode.run(do="run", arm="alone", units=1, seconds=SECONDS, **fixed)


def _overlaid(
    tasklets: Sequence[TaskletEvent],
    point: tuple[int, int],
    number: int,
    alone_us: float,
    found: Mapping[str, Any],
) -> Iterator[Step]:
    """Say of each step what ran as it began, and whether that was all."""
    ends = [tasklet.end_ns for tasklet in tasklets]
    for end_ns, us in zip(found["ends_ns"], found["latencies_us"], strict=True):
        begin_ns = end_ns - round(us * 1000)
        ran: dict[str, float] = defaultdict(float)
        at = first = bisect_left(ends, begin_ns)
        while at < len(tasklets) and tasklets[at].start_ns < end_ns:
            one = tasklets[at]
            ran[one.phase] += share_within(one, begin_ns, end_ns) * (one.end_ns - one.start_ns)
            at += 1
        if first < len(tasklets) and tasklets[first].phase in WORDS:
            phase = tasklets[first].phase
            pure = ran[phase] > PURE * (end_ns - begin_ns)
            yield Step(point, number, us / alone_us, WORDS[phase], pure)


def figures(steps: Sequence[Step]) -> list[Result]:
    """Stretches by phase, and errors of both ways of predicting them on points not fitted on."""
    cells = _cells([step for step in steps if step.pure])
    results = []
    for phase in (FORWARD, LOSS, BACKWARD, OPTIMIZER):
        of_phase = {point: value for (point, kind), value in cells.items() if kind == phase}
        for point, stretch in sorted(of_phase.items()):
            name = f"step beside {phase}, batch {point[0]} x {point[1]} tokens"
            results.append(Result(name, round(stretch, 3), "ratio", "lower"))
        if of_phase:
            name = f"step beside {phase}, all points, median"
            value = round(statistics.median(of_phase.values()), 3)
            results.append(Result(name, value, "ratio", "lower"))
    noise = _noise(steps)
    trained = [step for step in steps if step.phase != OPTIMIZER]
    for what, of_steps in (("of a worker", trained), ("with a large optimizer", steps)):
        one, apart = _held_out(of_steps)
        results += _errors(f"held-out error {what}", one, apart, noise)
    return results


def _errors(name: str, one: Sequence[float], apart: Sequence[float], noise: float) -> list[Result]:
    floor = Baseline("the same cell in the other half of the rounds", round(noise, 2))
    return [
        Result(
            f"{name}: one factor", round(statistics.median(one), 2), "%", "lower", None, None, floor
        ),
        Result(
            f"{name}: a factor for each phase",
            round(statistics.median(apart), 2),
            "%",
            "lower",
            round(statistics.median(one), 2),
            None,
            floor,
        ),
    ]


def _cells(steps: Sequence[Step]) -> dict[Cell, float]:
    """Median stretch by point and phase."""
    found: dict[Cell, list[float]] = defaultdict(list)
    for step in steps:
        found[step.point, step.phase].append(step.stretch)
    return {
        cell: statistics.median(values)
        for cell, values in found.items()
        if len(values) >= FEWEST_STEPS
    }


def _held_out(steps: Sequence[Step]) -> tuple[list[float], list[float]]:
    """Errors in percent, cell by cell, of factors of all other points: one, and one a phase.

    By the phase that ran as a step began: that is all that a prediction can know.
    """
    cells, one, apart = _cells(steps), [], []
    for (point, phase), measured in cells.items():
        others = {cell: value for cell, value in cells.items() if cell[0] != point}
        of_phase = [value for cell, value in others.items() if cell[1] == phase]
        if not of_phase:
            continue
        # Phases count by how many steps begin in them, as they would for least squares.
        weight = {kind: sum(step.phase == kind for step in steps) for kind in set(WORDS.values())}
        weight[OPTIMIZER] = max(weight.values())
        total = sum(weight[cell[1]] for cell in others)
        of_all = sum(weight[cell[1]] * value for cell, value in others.items()) / total
        one.append(100 * abs(of_all - measured) / measured)
        apart.append(100 * abs(statistics.fmean(of_phase) - measured) / measured)
    return one, apart


def _noise(steps: Sequence[Step]) -> float:
    """Return the noise: distance of cells of even rounds from odd ones, percent; median."""
    even, odd = (_cells([s for s in steps if s.round % 2 == half]) for half in (0, 1))
    both = [100 * abs(even[cell] / odd[cell] - 1) for cell in even if cell in odd]
    return statistics.median(both) if both else 0.0


class _OptimizerLoad:
    """An optimizer that steps on one core, in the idle class; stopped until it has its turn."""

    def __init__(self, core: int) -> None:
        command = [sys.executable, "-m", "windrow_sidecar.agent.spawn", str(os.getpid()), "--"]
        command += [sys.executable, "-m", "benchmarks.phases", "--optimizer"]
        with on_cpus([core]):
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            sys.exit(f"the optimizer's load ended with {self._process.wait()}")
        self.stop()

    def go(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _step_for_ever() -> NoReturn:
    import torch

    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.randn(_ELEMENTS)) for _ in range(_TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.randn(_ELEMENTS)
    adamw = torch.optim.AdamW(parameters, fused=True)
    adamw.step()
    print("ready", flush=True)
    while True:
        adamw.step()


if __name__ == "__main__":
    main()
