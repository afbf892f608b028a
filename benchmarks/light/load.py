"""A fixed load in the decode process: so many requests at any time, each followed by another."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from windrow.eventlog import StepEvent
from windrow_sidecar.engines.builtin.loop import LoopParts
from windrow_sidecar.engines.builtin.profiling import muted, request
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
class Steps:
    """What a stretch of steps took.

    Attributes:
        latencies_us: in order; steps that admit requests among them.
        ends_ns: when each ended.
        begin_ns, end_ns: of the stretch; all of CLOCK_MONOTONIC.
        context_tokens: of a batch, median.
    """

    latencies_us: list[float]
    ends_ns: list[int]
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
) -> Steps:
    """Decode under a hook until there are enough steps; leaves the cache empty.

    Args:
        parts: of the engine.
        hook: decides; closed at the end.
        load: that is kept up.
        warmed_up: asked with the number of steps so far; what ran before it says so is forgotten.
        enough: asked with the number of steps that count, and nanoseconds since the first of them.

    Raises:
        RuntimeError: the hook failed.
    """
    made = 0

    def submit(generated: int) -> None:
        nonlocal made
        made += 1
        prompt = max(1, load.context - load.generated // 2)
        parts.scheduler.submit(request(made, prompt, generated))

    for i in range(load.batch):
        share = load.batch if load.together else i + 1
        submit(max(1, load.generated * share // load.batch))
    guarded = FailClosed(hook)
    watched = replace(parts, hook=guarded, log=None, on_completed=lambda: submit(load.generated))
    counted: list[StepEvent] = []
    so_far = 0
    try:
        with muted(watched) as loop:
            while not counted or not enough(len(counted), counted[-1].end_ns - counted[0].start_ns):
                event = loop.step()
                if event is None or event.batch < load.batch:
                    continue
                if load.together and event.admitted:
                    continue
                so_far += 1
                if counted or warmed_up(so_far):
                    counted.append(event)
    finally:
        parts.scheduler.clear()
        guarded.close()
        parts.partition.activate(parts.units)
    if guarded.failed:
        raise RuntimeError("the hook failed: the log of the decode process says how")
    return Steps(
        latencies_us=[(e.end_ns - e.start_ns) / 1e3 for e in counted],
        ends_ns=[e.end_ns for e in counted],
        begin_ns=counted[0].start_ns,
        end_ns=counted[-1].end_ns,
        context_tokens=round(statistics.median(e.context_tokens for e in counted)),
    )
