"""Hold the simulator against a real run: the same requests, profile and policy, side by side.

A run's folder (`windrow demo --out`) is cut in two. Of the first part, and of its warm-up, the
simulator learns what no profile says: noise, what a worker costs a step, how fast the worker is
beside decode. The second part is simulated and compared; nothing of it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from windrow.errors import UserError
from windrow.eventlog import RequestEvent, StepEvent, read_events
from windrow.local.summary import DEDICATED, PODS, Events, SummaryWindow, throughput, window_of
from windrow_simulator.arena import ArenaGeometry
from windrow_simulator.decode import SECOND_NS, DecodeRequest
from windrow_simulator.figures import SlotFigures
from windrow_simulator.scenario import (
    Ground,
    SimulationSettings,
    levels_of,
    read_profile,
    terms_for,
)
from windrow_simulator.traffic import Traffic
from windrow_simulator.truth import MeasuredTruth, Residuals, Worker
from windrow_simulator.worker import WorkerMemory

PROFILE_FILE = "profile.json"
LEARNED = 0.4  # of the load's time; the rest is judged
# A p99 needs two steps beyond it at least.
LEAST_STEPS = 200


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of the run and of the simulation."""

    name: str
    measured: float
    simulated: float
    goal: float  # largest relative difference

    @property
    def difference(self) -> float:
        """Relative to what was measured."""
        return abs(self.simulated - self.measured) / self.measured if self.measured else math.nan

    @property
    def met(self) -> bool:
        """Whether the difference is within the goal."""
        return self.difference <= self.goal


@dataclass(frozen=True, slots=True)
class Run:
    """What a folder says of a run, cut at `cut_ns`."""

    folder: Path
    window: SummaryWindow
    cut_ns: int
    profile: dict[str, Any]
    policy: str
    dedicated_per_second: float
    events: Events
    requests: dict[str, list[RequestEvent]]  # by pod

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read a folder.

        Raises:
            UserError: it is no folder of a run that has ended, or has no profile.
        """
        summary = folder / "summary.json"
        if not summary.is_file() or not (folder / PROFILE_FILE).is_file():
            raise UserError(
                f"{folder} holds no summary.json and {PROFILE_FILE}",
                field="--run",
                remedy="Give the folder of a `windrow demo` that has ended.",
            )
        said = json.loads(summary.read_text(encoding="utf-8"))
        window = window_of(Events.of((s, e) for s, e in read_events(folder) if s == "run").marks)
        length = window.end_ns - window.begin_ns
        dedicated = throughput(Events.read(folder / DEDICATED).tasklets)
        requests: dict[str, list[RequestEvent]] = {}
        for source, event in read_events(folder / PODS):
            if isinstance(event, RequestEvent) and window.holds(event.arrived_ns):
                requests.setdefault(source, []).append(event)
        return cls(
            folder,
            window,
            window.begin_ns + int(LEARNED * length),
            read_profile(folder / PROFILE_FILE),
            said["run"]["policy"],
            dedicated.tokens_per_second,
            Events.read(folder / PODS),
            requests,
        )

    def steps(self, begin_ns: int, end_ns: int) -> list[StepEvent]:
        """Steps that ended in a stretch."""
        return [s for _, s in self.events.steps if begin_ns < s.end_ns <= end_ns]

    def tokens_per_second(self, begin_ns: int, end_ns: int) -> float:
        """Of the worker, between its first and last optimizer step of a stretch."""
        window = SummaryWindow(begin_ns, end_ns, self.window.objective_ms, end_ns)
        return throughput(self.events.tasklets, window).tokens_per_second


def replay(folder: Path, *, seed: int = 7, repeats: int = 5) -> dict[str, Any]:
    """Simulate the second part of a run and return its figures beside the measured ones.

    `repeats`: seeds, whose median counts.

    Raises:
        UserError: the folder holds no run that could be compared.
    """
    run = Run.read(folder)
    units = max(int(row["units"]) for row in run.profile["solo"])
    truth, residuals, learned = _learn(run, units)
    ground = _ground(run, truth, residuals, units, seed)
    judged = run.steps(run.cut_ns, run.window.end_ns)
    if len(judged) < LEAST_STEPS:
        raise UserError(
            f"{len(judged)} steps are too few to compare",
            field="--run",
            remedy="Run the demo for longer: --seconds 60.",
        )
    simulated = [_simulate(run, ground, seed + i) for i in range(repeats)]
    figures = {name: median(each[name] for each in simulated) for name in simulated[0]}
    measured = _measured(run, judged)
    goals = {"eta": 0.1, "TPOT p50 ms": 0.1, "TPOT p99 ms": 0.2}
    rows = [Compared(name, measured[name], figures[name], goal) for name, goal in goals.items()]
    return {
        "run": str(folder),
        "policy": run.policy,
        "objective_ms": run.window.objective_ms,
        "seconds": (run.window.end_ns - run.cut_ns) / 1e9,
        "steps": len(judged),
        "learned": learned,
        "compared": [
            {
                "name": row.name,
                "measured": row.measured,
                "simulated": row.simulated,
                "difference": row.difference,
                "goal": row.goal,
                "met": row.met,
            }
            for row in rows
        ],
        "besides": {
            name: {"measured": measured[name], "simulated": figures[name]}
            for name in measured
            if name not in goals
        },
    }


def _measured(run: Run, steps: Sequence[StepEvent]) -> dict[str, float]:
    ms = sorted((s.end_ns - s.start_ns) / 1e6 for s in steps)
    busy_ms = sum(ms)
    seconds = (run.window.end_ns - run.cut_ns) / 1e9
    rate = run.tokens_per_second(run.cut_ns, run.window.end_ns)
    return {
        "eta": rate / run.dedicated_per_second,
        "TPOT p50 ms": ms[len(ms) // 2],
        "TPOT p99 ms": ms[min(len(ms) - 1, int(0.99 * len(ms)))],
        "over objective": sum(m > run.window.objective_ms for m in ms) / len(ms),
        "busy": busy_ms / 1e3 / seconds,
        "batch": sum(s.batch * (s.end_ns - s.start_ns) for s in steps) / 1e6 / busy_ms,
        "beside a worker": sum(s.finetune_units > 0 for s in steps) / len(steps),
    }


def _learn(run: Run, units: int) -> tuple[MeasuredTruth, Residuals, dict[str, Any]]:
    """Return the truth that the first part of the run shows."""
    bare = MeasuredTruth(run.profile, units, Worker(run.dedicated_per_second, {}))
    early = run.steps(0, run.cut_ns)
    ratios = [
        (
            s,
            (s.end_ns - s.start_ns)
            / 1e3
            / bare.step_us(s.batch, s.context_tokens, s.decode_units, 0),
        )
        for s in early
        if s.batch and not s.prefill_tokens and s.decode_units
    ]
    alone = [r for s, r in ratios if not s.finetune_units and not s.admitted]
    beside = [r for s, r in ratios if s.finetune_units and not s.admitted]
    if len(alone) < LEAST_STEPS or len(beside) < LEAST_STEPS:
        raise UserError(
            f"{len(alone)} steps alone and {len(beside)} beside a worker are too few to learn from",
            field="--run",
            remedy="Run the demo for longer: --seconds 60.",
        )
    residuals = Residuals(
        alone=tuple(alone),
        beside=tuple(beside),
        admitting=tuple(r for s, r in ratios if not s.finetune_units and s.admitted) or (1.0,),
        admitting_beside=tuple(r for s, r in ratios if s.finetune_units and s.admitted) or (1.0,),
    )
    worker = _worker(run, units)
    learned = {
        "steps": len(ratios),
        "alone": median(alone),
        "beside": median(beside),
        "tokens_per_second_beside": dict(worker.beside),
        "dedicated": worker.dedicated,
    }
    return MeasuredTruth(run.profile, units, worker), residuals, learned


def _worker(run: Run, units: int) -> Worker:
    """Return the rates: on the idle device the dedicated one, beside decode what is left."""
    begin_ns, end_ns = run.window.begin_ns, run.cut_ns
    steps = run.steps(begin_ns, end_ns)
    rate = run.tokens_per_second(begin_ns, end_ns)
    busy_s = sum(s.end_ns - s.start_ns for s in steps) / 1e9
    beside: dict[int, float] = {}
    for s in steps:
        if s.finetune_units:
            beside[s.finetune_units] = (
                beside.get(s.finetune_units, 0.0) + (s.end_ns - s.start_ns) / 1e9
            )
    seconds = (end_ns - begin_ns) / 1e9
    idle_s = max(0.0, seconds - busy_s)
    made = max(0.0, rate * seconds - run.dedicated_per_second * idle_s)
    unit_s = sum(n * s for n, s in beside.items())
    each = made / unit_s if unit_s else 0.0
    rates = {n: each * n for n in range(1, units + 1)}
    return Worker(run.dedicated_per_second, rates, {units: run.dedicated_per_second})


def _ground(run: Run, truth: MeasuredTruth, residuals: Residuals, units: int, seed: int) -> Ground:
    return Ground(
        settings=SimulationSettings(
            gpus=1, policy=run.policy, objectives_ms=(run.window.objective_ms,), seed=seed
        ),
        levels=levels_of(run.profile, units),
        profile=run.profile,
        truth=truth,
        geometry=ArenaGeometry(4096, 1 << 21, 512, 8),
        memory=WorkerMemory(),
        traffic=Traffic((), 1.0),
        layers=8,
        price=0.0,
        device=str(run.profile["device"]),
        source=f"run {run.folder}",
        residuals=residuals,
    )


def _simulate(run: Run, ground: Ground, seed: int) -> dict[str, float]:
    """Play the requests of the whole load through as many GPUs as there were pods."""
    total = SlotFigures(run.window.objective_ms * 1e3)
    for index, source in enumerate(sorted(run.requests)):
        slot = ground.slot(seed + 31 * index, run.window.objective_ms)
        slot.set_terms(terms_for(ground.settings, run.policy, run.window.objective_ms))
        for number, request in enumerate(run.requests[source]):
            at_ns = SECOND_NS + request.arrived_ns - run.window.begin_ns
            slot.submit(
                DecodeRequest(
                    at_ns, at_ns, request.prompt_tokens, request.completion_tokens, number
                )
            )
        slot.run_until(SECOND_NS + run.cut_ns - run.window.begin_ns)
        slot.figures.begin()
        slot.run_until(SECOND_NS + run.window.end_ns - run.window.begin_ns)
        total.add(slot.figures)
    return {
        "eta": total.finetune_tokens / total.seconds / run.dedicated_per_second,
        "TPOT p50 ms": total.tpot.quantile(0.5) / 1e3,
        "TPOT p99 ms": total.tpot.quantile(0.99) / 1e3,
        "over objective": total.over / total.steps,
        "busy": total.busy_us / 1e6 / total.seconds,
        "batch": total.batch_us / total.busy_us,
        "beside a worker": total.harvested_steps / total.steps,
    }
