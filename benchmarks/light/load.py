"""A fixed load in the decode process: so many requests at any time, each followed by another."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from windrow.eventlog import StepEvent
from windrow_sidecar.engines.builtin.loop import LoopParts
from windrow_sidecar.engines.builtin.profiling import muted, request
from windrow_sidecar.engines.builtin.scheduler import Scheduler
from windrow_sidecar.engines.hook import FailClosed, StepHook


@dataclass(frozen=True)
class FixedLoad:
    """Requests that arrive with their KV, as in a decode instance behind prefill instances.

    Attributes:
        batch: at any time.
        context: mean context tokens of a request over its life.
        generated: tokens of each.
        together: they begin and end together, and steps that admit do not count: for a point of a
            profile. Else their ends are spread, as they are in a service, and every step counts.
    """

    batch: int
    context: int
    generated: int
    together: bool = False


@dataclass(frozen=True)
class Surge:
    """Requests that come all at once, again and again, beside those that are always there.

    Attributes:
        requests: of one surge.
        context: tokens of each when it comes.
        generated: tokens of each.
        every_s: between two surges; one that is not answered by then holds up the next.
    """

    requests: int
    context: int
    generated: int
    every_s: float


@dataclass(frozen=True)
class Steps:
    """Steps of a stretch of time.

    Attributes:
        latencies_us: in order; steps that admit requests among them.
        batches: requests in each.
        units: that decode had in each.
        ends_ns: when each ended.
        surge_waits_us: of each surge, from its coming to the end of the step with which the last of
            it has its first token.
        retractions: requests that lost their KV to others.
        begin_ns, end_ns: of the stretch; all of CLOCK_MONOTONIC.
        context_tokens: of a batch, median.
    """

    latencies_us: list[float]
    batches: list[int]
    units: list[int]
    ends_ns: list[int]
    surge_waits_us: list[float]
    retractions: int
    begin_ns: int
    end_ns: int
    context_tokens: int


def run_load(
    parts: LoopParts,
    hook: StepHook,
    load: FixedLoad,
    *,
    warmed_up: Callable[[int], bool],
    enough: Callable[[int, int], bool],
    surge: Surge | None = None,
) -> Steps:
    """Decode under a hook until there are enough steps; leaves the cache empty.

    Args:
        parts: of the engine.
        hook: decides; closed at the end.
        load: that is kept up.
        warmed_up: asked with the number of steps so far; what ran before it says so is forgotten.
        enough: asked with the number of steps that count, and nanoseconds since the first of them.
        surge: comes besides, first when steps count.

    Raises:
        RuntimeError: the hook failed.
    """
    made, scheduler = 0, parts.scheduler

    def submit(context: int, generated: int) -> None:
        nonlocal made
        made += 1
        scheduler.submit(request(made, context, generated))

    def submit_one(generated: int) -> None:
        submit(max(1, load.context - load.generated // 2), generated)

    def replace_one() -> None:
        there = len(scheduler.running) + len(scheduler.prefilling) + len(scheduler.waiting)
        if there < load.batch:
            submit_one(load.generated)

    for i in range(load.batch):
        share = load.batch if load.together else i + 1
        submit_one(max(1, load.generated * share // load.batch))
    guarded = FailClosed(hook)
    watched = replace(parts, hook=guarded, log=None, on_completed=replace_one)
    counted: list[StepEvent] = []
    so_far, retracted = 0, 0
    surges = _Surges(surge) if surge else None
    try:
        with muted(watched) as loop:
            while not counted or not enough(len(counted), counted[-1].end_ns - counted[0].start_ns):
                if surges and counted:
                    surges.come(parts, submit)
                event = loop.step()
                if surges and event is not None:
                    surges.see(event, scheduler)
                if event is None or event.batch < load.batch:
                    continue
                if load.together and event.admitted:
                    continue
                so_far += 1
                if counted or warmed_up(so_far):
                    counted.append(event)
                else:
                    retracted = scheduler.retractions
    finally:
        scheduler.clear()
        guarded.close()
        parts.partition.activate(parts.units)
    if guarded.failed:
        raise RuntimeError("the hook failed: the log of the decode process says how")
    return Steps(
        latencies_us=[(e.end_ns - e.start_ns) / 1e3 for e in counted],
        batches=[e.batch for e in counted],
        units=[e.decode_units for e in counted],
        ends_ns=[e.end_ns for e in counted],
        surge_waits_us=surges.waits_us if surges else [],
        retractions=scheduler.retractions - retracted,
        begin_ns=counted[0].start_ns,
        end_ns=counted[-1].end_ns,
        context_tokens=round(statistics.median(e.context_tokens for e in counted)),
    )


class _Surges:
    """Surges, and the wait before each."""

    def __init__(self, surge: Surge) -> None:
        self._surge = surge
        self._next_ns, self._came_ns = 0, 0
        self.waits_us: list[float] = []

    def come(self, parts: LoopParts, submit: Callable[[int, int], None]) -> None:
        """Submit one where it is due."""
        now_ns = parts.clock_ns()
        if now_ns < self._next_ns or self._came_ns:
            return
        for _ in range(self._surge.requests):
            submit(self._surge.context, self._surge.generated)
        self._came_ns, self._next_ns = now_ns, now_ns + round(self._surge.every_s * 1e9)

    def see(self, event: StepEvent, scheduler: Scheduler) -> None:
        """Take note of a step's end."""
        if self._came_ns and not scheduler.waiting:
            self.waits_us.append((event.end_ns - self._came_ns) / 1e3)
            self._came_ns = 0
