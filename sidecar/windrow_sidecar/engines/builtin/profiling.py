"""Measures the points of a latency profile with the very loop that serves."""

from __future__ import annotations

import logging
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from windrow.errors import InvariantBroken
from windrow.eventlog import StepEvent
from windrow_sidecar.engines.builtin.loop import DecodeLoop, LoopParts
from windrow_sidecar.engines.builtin.threads import Threads, most_useful
from windrow_sidecar.engines.builtin.web.channel import SocketChannel
from windrow_sidecar.engines.builtin.web.messages import Submit
from windrow_sidecar.engines.builtin.web.token_batcher import TokenBatcher
from windrow_sidecar.engines.hook import FailClosed, NullHook, StepInput
from windrow_sidecar.engines.profile import WARM_UP_STEPS, Effort, Point
from windrow_sidecar.qos.solo import SoloSample
from windrow_sidecar.qos.view import Grant

_log = logging.getLogger(__name__)

_STEPS_PER_CANDIDATE = 16


class _OnUnits(NullHook):
    """Decode on a fixed number of units."""

    def __init__(self) -> None:
        self.units = 0

    def before_step(self, facts: StepInput) -> Grant:
        return Grant(decode_units=self.units)


def measure(parts: LoopParts, points: Iterable[Point], effort: Effort) -> list[SoloSample]:
    """Run the points one after the other, while no request is there; returns median latencies.

    Prompts are as long as the point says and arrive with their KV. Leaves the cache empty and
    decode on all units.

    Raises:
        InvariantBroken: decode could not be put on the units of a point.
    """
    hook = _OnUnits()
    guarded = FailClosed(hook)
    began_s = time.monotonic()
    seen: dict[Point, list[StepEvent]] = defaultdict(list)
    try:
        with muted(replace(parts, hook=guarded, log=None)) as loop:
            for point in [*points] * effort.rounds:
                late = time.monotonic() - began_s > effort.soft_limit_s
                if late and point in seen:
                    break
                steps = max(1, effort.steps // 3) if late else effort.steps
                hook.units = point.units
                # Rounds apart in time are pooled: a machine has slow seconds and fast ones, and
                # serving will see both.
                seen[point] += _steps_at(loop, parts, point, steps)
                if guarded.failed:  # the loop has gone on, with all units
                    raise InvariantBroken(f"decode does not run on {point.units} units: no profile")
    finally:
        parts.scheduler.clear()
        parts.partition.activate(parts.units)
    return [_sample(point, steps) for point, steps in seen.items()]


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
        parts.scheduler.submit(request(i, point.context, WARM_UP_STEPS + steps))
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
        step_us=median((event.end_ns - event.start_ns) / 1000 for event in steps),
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
    """A loop that nobody listens to."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = SocketChannel(ours)
        outbox = TokenBatcher(channel, interval=1 << 30)
        yield DecodeLoop(parts, channel, outbox, prefill_tokens=1)
