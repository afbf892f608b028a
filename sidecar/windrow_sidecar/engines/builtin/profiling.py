"""Measure the points of a latency profile with the loop that serves."""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median, quantiles
from typing import Protocol

from windrow.errors import InvariantBroken
from windrow.eventlog import StepEvent
from windrow_sidecar.engines.builtin.loop import DecodeLoop, LoopParts
from windrow_sidecar.engines.builtin.threads import Threads, most_useful
from windrow_sidecar.engines.builtin.web.channel import SocketChannel
from windrow_sidecar.engines.builtin.web.messages import Submit
from windrow_sidecar.engines.builtin.web.token_batcher import TokenBatcher
from windrow_sidecar.engines.hook import FailClosed, NullHook, StepInput
from windrow_sidecar.engines.profile import (
    LEAST_POINTS,
    WARM_UP_STEPS,
    CoRunPoint,
    Effort,
    Measured,
    MeasuredPoint,
    Point,
)
from windrow_sidecar.qos.co_run import CoRunSample
from windrow_sidecar.qos.solo import SoloSample
from windrow_sidecar.qos.view import Grant

_log = logging.getLogger(__name__)

Keep = Callable[[Point, MeasuredPoint], None]
KeepBeside = Callable[[CoRunPoint, CoRunSample], None]

_STEPS_PER_CANDIDATE = 16
_STEPS_FOR_QUARTILES = 4


class _OnUnits(NullHook):
    """Decode on a fixed number of units."""

    def __init__(self) -> None:
        self.units = 0

    def before_step(self, facts: StepInput) -> Grant:
        return Grant(decode_units=self.units)


class LoadBeside(Protocol):
    """Load that computes on the worker's units while decode is measured beside it."""

    def run_on(self, units: int) -> None:
        """Begin, on so many units."""
        ...

    def pause(self) -> float:
        """End; returns the tokens a second that it computed."""
        ...


def measure(
    parts: LoopParts,
    points: Iterable[Point],
    effort: Effort,
    *,
    known: Mapping[Point, MeasuredPoint] | None = None,
    keep: Keep = lambda point, measured: None,
) -> Measured:
    """Run the points one after the other, while no request is there; returns median latencies.

    `known`: of an interrupted profile, not measured again. `keep` hears of each point when its
    first round is done.

    Prompts are as long as the point says and arrive with their KV. Leaves the cache empty and
    decode on all units.

    Raises:
        InvariantBroken: decode could not be put on the units of a point.
    """
    hook = _OnUnits()
    guarded = FailClosed(hook)
    began_s = time.monotonic()
    seen: dict[Point, list[StepEvent]] = defaultdict(list)
    known = known or {}
    try:
        with muted(replace(parts, hook=guarded, log=None)) as loop:
            for point in [p for p in points if p not in known] * effort.rounds:
                spent_s = time.monotonic() - began_s
                late = spent_s > effort.soft_limit_s
                if late and point in seen:
                    break
                of_share = sum(1 for other in (*known, *seen) if other.units == point.units)
                if spent_s > effort.hard_limit_s and of_share >= LEAST_POINTS:
                    continue
                steps = max(1, effort.steps // 3) if late else effort.steps
                hook.units = point.units
                # Rounds apart in time are pooled: a machine has slow seconds and fast ones, and
                # serving will see both.
                first = point not in seen
                seen[point] += _steps_at(loop, parts, point, steps)
                if first:
                    keep(point, _measured(point, seen[point]))
                if guarded.failed:  # the loop has gone on, with all units
                    raise InvariantBroken(f"decode does not run on {point.units} units: no profile")
    finally:
        parts.scheduler.clear()
        parts.partition.activate(parts.units)
    found = [*known.values(), *(_measured(point, steps) for point, steps in seen.items())]
    scatter = [each.scatter_percent for each in found if each.scatter_percent is not None]
    return Measured([each.sample for each in found], median(scatter) if scatter else 0.0)


def _measured(point: Point, steps: list[StepEvent]) -> MeasuredPoint:
    if len(steps) < _STEPS_FOR_QUARTILES:
        return MeasuredPoint(_sample(point, steps), None)
    first, middle, third = quantiles(_latencies_us(steps), n=4)
    return MeasuredPoint(_sample(point, steps), 50 * (third - first) / middle)


def _latencies_us(steps: Iterable[StepEvent]) -> list[float]:
    return [(event.end_ns - event.start_ns) / 1000 for event in steps]


def measure_beside(
    parts: LoopParts,
    points: Iterable[CoRunPoint],
    effort: Effort,
    load: LoadBeside,
    *,
    keep: KeepBeside = lambda point, sample: None,
) -> list[CoRunSample]:
    """Run the points with a load on the worker's units; returns median latencies.

    Points that find no time any more are left out. `keep` hears of each point.

    Raises:
        InvariantBroken: decode could not be put on the units of a point.
    """
    hook = _OnUnits()
    guarded = FailClosed(hook)
    began_s = time.monotonic()
    samples: list[CoRunSample] = []
    try:
        with muted(replace(parts, hook=guarded, log=None)) as loop:
            for point in points:
                if samples and time.monotonic() - began_s > effort.co_run_limit_s:
                    break
                hook.units = point.alone.units
                load.run_on(point.finetune_units)
                steps = _steps_at(loop, parts, point.alone, effort.steps)
                rate = load.pause()
                if guarded.failed:
                    units = point.alone.units
                    raise InvariantBroken(f"decode does not run on {units} units: no profile")
                sample = CoRunSample(_sample(point.alone, steps), point.finetune_units, rate)
                samples.append(sample)
                keep(point, sample)
    finally:
        parts.scheduler.clear()
        parts.partition.activate(parts.units)
    return samples


def settle_threads(parts: LoopParts, threads: Threads, *, batch: int, context: int) -> None:
    """Find how many threads are useful on the whole device, and use no more from then on.

    Tried with that many requests of so many tokens, which have to fit into the arena; takes about
    a third of a second for each candidate.
    """
    point = Point(parts.units, batch, context)

    def step_us(candidate: int) -> float:
        threads.most = candidate
        threads(parts.units)
        return _sample(point, _steps_at(loop, parts, point, _STEPS_PER_CANDIDATE)).step_us

    hook = FailClosed(_OnUnits())
    try:
        with muted(replace(parts, hook=hook, log=None)) as loop:
            _steps_at(loop, parts, point, WARM_UP_STEPS)
            threads.most = most_useful(parts.units, step_us)
    finally:
        parts.scheduler.clear()
    threads(parts.units)
    _log.info("decode uses %d of %d threads: more are not worth it", threads.most, parts.units)


def _steps_at(loop: DecodeLoop, parts: LoopParts, point: Point, steps: int) -> list[StepEvent]:
    """Decode so many steps with all requests of the point in the batch, after a warm-up."""
    for i in range(point.batch):
        loop.submit(request(i, point.context, WARM_UP_STEPS + steps))
    events: list[StepEvent] = []
    while not parts.scheduler.is_empty:
        event = loop.step()
        if event is not None and event.batch == point.batch and not event.admitted:
            events.append(event)
    return events[WARM_UP_STEPS - 1 :]


def _sample(point: Point, steps: list[StepEvent]) -> SoloSample:
    return SoloSample(
        units=point.units,
        batch=point.batch,
        context_tokens=round(median(event.context_tokens for event in steps)),
        step_us=median(_latencies_us(steps)),
    )


def request(number: int, context: int, steps: int) -> Submit:
    """A request of so many tokens that arrives with its KV and decodes for so many steps."""
    return Submit(
        id=number,
        name=f"profile-{number}",
        prompt=(0,) * context,
        max_tokens=steps,
        temperature=0.0,
        top_p=1.0,
        seed=0,
        stop_token_ids=frozenset(),
        kv_arrives=True,
        arrived_ns=0,
    )


@contextmanager
def muted(parts: LoopParts) -> Iterator[DecodeLoop]:
    """A loop that nobody listens to; it leaves no request behind, on any rank."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = SocketChannel(ours)
        outbox = TokenBatcher(channel, interval=1 << 30)
        loop = DecodeLoop(parts, channel, outbox, prefill_tokens=1)
        try:
            yield loop
        finally:
            loop.clear()
