"""Run a simulation: cells of decode GPUs on all processes, one policy after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context
from typing import Any

from windrow_lab.load.generator import generate
from windrow_lab.load.trace import TraceRequest
from windrow_simulator.agent import JobTimes
from windrow_simulator.cluster import JobQueue
from windrow_simulator.decode import SECOND_NS, DecodeGpu
from windrow_simulator.figures import JobFigures, PolicyFigures, SlotFigures, add_up
from windrow_simulator.scenario import (
    ALONE,
    CELL_GPUS,
    NAIVE,
    ScenarioParts,
    SimulationSettings,
    terms_for,
)
from windrow_simulator.traffic import (
    Arrival,
    DecodeRequest,
    PrefillPool,
    dealt,
    job_arrivals,
    prefill_gpus,
)

EPOCH_S = 5.0  # arrivals are handed to the GPUs for so long at a time
TURN_S = 1.0  # the operator looks after its jobs so often


@dataclass(frozen=True, slots=True)
class CellResult:
    """Result of a cell."""

    slots: list[SlotFigures]
    trips: int
    breaks: int
    prefill_busy: float


class Cell:
    """Decode GPUs that share a prefill pool and a router."""

    def __init__(
        self, ground: ScenarioParts, policy: str, objective_ms: float, number: int, gpus: int
    ) -> None:
        settings = ground.settings
        self._ground, self._gpus = ground, gpus
        seed = settings.seed * 1_000_003 + number * 1009
        self.slots = [ground.slot(seed + 7 * i, objective_ms, policy) for i in range(gpus)]
        terms = terms_for(settings, policy, objective_ms)
        for slot in self.slots:
            slot.set_terms(terms)
        self._until_s = settings.warm_up + settings.seconds
        # Every second cell has the surge: the other ones have room for what gives way to it.
        self._surge = settings.surge if number % 2 else 1.0
        elsewhere = None if settings.aggregated else ground.prefill
        self.pool = PrefillPool(elsewhere, prefill_size(ground, gpus, self._surge))
        self._arrivals = self._coming(seed)
        self._next: Arrival | None = next(self._arrivals, None)
        self._number = 0
        if settings.batch:
            for slot in self.slots:
                _fill(slot, settings)

    def _coming(self, seed: int) -> Iterator[Arrival]:
        settings = self._ground.settings
        if settings.batch:
            return iter(())
        traffic = self._ground.traffic
        arrivals = traffic.arrivals(self._gpus, self._until_s, seed, self._surge)
        return dealt(arrivals, self.pool, self._gpus)

    def run(self) -> CellResult:
        """Simulate warm-up and measurement."""
        settings, at_s = self._ground.settings, 0.0
        for until_s in (settings.warm_up, self._until_s):
            while at_s < until_s:
                at_s = min(until_s, at_s + EPOCH_S)
                self.advance(at_s)
            if until_s == settings.warm_up:
                self.begin()
        return self.result()

    def begin(self) -> None:
        """The warm-up is over."""
        for slot in self.slots:
            slot.figures.begin()

    def result(self) -> CellResult:
        """Return what it did. Raises InvariantBroken where chunks and tokens do not add up."""
        for slot in self.slots:
            slot.check()
        guards = [slot.hook.controller.guard for slot in self.slots]
        return CellResult(
            [slot.figures for slot in self.slots],
            sum(guard.trips for guard in guards),
            sum(bool(guard.reason) for guard in guards),
            self.pool.busy_s,
        )

    def advance(self, at_s: float) -> None:
        """Hand out what comes until that moment, and simulate until then."""
        while self._next is not None and self._next.at_s < at_s:
            arrival = self._next
            self._number += 1
            self.slots[arrival.gpu].submit(
                DecodeRequest(
                    _ns(arrival.at_s),
                    _ns(arrival.ready_s),
                    arrival.prompt_tokens,
                    arrival.output_tokens,
                    self._number,
                )
            )
            self._next = next(self._arrivals, None)
        for slot in self.slots:
            slot.run_until(_ns(at_s))
            if not self._ground.has_jobs:
                slot.hook.snapshot()  # as the agent's link does, once a second


def _fill(slot: DecodeGpu, settings: SimulationSettings) -> None:
    """Keep a batch: each request that ends is followed by one like it, `context` tokens on average.

    They end evenly spread over their length, so that the batch's tokens hardly change.
    """
    length = min(256, settings.context)
    numbers = count(settings.batch)

    def again(_: DecodeRequest | None = None) -> None:
        now_ns, prompt = slot.now_ns, settings.context - length // 2
        slot.submit(DecodeRequest(now_ns, now_ns, prompt, length, next(numbers)))

    for number in range(settings.batch):
        ahead = (number + 1) * length // settings.batch
        prompt = settings.context + length // 2 - ahead
        slot.submit(DecodeRequest(SECOND_NS, SECOND_NS, prompt, max(1, ahead), number))
    slot.on_finished = again


def _ns(seconds: float) -> int:
    return SECOND_NS + int(seconds * 1e9)


def prefill_size(ground: ScenarioParts, gpus: int, surge: float = 1.0) -> int:
    """Return how many prefill GPUs a cell has, enough for a surge."""
    settings = ground.settings
    if ground.prefill is None or settings.batch or settings.aggregated:
        return 1
    if settings.prefill:
        return max(1, round(settings.prefill * gpus / settings.gpus))
    if settings.lengths:
        sample = list(islice(ground.traffic.arrivals(1, 1e9, settings.seed), 2000))
    else:
        sample = list(islice(ground.traffic.requests, 2000)) or _generated(settings)
    return prefill_gpus(ground.prefill, sample, settings.rate * gpus * max(1.0, surge))


def _generated(settings: SimulationSettings) -> list[TraceRequest]:
    return generate(per_second=10.0, seconds=200.0, seed=settings.seed)


def cells_of(settings: SimulationSettings) -> list[tuple[int, int]]:
    """Return number and size of each cell."""
    sizes = []
    left = settings.simulated
    while left > 0:
        sizes.append(min(CELL_GPUS, left))
        left -= sizes[-1]
    return list(enumerate(sizes))


_ground: ScenarioParts | None = None


def _prepare(ground: ScenarioParts) -> None:
    global _ground  # of a process of the pool, set once
    _ground = ground


@dataclass(frozen=True, slots=True)
class _Work:
    """Cells that run in one process: one by one, or together where jobs are placed on them."""

    policy: str
    objective_ms: float
    cells: tuple[tuple[int, int], ...]

    def run(self, ground: ScenarioParts) -> _Done:
        cells = [
            Cell(ground, self.policy, self.objective_ms, number, gpus)
            for number, gpus in self.cells
        ]
        if not ground.has_jobs or self.policy == ALONE:
            results = [cell.run() for cell in cells]
            return _Done({cell[0]: r for cell, r in zip(self.cells, results, strict=True)})
        jobs = _run_with_jobs(ground, cells)
        results = [cell.result() for cell in cells]
        return _Done({cell[0]: r for cell, r in zip(self.cells, results, strict=True)}, jobs)


@dataclass(frozen=True, slots=True)
class _Done:
    results: dict[int, CellResult]
    jobs: JobFigures | None = None


def _run_with_jobs(ground: ScenarioParts, cells: list[Cell]) -> JobFigures:
    """Run cells side by side, and give the jobs on their GPUs a turn every second."""
    settings = ground.settings
    jobs = ground.jobs or job_arrivals(
        settings.jobs,
        settings.warm_up + settings.seconds / 2,
        tokens=settings.job_tokens,
        priorities=settings.priorities,
        seed=settings.seed,
    )
    queue = JobQueue(
        [slot for cell in cells for slot in cell.slots],
        cluster=settings.gpus,
        model=settings.train or settings.model,
        jobs=jobs,
        times=JobTimes(settings.job_load_s, settings.job_save_s),
        jobs_per_slot=settings.jobs_per_slot,
        preemption=settings.preemption,
    )
    at_s = 0.0
    queue.turn(at_s)
    for until_s in (settings.warm_up, settings.warm_up + settings.seconds):
        while at_s < until_s:
            at_s = min(until_s, at_s + TURN_S)
            for cell in cells:
                cell.advance(at_s)
            queue.turn(at_s)
        if until_s == settings.warm_up:
            for cell in cells:
                cell.begin()
    return queue.figures()


def _run_work(work: _Work) -> tuple[_Work, _Done]:
    assert _ground is not None
    return work, work.run(_ground)


def simulate(
    ground: ScenarioParts, progress: Callable[[str], None] = lambda text: None
) -> list[PolicyFigures]:
    """Run every policy under every objective; of each objective decode alone comes first."""
    settings = ground.settings
    runs = [
        (policy, objective_ms)
        for objective_ms in settings.objectives_ms
        for policy in settings.policies
        # What decode does alone, or beside a plain process, depends on no objective.
        if policy not in (ALONE, NAIVE) or objective_ms == settings.objectives_ms[0]
    ]
    cells = cells_of(settings)
    # Jobs are placed on all GPUs at once, so that these are simulated side by side.
    groups = [tuple(cells)] if ground.has_jobs else [(cell,) for cell in cells]
    work = [_Work(*run, group) for run in runs for group in groups]
    done: dict[tuple[str, float], list[_Done]] = {run: [] for run in runs}
    began_s = time.monotonic()

    def take(item: _Work, result: _Done) -> None:
        done[item.policy, item.objective_ms].append(result)
        ready = sum(map(len, done.values()))
        left_s = (time.monotonic() - began_s) / ready * (len(work) - ready)
        at = f"{item.policy} at {item.objective_ms:g} ms"
        progress(f"{ready} of {len(work)} parts, {at}, {left_s:.0f} s to go")

    processes = min(settings.processes, len(work))
    if processes == 1:
        for item in work:
            take(item, item.run(ground))
    else:
        with ProcessPoolExecutor(
            processes, get_context("spawn"), initializer=_prepare, initargs=(ground,)
        ) as pool:
            for future in as_completed([pool.submit(_run_work, item) for item in work]):
                take(*future.result())
    return [
        _figures(ground, policy, objective_ms, done)
        for objective_ms in settings.objectives_ms
        for policy in settings.policies
    ]


def _figures(
    ground: ScenarioParts,
    policy: str,
    objective_ms: float,
    done: dict[tuple[str, float], list[_Done]],
) -> PolicyFigures:
    settings = ground.settings
    of_none = policy in (ALONE, NAIVE)
    run = (policy, settings.objectives_ms[0] if of_none else objective_ms)
    by_cell = {number: r for part in done[run] for number, r in part.results.items()}
    results = [by_cell[number] for number in sorted(by_cell)]
    return add_up(
        policy,
        [slot for result in results for slot in result.slots],
        objective_ms=objective_ms,
        gpus=settings.gpus,
        dedicated_per_second=ground.dedicated_per_second,
        price=ground.price,
        trips=sum(result.trips for result in results),
        breaks=sum(result.breaks for result in results),
        jobs=done[run][0].jobs,
    )


def best_of(figures: list[PolicyFigures], percentile: float) -> dict[float, str]:
    """Return, by objective, the policy that harvests most among those that hold it.

    Held: no more steps are over it than the percentile allows beyond those of decode alone; "":
    none holds it.
    """
    allowed = 1 - percentile / 100
    best: dict[float, str] = {}
    for objective_ms in dict.fromkeys(f.objective_ms for f in figures):
        rows = [f for f in figures if f.objective_ms == objective_ms]
        alone = next((f.over for f in rows if f.policy == ALONE), 0.0)
        held = [f for f in rows if f.policy != ALONE and f.over <= alone + allowed]
        most = max(held, key=lambda f: f.gpu_hours, default=None)
        best[objective_ms] = most.policy if most and most.gpu_hours > 0 else ""
    return best


def _load_of(settings: SimulationSettings) -> str:
    if settings.batch:
        return "closed loop"
    if settings.lengths:
        prompt, output = settings.lengths
        return f"Poisson, {prompt:g} prompt and {output:g} output tokens"
    return settings.trace


def described(ground: ScenarioParts) -> dict[str, Any]:
    """Return what was simulated, for people and for JSON."""
    settings = ground.settings
    return {
        "device": ground.device,
        "source": ground.source,
        "model": settings.model if not settings.profile else ground.profile["engine"],
        "levels": [[s.finetune_units, s.decode_units] for s in ground.levels.splits],
        "chunks": ground.geometry.chunks,
        "dedicated_tokens_per_second": ground.dedicated_per_second,
        "trace": _load_of(settings),
        "generated": not (settings.batch or settings.lengths or ground.traffic.requests),
        "prefill_gpus": (
            0
            if ground.prefill is None or settings.batch or settings.aggregated
            else round(prefill_size(ground, CELL_GPUS) * settings.gpus / CELL_GPUS)
        ),
        "price": ground.price,
        "notes": list(ground.notes),
    }
