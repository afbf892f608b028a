"""The figures of a run, computed from its event logs and from nothing else.

A run's folder holds `run.events.jsonl` (marks of the demo itself: when the load began and ended,
with the objective), `pods/` (engines and workers) and `dedicated/` (the same job alone on the whole
device: the denominator of eta). `summarize` reads all three; anyone can do so again later.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow.eventlog import (
    Event,
    EventLog,
    LossEvent,
    MarkEvent,
    RequestEvent,
    StepEvent,
    TaskletEvent,
    read_events,
)

RUN_LOG = "run.events.jsonl"
PODS = "pods"
DEDICATED = "dedicated"
LOAD_BEGIN = "measure-begin"
LOAD_END = "measure-end"
LOAD_DRAINED = "drained"


@dataclass(frozen=True, slots=True)
class SummaryWindow:
    """Window in which requests arrived, and the objective that serving had.

    What is measured by time counts until `end_ns`, so that every way of sharing is judged over the
    same stretch; requests may be answered until `drained_ns`.
    """

    begin_ns: int
    end_ns: int
    objective_ms: float
    drained_ns: int

    def holds(self, at_ns: int) -> bool:
        """Return whether a moment is within."""
        return self.begin_ns <= at_ns <= self.end_ns


@dataclass
class Events:
    """The events of one folder, by kind, each in order of time."""

    steps: list[tuple[str, StepEvent]] = field(default_factory=list)
    tasklets: list[TaskletEvent] = field(default_factory=list)
    requests: list[RequestEvent] = field(default_factory=list)
    losses: list[LossEvent] = field(default_factory=list)
    marks: list[tuple[str, MarkEvent]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Events:
        """Read every event log below a folder. A sidecar's restart appends: order is restored."""
        return cls.of(read_events(folder))

    @classmethod
    def of(cls, events: Iterable[tuple[str, Event]]) -> Events:
        """Sort (source, event) pairs by kind and time."""
        found = cls()
        for source, event in events:
            match event:
                case StepEvent():
                    found.steps.append((source, event))
                case TaskletEvent():
                    found.tasklets.append(event)
                case RequestEvent():
                    found.requests.append(event)
                case LossEvent():
                    found.losses.append(event)
                case MarkEvent():
                    found.marks.append((source, event))
        found.steps.sort(key=lambda pair: pair[1].end_ns)
        found.tasklets.sort(key=lambda t: t.end_ns)
        found.losses.sort(key=lambda at: at.at_ns)
        found.marks.sort(key=lambda pair: pair[1].at_ns)
        return found


@dataclass(frozen=True, slots=True)
class Serving:
    """Serving figures of the window."""

    objective_ms: float
    steps: int
    steps_over_objective: int
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p99_ms: float
    mean_batch: float  # over the time of the steps
    requests_completed: int
    requests_failed: int
    hook_p50_us: float
    hook_share: float  # of the steps' time

    @property
    def share_over(self) -> float:
        """Share of the steps that took longer than the objective."""
        return self.steps_over_objective / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens of finished optimizer steps, and their rate between the first and the last of them."""

    tokens: int
    tokens_per_second: float
    steps: int
    seconds: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of sorted values; NaN of none."""
    if not values:
        return math.nan
    return values[max(0, math.ceil(share * len(values)) - 1)]


def window_of(marks: Iterable[tuple[str, MarkEvent]]) -> SummaryWindow:
    """Return when the load ran, by the marks of the run's own log."""
    by_name = {mark.what: mark for _, mark in marks}
    begin, end = by_name.get(LOAD_BEGIN), by_name.get(LOAD_END)
    if begin is None or end is None:
        raise UserError(
            f"no {LOAD_BEGIN} and {LOAD_END}",
            field=RUN_LOG,
            remedy="The run ended before its load did: run it again.",
        )
    objective_ms = float(json.loads(begin.detail)["objective_ms"])
    drained = by_name.get(LOAD_DRAINED, end)
    return SummaryWindow(begin.at_ns, end.at_ns, objective_ms, drained.at_ns)


def load_marks(
    begin_ns: int, *, seconds: float, drained_ns: int, objective_ms: float
) -> list[MarkEvent]:
    """Return the marks of a load, as `window_of` reads them."""
    return [
        MarkEvent(begin_ns, LOAD_BEGIN, json.dumps({"objective_ms": objective_ms})),
        MarkEvent(begin_ns + round(seconds * 1e9), LOAD_END, ""),
        MarkEvent(drained_ns, LOAD_DRAINED, ""),
    ]


def serving(events: Events, window: SummaryWindow) -> Serving:
    """Return how serving fared: each decode step is a time per output token of its batch."""
    steps = [step for _, step in events.steps if window.holds(step.end_ns)]
    tpots = sorted(s.tpot_ns / 1e6 for s in steps)
    busy_ms = sum(s.end_ns - s.start_ns for s in steps) / 1e6
    requests = [r for r in events.requests if window.begin_ns <= r.end_ns <= window.drained_ns]
    failed = sum(1 for r in requests if r.error)
    return Serving(
        objective_ms=window.objective_ms,
        steps=len(steps),
        steps_over_objective=sum(1 for ms in tpots if ms > window.objective_ms),
        tpot_p50_ms=percentile(tpots, 0.5),
        tpot_p90_ms=percentile(tpots, 0.9),
        tpot_p99_ms=percentile(tpots, 0.99),
        mean_batch=(
            sum(s.batch * (s.end_ns - s.start_ns) for s in steps) / 1e6 / busy_ms if busy_ms else 0
        ),
        requests_completed=len(requests) - failed,
        requests_failed=failed,
        hook_p50_us=percentile(sorted(s.hook_us for s in steps), 0.5),
        hook_share=sum(s.hook_us for s in steps) / 1e3 / busy_ms if busy_ms else 0,
    )


def throughput(tasklets: Sequence[TaskletEvent], window: SummaryWindow | None = None) -> Throughput:
    """Return what a worker got done.

    `tokens` counts every finished step. The rate leaves out start-up and evaluation: it is taken
    between the first and the last optimizer step (within the window, where one is given); pauses,
    restarts and repeated work in between count against it.
    """
    done = [t for t in tasklets if t.phase == "opt"]
    within = [t for t in done if window is None or window.holds(t.end_ns)]
    if len(within) < 2:
        return Throughput(max((t.tokens_done for t in done), default=0), 0.0, len(within), 0.0)
    seconds = (within[-1].end_ns - within[0].end_ns) / 1e9
    tokens = within[-1].tokens_done - within[0].tokens_done
    return Throughput(
        max(t.tokens_done for t in done),
        tokens / seconds if seconds > 0 else 0.0,
        len(within),
        seconds,
    )


def job_figures(events: Events) -> dict[str, Any]:
    """Return the job's steps and losses; a loss that was not measured is None."""
    by_stage: defaultdict[str, list[LossEvent]] = defaultdict(list)
    for loss in events.losses:
        by_stage[loss.stage].append(loss)
    training = by_stage["training"]
    return {
        "steps": max((at.step for at in training), default=0),
        "loss": {
            "first": training[0].loss if training else None,
            "last": training[-1].loss if training else None,
        },
        "eval_loss": {
            "base": by_stage["base"][0].loss if by_stage["base"] else None,
            "tuned": by_stage["tuned"][-1].loss if by_stage["tuned"] else None,
        },
    }


def summarize(folder: Path) -> dict[str, Any]:
    """Return every figure of a run's folder that the logs hold.

    Keys are those of `summary.json`; what only the API server knows (version, phase, adapter) is
    added by the run. Raises UserError where the load's marks are missing.
    """
    own = Events.of((s, e) for s, e in read_events(folder) if s == "run")
    window = window_of(own.marks)
    pods = Events.read(folder / PODS)
    served = serving(pods, window)
    harvested = throughput(pods.tasklets, window)
    dedicated = throughput(Events.read(folder / DEDICATED).tasklets)
    rate = dedicated.tokens_per_second
    return {
        "job": job_figures(pods),
        "serving": serving_figures(served),
        "harvest": {
            "tokens": harvested.tokens,
            "tokens_per_second": round(harvested.tokens_per_second, 1),
            "seconds": round(harvested.seconds, 3),
            "eta": round(harvested.tokens_per_second / rate, 4) if rate else None,
            "dedicated_tokens_per_second": round(rate, 1),
            "dedicated_seconds": round(dedicated.seconds, 3),
        },
    }


def serving_figures(served: Serving) -> dict[str, Any]:
    """Return the `serving` part of a summary."""
    return {
        "objective_ms": served.objective_ms,
        "tpot_ms": {
            "p50": round(served.tpot_p50_ms, 3),
            "p90": round(served.tpot_p90_ms, 3),
            "p99": round(served.tpot_p99_ms, 3),
        },
        "steps": served.steps,
        "steps_over_objective": served.steps_over_objective,
        "share_over_objective": round(served.share_over, 5),
        "mean_batch": round(served.mean_batch, 2),
        "requests_completed": served.requests_completed,
        "requests_failed": served.requests_failed,
        "hook": {
            "p50_us": round(served.hook_p50_us, 2),
            "share_of_step": round(served.hook_share, 5),
        },
    }


def run_log(folder: Path) -> EventLog:
    """Return the log for the run's own marks."""
    return EventLog(folder / RUN_LOG, source="run")
