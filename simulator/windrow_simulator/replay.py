"""Hold the simulator against a real run: the same requests, profile and policy, side by side.

The time of a run's load (`windrow demo --out`) is cut into stretches of some seconds. Of every
second one the simulator learns what no profile says: noise at about that moment, what a worker
costs a step, how fast the worker is beside decode. All are simulated, and the other ones compared;
nothing of them is used. What the worker did is counted by tasklets, each worth the tokens that its
kind makes on the whole device: optimizer steps are too few for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from windrow.errors import UserError
from windrow.eventlog import RequestEvent, StepEvent, TaskletEvent, read_events
from windrow_lab.figures.summary import (
    DEDICATED,
    PODS,
    Events,
    SummaryWindow,
    throughput,
    window_of,
)
from windrow_simulator.arena import ArenaGeometry
from windrow_simulator.decode import SECOND_NS
from windrow_simulator.figures import SlotFigures
from windrow_simulator.scenario import (
    ScenarioParts,
    SimulationSettings,
    levels_of,
    read_profile,
    terms_for,
)
from windrow_simulator.traffic import DecodeRequest, Traffic
from windrow_simulator.truth import MeasuredTruth, Residuals, Worker
from windrow_simulator.worker import WorkerMemory

PROFILE_FILE = "profile.json"
# Longer than a decision is kept and a pause of the guard, shorter than what else a machine does.
STRETCH_NS = 6_000_000_000
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
        """True where the difference is within the goal."""
        return self.difference <= self.goal


class TaskletWorth:
    """Tokens that a finished tasklet is worth, by what its phase took on the whole device.

    Raises:
        UserError: the dedicated worker finished no optimizer step between two others.
    """

    def __init__(self, dedicated: Sequence[TaskletEvent]) -> None:
        ends = [t for t in dedicated if t.phase == "opt"]
        begin, end = (ends[0], ends[-1]) if ends else (None, None)
        took_ns: dict[str, int] = {}
        tokens: dict[str, int] = {}
        within: list[TaskletEvent] = []
        if begin is not None and end is not None:
            within = [t for t in dedicated if begin.end_ns < t.end_ns <= end.end_ns and t.tokens]
        if begin is None or end is None or not within or end.tokens_done <= begin.tokens_done:
            raise UserError(
                "its dedicated worker finished no two steps",
                field="--run",
                remedy="Run the demo for longer: --seconds 60.",
            )
        for t in within:
            took_ns[t.phase] = took_ns.get(t.phase, 0) + t.end_ns - t.start_ns
            tokens[t.phase] = tokens.get(t.phase, 0) + t.tokens
        made = end.tokens_done - begin.tokens_done
        each = made / sum(took_ns.values())
        self._of = {phase: each * ns / tokens[phase] for phase, ns in took_ns.items()}

    def tokens(self, tasklets: Iterable[TaskletEvent]) -> float:
        """Return the tokens of all tasklets together."""
        return sum(self._of.get(t.phase, 0.0) * t.tokens for t in tasklets)


@dataclass(frozen=True, slots=True)
class Run:
    """Run as a folder records it."""

    folder: Path
    window: SummaryWindow
    profile: dict[str, Any]
    policy: str
    dedicated_per_second: float
    worth: TaskletWorth
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
        alone = Events.read(folder / DEDICATED).tasklets
        requests: dict[str, list[RequestEvent]] = {}
        for source, event in read_events(folder / PODS):
            if isinstance(event, RequestEvent) and window.holds(event.arrived_ns):
                requests.setdefault(source, []).append(event)
        return cls(
            folder,
            window,
            read_profile(folder / PROFILE_FILE),
            said["run"]["policy"],
            throughput(alone).tokens_per_second,
            TaskletWorth(alone),
            Events.read(folder / PODS),
            requests,
        )

    def stretches(self, *, judged: bool) -> list[tuple[int, int]]:
        """Begin and end of those that are judged, or learned from; in nanoseconds, in order."""
        begin_ns, end_ns = self.window.begin_ns, self.window.end_ns
        cuts = [*range(begin_ns, end_ns, STRETCH_NS), end_ns]
        return list(pairwise(cuts))[judged::2]

    def seconds(self, *, judged: bool) -> float:
        """Return the seconds of all tasklets together."""
        return sum(end - begin for begin, end in self.stretches(judged=judged)) / 1e9

    def steps(self, *, judged: bool) -> list[StepEvent]:
        """Steps that ended in a stretch of that kind."""
        return [s for _, s in self.events.steps if self._is_judged(s.end_ns) is judged]

    def tasklets(self, *, judged: bool) -> list[TaskletEvent]:
        """Tasklets that ended in a stretch of that kind."""
        return [t for t in self.events.tasklets if self._is_judged(t.end_ns) is judged]

    def _is_judged(self, at_ns: int) -> bool | None:
        """Return whether a moment is judged; None: before or after the load."""
        if not self.window.begin_ns < at_ns <= self.window.end_ns:
            return None
        return (at_ns - self.window.begin_ns - 1) // STRETCH_NS % 2 == 1


def replay(folder: Path, *, seed: int = 7, repeats: int = 5) -> dict[str, Any]:
    """Simulate a run and return the figures of the judged stretches beside the measured ones.

    `repeats`: seeds, whose median counts.

    Raises:
        UserError: the folder holds no run that could be compared.
    """
    run = Run.read(folder)
    units = max(int(row["units"]) for row in run.profile["solo"])
    truth, residuals, learned = _learn(run, units)
    ground = _ground(run, truth, residuals, units, seed)
    judged = run.steps(judged=True)
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
        "seconds": run.seconds(judged=True),
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
    seconds = run.seconds(judged=True)
    rate = run.worth.tokens(run.tasklets(judged=True)) / seconds
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
    """Return the truth that the stretches show that are learned from."""
    bare = MeasuredTruth(run.profile, units, Worker(run.dedicated_per_second, {}))
    # Before the load nobody finetunes: what steps are alone.
    warm_up = [s for _, s in run.events.steps if s.end_ns <= run.window.begin_ns]
    early = [*warm_up, *run.steps(judged=False)]
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
    kinds: dict[tuple[bool, bool], list[tuple[int, float]]] = {}
    for s, r in ratios:
        at_ns = SECOND_NS + s.start_ns - run.window.begin_ns
        kinds.setdefault((s.admitted > 0, s.finetune_units > 0), []).append((at_ns, r))
    alone, beside, new, new_beside = (
        sorted(kinds.get((admitted, harvested), ()))
        for admitted in (False, True)
        for harvested in (False, True)
    )
    if len(alone) < LEAST_STEPS or len(beside) < LEAST_STEPS:
        raise UserError(
            f"{len(alone)} steps alone and {len(beside)} beside a worker are too few to learn from",
            field="--run",
            remedy="Run the demo for longer: --seconds 60.",
        )
    residuals = Residuals(
        alone=_ratios(alone),
        beside=_ratios(beside),
        admitting=_ratios(new),
        admitting_beside=_ratios(new_beside),
        moments_ns=tuple(
            tuple(at_ns for at_ns, _ in kind) for kind in (alone, beside, new, new_beside)
        ),
    )
    worker = _worker(run, units)
    learned = {
        "steps": len(ratios),
        "alone": median(residuals.alone),
        "beside": median(residuals.beside),
        "tokens_per_second_beside": dict(worker.beside),
        "dedicated": worker.dedicated,
    }
    return MeasuredTruth(run.profile, units, worker), residuals, learned


def _ratios(kind: list[tuple[int, float]]) -> tuple[float, ...]:
    return tuple(ratio for _, ratio in kind)


def _worker(run: Run, units: int) -> Worker:
    """Return the rates: beside decode what tasklets were worth in the time that was granted.

    On the idle device the dedicated one.
    """
    granted_s: dict[int, float] = {}
    for s in run.steps(judged=False):
        if n := s.finetune_units:
            granted_s[n] = granted_s.get(n, 0.0) + (s.end_ns - s.start_ns) / 1e9
    made: dict[int, float] = {}
    for t in run.tasklets(judged=False):
        made[t.units] = made.get(t.units, 0.0) + run.worth.tokens([t])
    unit_s = sum(n * s for n, s in granted_s.items())
    each = sum(made.get(n, 0.0) for n in granted_s) / unit_s if unit_s else 0.0
    rates = {n: each * n for n in range(1, units + 1)}
    return Worker(run.dedicated_per_second, rates, {units: run.dedicated_per_second})


def _ground(
    run: Run, truth: MeasuredTruth, residuals: Residuals, units: int, seed: int
) -> ScenarioParts:
    return ScenarioParts(
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


def _simulate(run: Run, ground: ScenarioParts, seed: int) -> dict[str, float]:
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
        for begin_ns, end_ns in run.stretches(judged=True):
            slot.run_until(SECOND_NS + begin_ns - run.window.begin_ns)
            slot.figures.begin()
            slot.run_until(SECOND_NS + end_ns - run.window.begin_ns)
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
