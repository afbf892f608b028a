"""FinetuneJobs on a simulated cluster: placed as the operator places them, until they are done.

Every few seconds the waiting jobs are offered the slots, the more important ones first, and
`windrow_operator.planning.place` says where each goes. GPUs that are not simulated step by step
take jobs as well, at the pace of the simulated GPU that they are like.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from statistics import mean

from windrow.crd import FinetuneJobSpec, parse_job_spec, parse_policy_spec
from windrow_operator.model import Base, CheckedPolicy, EffectivePolicy, Holder, Job, Slot
from windrow_operator.planning import Placement, place
from windrow_simulator.decode import DecodeGpu

_BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
_NAMESPACE, _POLICY, _FOLDER = "simulated", "simulated", "/adapters"
URGENT = 1000  # priority of the urgent jobs; of the others 0


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A job, and how far it is. Times in seconds since the simulation began."""

    job: Job
    tokens: float
    arrived_s: float
    done: float = 0.0
    placed_s: float = -1.0
    ended_s: float = -1.0


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What became of the jobs.

    Attributes:
        wait_s: mean time until a job that was placed had its slot.
        turnaround_s: mean time from submission to the end, of those that ended.
        urgent_wait_s: `wait_s` of the urgent ones; of none: 0.
    """

    submitted: int
    ended: int
    running: int
    waiting: int
    wait_s: float
    urgent_wait_s: float
    turnaround_s: float
    tokens: float


@dataclass(slots=True)
class _Place:
    """A slot of the cluster: a simulated GPU, or one that is like it."""

    key: str
    like: DecodeGpu
    simulated: bool
    jobs: list[SimulatedJob] = field(default_factory=list)
    predicted: float = 0.0
    seen_tokens: float = 0.0


class JobQueue:
    """Jobs that come, wait, run and end.

    Args:
        gpus: simulated ones.
        cluster: GPUs in all; those beyond `gpus` are like these, in turn.
        model: that decode serves and jobs train.
        jobs: how many come.
        tokens: of each.
        within_s: they come at random moments until then.
        urgent: share of them with a high priority.
        jobs_per_slot: that take turns on a slot.
        seed: of the moments.
    """

    def __init__(
        self,
        gpus: list[DecodeGpu],
        *,
        cluster: int,
        model: str,
        jobs: int,
        tokens: float,
        within_s: float,
        urgent: float = 0.1,
        jobs_per_slot: int = 1,
        seed: int = 7,
    ) -> None:
        self._model, self._per_slot = model, jobs_per_slot
        self._terms = _terms()
        self._places = {
            f"{_NAMESPACE}/gpu-{i:06}": _Place(
                f"{_NAMESPACE}/gpu-{i:06}", gpus[i % len(gpus)], i < len(gpus)
            )
            for i in range(cluster)
        }
        draw = random.Random(seed)
        spec = _job_spec(model)
        moments = sorted(draw.random() * within_s for _ in range(jobs))
        self.jobs = [
            SimulatedJob(_job(i, spec, at_s, draw.random() < urgent), tokens, at_s)
            for i, at_s in enumerate(moments)
        ]
        self._waiting: list[SimulatedJob] = []
        self._coming = list(reversed(self.jobs))
        self._epoch = 0
        for gpu in gpus:
            gpu.worker.assign(0)

    def turn(self, now_s: float, elapsed_s: float) -> None:
        """Count what was done since the last turn, end what is done, place what waits."""
        for at in self._places.values():
            self._progress(at, now_s, elapsed_s)
        while self._coming and self._coming[-1].arrived_s <= now_s:
            self._waiting.append(self._coming.pop())
        self._waiting.sort(key=lambda j: (-j.job.priority, j.arrived_s, j.job.key))
        if self._waiting:
            self._place(now_s)

    def _progress(self, at: _Place, now_s: float, elapsed_s: float) -> None:
        hook, worker = at.like.hook, at.like.worker
        if at.simulated:
            at.predicted = hook.predicted_tokens_per_second(hook.snapshot())
            made = worker.tokens - at.seen_tokens
            at.seen_tokens = worker.tokens
        else:
            twin = self._places[f"{_NAMESPACE}/gpu-{self._index(at):06}"]
            at.predicted = twin.predicted
            made = worker.tokens - at.seen_tokens if twin.jobs else at.predicted * elapsed_s
            at.seen_tokens = worker.tokens
        for job in list(at.jobs):
            job.done = min(job.tokens, job.done + made / len(at.jobs))
            if job.done >= job.tokens:
                job.ended_s = now_s
        at.jobs = [job for job in at.jobs if job.ended_s < 0]
        if at.simulated and not at.jobs:
            worker.assign(0)

    def _index(self, at: _Place) -> int:
        simulated = sum(1 for each in self._places.values() if each.simulated)
        return int(at.key.rpartition("-")[2]) % simulated

    def _place(self, now_s: float) -> None:
        slots = {key: self._slot(at) for key, at in self._places.items()}
        left: list[SimulatedJob] = []
        for waiting in self._waiting:
            choice = place(waiting.job, slots.values())
            if not isinstance(choice, Placement):
                left.append(waiting)
                continue
            at = self._places[choice.slot.key]
            at.jobs.append(waiting)
            waiting.placed_s = now_s
            slots[at.key] = self._slot(at)
            if at.simulated:
                self._epoch += 1
                at.like.worker.assign(self._epoch)
        self._waiting = left

    def _slot(self, at: _Place) -> Slot:
        return Slot(
            at.key,
            model=self._model,
            breaker=at.like.hook.controller.guard.reason,
            predicted_tokens_per_second=at.predicted,
            terms=self._terms,
            holders=tuple(
                Holder(j.job.uid, j.job.name, Base.of(j.job.spec) if j.job.spec else None)
                for j in at.jobs
            ),
            max_jobs=self._per_slot,
            outputs=(_FOLDER,),
        )

    def figures(self) -> JobFigures:
        """Return what has become of the jobs so far."""
        placed = [j for j in self.jobs if j.placed_s >= 0]
        ended = [j for j in placed if j.ended_s >= 0]
        urgent = [j for j in placed if j.job.priority]
        come = len(self.jobs) - len(self._coming)
        return JobFigures(
            submitted=come,
            ended=len(ended),
            running=len(placed) - len(ended),
            waiting=len(self._waiting),
            wait_s=mean(j.placed_s - j.arrived_s for j in placed) if placed else 0.0,
            urgent_wait_s=mean(j.placed_s - j.arrived_s for j in urgent) if urgent else 0.0,
            turnaround_s=mean(j.ended_s - j.arrived_s for j in ended) if ended else 0.0,
            tokens=sum(j.done for j in self.jobs),
        )


def _terms() -> EffectivePolicy:
    spec = parse_policy_spec(
        {"selector": {"matchLabels": {"app": "decode"}}, "objective": {"tpot": "40ms"}}
    )
    checked = CheckedPolicy(_NAMESPACE, _POLICY, "uid", 1, "2025-01-01T00:00:00Z", spec)
    return EffectivePolicy(checked, "harvest")


def _job_spec(model: str) -> FinetuneJobSpec:
    return parse_job_spec(
        {
            "model": {"name": model},
            "dataset": {"source": "/rows.jsonl"},
            "training": {"maxSteps": 1},
            "output": {"destination": f"{_FOLDER}/adapter"},
        }
    )


def _job(number: int, spec: FinetuneJobSpec, at_s: float, urgent: bool) -> Job:
    return Job(
        namespace=_NAMESPACE,
        name=f"job-{number:06}",
        uid=f"job-{number:06}",
        generation=1,
        created=_BEGIN + timedelta(seconds=at_s),
        spec=spec,
        priority=URGENT if urgent else 0,
    )
