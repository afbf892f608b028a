"""Compute what one arm of a comparison got done in one segment, from the event logs.

An arm is a way of sharing one device. It plays for one segment in each round: load and trainer
begin, the lead-in passes, and what falls into the window is counted.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from windrow.eventlog import (
    MarkEvent,
    RequestEvent,
    StepEvent,
    TaskletEvent,
    read_events,
)
from windrow_lab.figures.summary import PODS, percentile

SEGMENTS, TRAINERS, SESSION = "segments.jsonl", "trainers", "session-"
# Index of the harvested arms' job among the trainers.
HARVESTED_JOB = "job"

Kind = Literal["alone", "loop", "policy", "dedicated"]
# Where a harvested job runs: `--finetune` of the built-in engine.
Place = Literal["process", "in-engine", "fused"]

ALONE, AGAIN = "alone", "alone again"
NAIVE, TUNED, IDLE = "naive", "tuned naive", "idle class"
# Played where it is asked for by name: what single-threaded work on decode's own core gives.
A_LOOP_A_CORE = "idle class per core"
DEDICATED, DEDICATED_PEFT = "dedicated", "dedicated PEFT"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of sharing the device.

    Attributes:
        kind: alone: decode alone; loop: a plain PEFT loop beside it; policy: a FinetuneJob,
            harvested; dedicated: the trainer alone.
        meaning: for people.
        policy: of kind policy, the name in `spec.policy`.
        place: of kind policy, where the job runs.
    """

    name: str
    kind: Kind
    meaning: str
    policy: str = ""
    place: Place = "process"


MEANINGS = {
    "static": "a fixed share, whatever decode does",
    "temporal": "only the gaps between decode steps",
    "fineinfer": "serving and finetuning in turn, requests wait a little",
    "iterations": "whole iterations in turn with serving",
    "windrow": "our own",
}


# Played where they are asked for by name: the job runs in decode's process.
IN_ENGINE = (
    Arm("in-engine", "policy", "in decode's process, in turns", "temporal", "in-engine"),
    Arm("flexllm fused", "policy", "FlexLLM's own form: products shared", "flexllm", "fused"),
    Arm("llmstation fused", "policy", "LLMStation's own: products shared", "llmstation", "fused"),
)
ON_REQUEST = (A_LOOP_A_CORE, *(arm.name for arm in IN_ENGINE))


def arms_of(policies: Sequence[str]) -> list[Arm]:
    """Return every arm, in the order of the table."""
    return [
        Arm(ALONE, "alone", "decode alone, first in each round"),
        Arm(NAIVE, "loop", "a plain PEFT loop, both on all cores, OpenMP as it comes"),
        Arm(TUNED, "loop", "the same, OpenMP's threads sleep, nice 19"),
        Arm(IDLE, "loop", "the same as SCHED_IDLE"),
        Arm(A_LOOP_A_CORE, "loop", "one single-threaded loop on each core, other rows, SCHED_IDLE"),
        *(Arm(name, "policy", MEANINGS.get(name, "its paper's rule"), name) for name in policies),
        *IN_ENGINE,
        Arm(AGAIN, "alone", "decode alone, last in each round"),
        Arm(DEDICATED, "dedicated", "our worker alone on the device"),
        Arm(DEDICATED_PEFT, "dedicated", "the best plain PEFT loop alone on the device"),
    ]


@dataclass(frozen=True, slots=True)
class Segment:
    """Time in which an arm played. Nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        source: of the decode pods' events, a prefix; "": nobody served.
        trainer: whose tasklets count; "": nobody trained.
        active_ns: from when to when the trainer might run.
        window_ns: what is counted.
        factor: of the objective that the policy had, in solo steps; 0: no policy shared the device,
            so the segment counts for each objective.
        slower: how slow the machine was before or after it, of what it usually is (`pace`).
        counts: False: it was played again for that.
    """

    round: int
    arm: str
    source: str
    trainer: str
    active_ns: tuple[int, int]
    window_ns: tuple[int, int]
    factor: float = 0.0
    slower: float = 1.0
    counts: bool = True

    @property
    def trained(self) -> tuple[str, str]:
        """Return whose tasklets count, and of which pod's slot; "": of none."""
        return self.trainer, self.source if self.trainer == HARVESTED_JOB else ""


@dataclass(frozen=True, slots=True)
class SegmentFigures:
    """Figures of a segment; None: the arm has no such figure. Times in milliseconds."""

    round: int
    arm: str
    steps: int = 0
    over: float | None = None  # share of the steps
    tpot_p50_ms: float | None = None
    tpot_p99_ms: float | None = None
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    requests: int | None = None  # that came within the window
    completed: int | None = None
    waited_for_kv: int | None = None
    tokens_per_second: float | None = None
    decode_busy: float | None = None  # share of the window with a step under way
    trainer_units: float | None = None  # with a tasklet under way, in the mean over the window


class TrainerProgress:
    """Tokens that a trainer had done at a moment, steps under way counted in part.

    A segment is a few dozen optimizer steps long, so whole steps alone would be off by several
    percent. Within a step our worker's tasklets say how far it was, each weighted by its tokens and
    the mean time of its phase for a token; a plain loop has none, and its steps count evenly over
    the time in which it might run.
    """

    def __init__(self, tasklets: Sequence[TaskletEvent], active: Sequence[tuple[int, int]]) -> None:
        self._active = sorted(active)
        self._spans = [(t.start_ns, t.end_ns, t.units) for t in tasklets]
        points = [(self._clock(at), tokens) for at, tokens in _points(tasklets)]
        self._at = [at for at, _ in points]
        self._tokens = [tokens for _, tokens in points]

    def _clock(self, at_ns: int) -> int:
        """Return how long the trainer might run until a moment."""
        return sum(max(0, min(at_ns, end) - begin) for begin, end in self._active)

    def at(self, at_ns: int) -> float:
        """Return the tokens done by then."""
        if not self._at:
            return 0.0
        now = self._clock(at_ns)
        i = bisect_right(self._at, now)
        if i == 0:
            return self._tokens[0]
        if i == len(self._at):
            return self._tokens[-1]
        before, after = self._at[i - 1], self._at[i]
        share = (now - before) / (after - before) if after > before else 1.0
        return self._tokens[i - 1] + share * (self._tokens[i] - self._tokens[i - 1])

    def busy_units(self, window_ns: tuple[int, int]) -> float:
        """Return on how many units a tasklet was under way, in the mean over a window."""
        return _mean_units(self._spans, window_ns)

    def rate(self, window_ns: tuple[int, int]) -> float:
        """Return tokens a second within a window."""
        begin, end = window_ns
        return (self.at(end) - self.at(begin)) / ((end - begin) / 1e9)


def _mean_units(spans: Iterable[tuple[int, int, int]], window_ns: tuple[int, int]) -> float:
    """Return the mean over a window of (begin, end, units)."""
    begin, end = window_ns
    return sum(n * max(0, min(b, end) - max(a, begin)) for a, b, n in spans) / (end - begin)


def _points(tasklets: Sequence[TaskletEvent]) -> list[tuple[int, float]]:
    """Return (moment, tokens) at the end of each tasklet of each finished step."""
    ordered = sorted(tasklets, key=lambda t: t.end_ns)
    sums: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for t in ordered:
        of_phase = sums[t.phase]
        of_phase[0] += t.end_ns - t.start_ns
        of_phase[1] += max(1, t.tokens)  # an optimizer step has none
    ns_a_token = {phase: max(1.0, took) / tokens for phase, (took, tokens) in sums.items()}

    def weight(t: TaskletEvent) -> float:
        return ns_a_token[t.phase] * max(1, t.tokens)

    points: list[tuple[int, float]] = []
    done = 0.0
    of_job: defaultdict[str, int] = defaultdict(int)  # a pod may have carried another one before
    for _, group in groupby(ordered, key=lambda t: (t.job_uid, t.epoch, t.step)):
        step = list(group)
        if step[-1].phase != "opt":
            continue  # not finished, or broken off
        before, after = of_job[step[0].job_uid], max(t.tokens_done for t in step)
        gained = max(0, after - before)
        of_job[step[0].job_uid] = before + gained
        if not points:
            points.append((step[0].start_ns, done))
        total, so_far = sum(weight(t) for t in step), 0.0
        for t in step:
            so_far += weight(t)
            points.append((t.end_ns, done + gained * so_far / total))
        done += gained
    return points


def figures_of(
    segment: Segment,
    steps: Sequence[StepEvent],
    requests: Sequence[RequestEvent],
    progress: Sequence[TrainerProgress],
    objective_ms: float,
) -> SegmentFigures:
    """Return a segment's figures.

    `steps` and `requests` are those of its decode pods, `progress` that of each of its trainers.
    """
    begin, end = segment.window_ns
    rate = sum(of.rate(segment.window_ns) for of in progress) if progress else None
    if not segment.source:
        return SegmentFigures(segment.round, segment.arm, tokens_per_second=rate)
    inside = [s for s in steps if begin <= s.end_ns <= end]
    tpots = sorted(s.tpot_ns / 1e6 for s in inside)
    came = [r for r in requests if begin <= r.arrived_ns <= end]
    # One that was hung up on before its first token has waited so long at least.
    ttfts = sorted(((r.first_token_ns or r.end_ns) - r.arrived_ns) / 1e6 for r in came)
    return SegmentFigures(
        round=segment.round,
        arm=segment.arm,
        steps=len(inside),
        over=sum(ms > objective_ms for ms in tpots) / len(tpots) if tpots else 0.0,
        tpot_p50_ms=percentile(tpots, 0.5) if tpots else None,
        tpot_p99_ms=percentile(tpots, 0.99) if tpots else None,
        ttft_p50_ms=percentile(ttfts, 0.5) if ttfts else None,
        ttft_p99_ms=percentile(ttfts, 0.99) if ttfts else None,
        requests=len(came),
        completed=sum(1 for r in requests if begin <= r.end_ns <= end and not r.error),
        waited_for_kv=waited_for_kv(came, steps),
        tokens_per_second=rate,
        decode_busy=_mean_units(((s.start_ns, s.end_ns, 1) for s in steps), segment.window_ns),
        trainer_units=sum(of.busy_units(segment.window_ns) for of in progress)
        if progress
        else None,
    )


def waited_for_kv(requests: Sequence[RequestEvent], steps: Sequence[StepEvent]) -> int:
    """Return how many requests were there when a step began that could not admit them.

    The engine admits in order of arrival whatever fits its KV, so such a step, which left requests
    waiting, left those out that had not got a token when it ended.
    """
    short = [(s.start_ns, s.end_ns) for s in steps if s.waiting]
    return sum(
        any(r.arrived_ns < start and end < (r.first_token_ns or r.end_ns) for start, end in short)
        for r in requests
    )


@dataclass(frozen=True)
class ComparisonSession:
    """Rounds that were played in one go: their segments, and the event logs below one folder.

    Attributes:
        segments: that count.
        played: all there are; a trainer's steps run through those that do not count as well.
    """

    folder: Path
    segments: tuple[Segment, ...]
    played: tuple[Segment, ...]

    @classmethod
    def all_of(cls, out: Path) -> list[ComparisonSession]:
        """Return the sessions of a comparison, in order; those that were broken off as well."""
        folders = sorted(out.glob(f"{SESSION}*"), key=lambda at: int(at.name[len(SESSION) :]))
        found = [(folder, _segments(folder / SEGMENTS)) for folder in folders]
        return [cls(at, tuple(s for s in played if s.counts), played) for at, played in found]

    def whole(self, turns: Sequence[tuple[str, float]]) -> ComparisonSession:
        """Return what counts of the rounds in which all of these turns were played.

        `turns`: arm and factor, as segments have them.
        """
        played = {(at.round, at.arm, at.factor) for at in self.segments}
        segments = tuple(
            at for at in self.segments if all((at.round, *turn) in played for turn in turns)
        )
        return replace(self, segments=segments)

    def at(self, factor: float) -> ComparisonSession:
        """Return what counts for one of several objectives."""
        segments = tuple(at for at in self.segments if at.factor in (0.0, factor))
        return replace(self, segments=segments)

    def figures(self, arms: Sequence[Arm], objective_ms: float) -> list[SegmentFigures]:
        """Return the figures of each of these arms in each segment that counts.

        Raises ValueError where a policy was not in force in the window that was to be its own, or
        had another objective.
        """
        by_name = {arm.name: arm for arm in arms}
        pods = _Pods.read(self.folder / PODS)
        progress = {
            trained: [
                TrainerProgress(of, [at.active_ns for at in self.played if at.trained == trained])
                for of in self._tasklets(trained, pods)
            ]
            for trained in {at.trained for at in self.segments if at.trainer}
        }
        found = []
        for segment in self.segments:
            arm = by_name.get(segment.arm)
            if arm is None:
                continue
            if arm.policy:
                pods.check_policy(segment, arm.policy, objective_ms)
            steps, requests = pods.of(segment)
            found.append(
                figures_of(
                    segment, steps, requests, progress.get(segment.trained, []), objective_ms
                )
            )
        return found

    def steps_of(self, round_: int, arm: str) -> tuple[Segment, list[StepEvent]] | None:
        """Return the decode steps of an arm in a round, to be drawn; None: nobody served."""
        for segment in self.segments:
            if (segment.round, segment.arm) == (round_, arm) and segment.source:
                begin, end = segment.window_ns
                steps, _ = _Pods.read(self.folder / PODS, segment.source).of(segment)
                return segment, [s for s in steps if begin <= s.end_ns <= end]
        return None

    def _tasklets(self, trained: tuple[str, str], pods: _Pods) -> list[list[TaskletEvent]]:
        """Return the tasklets of each of an arm's trainers; `trained`: see `Segment`."""
        trainer, pod = trained
        if pod:
            return [pods.tasklets(pod)]
        return [
            [event for _, event in read_events(folder) if isinstance(event, TaskletEvent)]
            for folder in sorted((self.folder / TRAINERS / folder_of(trainer)).iterdir())
        ]


def folder_of(arm: str) -> str:
    """Return the name of an arm's folder."""
    return arm.replace(" ", "-")


def _segments(path: Path) -> tuple[Segment, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return ()
    found = []
    for line in lines:
        fields = json.loads(line)
        for name in ("active_ns", "window_ns"):
            fields[name] = tuple(fields[name])
        found.append(Segment(**fields))
    return tuple(found)


class _Pods:
    """Events of the pods of a session, by pod."""

    def __init__(self) -> None:
        self._steps: defaultdict[str, list[StepEvent]] = defaultdict(list)
        self._requests: defaultdict[str, list[RequestEvent]] = defaultdict(list)
        self._policies: defaultdict[str, list[MarkEvent]] = defaultdict(list)
        self._tasklets: defaultdict[str, list[TaskletEvent]] = defaultdict(list)

    @classmethod
    def read(cls, folder: Path, only: str = "") -> _Pods:
        """Read the logs of each pod below a folder, or of the one of that name."""
        found = cls()
        for pod in folder.glob(f"{only or '*'}-0"):
            for _, event in read_events(pod):
                match event:
                    case StepEvent():
                        found._steps[pod.name].append(event)
                    case RequestEvent():
                        found._requests[pod.name].append(event)
                    case TaskletEvent():
                        found._tasklets[pod.name].append(event)
                    case MarkEvent(what="policy"):
                        found._policies[pod.name].append(event)
                    case _:
                        pass
        return found

    def tasklets(self, pod: str) -> list[TaskletEvent]:
        """Return the tasklets of the job in a pod's slot; `pod`: a segment's source."""
        return self._tasklets[f"{pod}-0"]

    def of(self, segment: Segment) -> tuple[list[StepEvent], list[RequestEvent]]:
        """Return what a segment's pod did while the arm was at its turn."""
        begin, end = segment.active_ns
        pod = f"{segment.source}-0"
        return (
            [s for s in self._steps[pod] if begin <= s.start_ns <= end],
            [r for r in self._requests[pod] if begin <= r.arrived_ns <= end],
        )

    def check_policy(self, segment: Segment, policy: str, objective_ms: float) -> None:
        """Raise ValueError unless the segment's pod followed a policy through its window."""
        wanted = f": {policy}, harvest, {round(1000 * objective_ms)} us"
        begin, end = segment.active_ns[0], segment.window_ns[1]
        marks = [m for m in self._policies[f"{segment.source}-0"] if begin <= m.at_ns <= end]
        last = max(marks, key=lambda mark: mark.at_ns, default=None)
        in_time = last is not None and last.at_ns <= segment.window_ns[0]
        if last is None or not in_time or not last.detail.endswith(wanted):
            told = last.detail if last else "no policy was received"
            said = f"policy {policy} was not in force at {objective_ms:g} ms ({told})"
            raise ValueError(f"round {segment.round}: {said}")
