"""FinetuneJobs on a simulated cluster: the operator's own decisions about them, in simulated time.

Once a second each job has its turn as in production: `windrow_operator.reconcile` says what is next
for it (with `planning.place` where it waits), `preemption.victims` which jobs give way to one of
higher priority, `moving.JobMoves` which leave a slot where decode leaves them little. What the
operator writes into a job's status is kept as the API server would; sidecars are simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from statistics import mean
from typing import Any

from windrow.conditions import Reason, is_finished
from windrow.crd import FinetuneJobSpec, parse_job_spec, parse_policy_spec
from windrow_operator.model import (
    Base,
    CheckedPolicy,
    EffectivePolicy,
    Holder,
    Job,
    JobPlacement,
    RunState,
    Slot,
)
from windrow_operator.moving import JobMoves
from windrow_operator.preemption import victims
from windrow_operator.reconcile import Actions, Timeouts, reconcile
from windrow_operator.reports import smoothed_promise
from windrow_operator.slot_table import SlotTable
from windrow_simulator.agent import GpuShare, JobTimes, SimulatedRun, SimulatedSidecar
from windrow_simulator.decode import DecodeGpu
from windrow_simulator.figures import JobFigures, PriorityFigures
from windrow_simulator.traffic import JobArrival

_BEGIN = datetime(2025, 1, 1, tzinfo=UTC)
_NAMESPACE, _POLICY, _FOLDER = "simulated", "simulated", "/adapters"
GPUS_OF_A_NODE = 8
_MOVES_EVERY_S = 10.0
# Sidecars report once a second, in a large cluster so seldom that 50 a second do.
_REPORTS_PER_SECOND = 50.0


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A job as the API server holds it, and how it fares. Moments: seconds since the beginning."""

    job: Job
    tokens: float
    arrived_s: float
    saved: float = 0.0
    done: float = 0.0
    waited_s: float = 0.0  # without a slot, so far
    ended_s: float = -1.0
    trained_s: float = 0.0
    lost_s: float = 0.0
    due_s: float = 0.0  # when it has its next turn, if nothing happens before

    @property
    def lost_tokens(self) -> float:
        """Tokens that it would have made in the time that was lost, at its own pace so far."""
        return self.lost_s * self.done / self.trained_s if self.trained_s else 0.0

    @property
    def finished(self) -> bool:
        """True where it has succeeded or failed."""
        return is_finished(self.job.status.get("conditions"))

    def evicted(self, reason: Reason) -> int:
        """Return how often it lost its slot for that reason, by its status."""
        counts = self.job.status.get("evictions") or ()
        return next((int(c["count"]) for c in counts if c["reason"] == reason), 0)


@dataclass(slots=True)
class _Looked:
    """Observations of the last turns."""

    at_s: float = 0.0
    reports_s: float = -1e9
    moves_s: float = 0.0
    room: int = -1
    runs: dict[str, JobPlacement] = field(default_factory=dict)


class JobQueue:
    """Jobs that come, wait, run, give way, move and end.

    Args:
        gpus: simulated ones.
        cluster: GPUs in all; those beyond `gpus` are like these, in turn.
        model: that decode serves and jobs train.
        jobs: that come.
        times: what a stay costs besides training.
        jobs_per_slot: that take turns on a slot.
        preemption: jobs of higher priority take the slots of lower ones.
    """

    def __init__(
        self,
        gpus: Sequence[DecodeGpu],
        *,
        cluster: int,
        model: str,
        jobs: Sequence[JobArrival],
        times: JobTimes | None = None,
        jobs_per_slot: int = 1,
        preemption: bool = True,
    ) -> None:
        self._model, self._per_slot = model, jobs_per_slot
        self._terms, self._timeouts, self._times = _terms(), Timeouts(), times or JobTimes()
        self._shares = [
            GpuShare(gpu, len(range(i, cluster, len(gpus)))) for i, gpu in enumerate(gpus)
        ]
        self._sidecars: dict[str, SimulatedSidecar] = {}
        for i in range(cluster):
            key, node = f"{_NAMESPACE}/gpu-{i:06}", f"node-{i // GPUS_OF_A_NODE:05}"
            share = self._shares[i % len(gpus)]
            self._sidecars[key] = SimulatedSidecar(key, node, share, self._times)
        self._table = SlotTable(self._view(at) for at in self._sidecars.values())
        spec = _job_spec(model)
        least = min((arrival.priority for arrival in jobs), default=0)
        self.jobs = [
            SimulatedJob(
                _job(i, spec, arrival, may_preempt=preemption and arrival.priority > least),
                arrival.tokens,
                arrival.at_s,
            )
            for i, arrival in enumerate(sorted(jobs, key=lambda arrival: arrival.at_s))
        ]
        self._coming = list(reversed(self.jobs))
        self._there: dict[str, SimulatedJob] = {}  # by UID; not finished
        self._moves, self._looked = JobMoves(), _Looked()

    def turn(self, now_s: float) -> None:
        """Let sidecars report what was done until now, and the operator act on it."""
        elapsed_s = now_s - self._looked.at_s
        self._looked.at_s = now_s
        now = _BEGIN + timedelta(seconds=now_s)
        due = self._reports(now, now_s, elapsed_s)
        while self._coming and self._coming[-1].arrived_s <= now_s:
            come = self._coming.pop()
            self._there[come.job.uid] = come
            come.waited_s = now_s - come.arrived_s
            due.add(come.job.uid)
        due |= self._preempt() | self._move(now, now_s)
        due |= {uid for uid, each in self._there.items() if each.due_s <= now_s}
        # What ends its stay frees its slot first; then those that wait come, as in the operator's
        # queue the more important ones first.
        self._take_turns((each for each in self._placed() if each.job.uid in due), now, now_s)
        waiting = [each for each in self._there.values() if not each.job.slot]
        if self._table.room != self._looked.room or any(each.job.uid in due for each in waiting):
            self._looked.room = self._table.room
            waiting.sort(key=lambda each: (-each.job.priority, each.job.created, each.job.key))
            self._take_turns(waiting, now, now_s)
        for share in self._shares:
            like = (at for at in self._sidecars.values() if at.share is share)
            share.train(sum(at.trains for at in like))

    def _placed(self) -> list[SimulatedJob]:
        return [each for each in self._there.values() if each.job.slot]

    def _reports(self, now: datetime, now_s: float, elapsed_s: float) -> set[str]:
        """Take up what sidecars say; return the UIDs of the jobs that something is new of."""
        interval_s = max(1.0, len(self._sidecars) / _REPORTS_PER_SECOND)
        reports = now_s - self._looked.reports_s >= interval_s
        made = {id(share): share.take_tokens() for share in self._shares}
        if reports:
            since = timedelta(seconds=now_s - self._looked.reports_s)
            self._looked.reports_s = now_s
            for share in self._shares:
                share.promise = smoothed_promise(share.promise, share.predict(), since)
        news: set[str] = set()
        for at in self._sidecars.values():
            if at.stays:
                news |= at.pass_time(now, now_s, elapsed_s, made[id(at.share)])
            for stay in at.stays:
                each = self._there[stay.run.uid]
                each.done, each.saved = stay.done, stay.saved
                each.trained_s, each.lost_s = stay.trained_s, stay.lost_s
                self._looked.runs[stay.run.uid] = stay.run
            if reports:
                self._table.put(self._view(at))
        for each in self._there.values():
            if not each.job.slot:
                each.waited_s += elapsed_s
        return news

    def _preempt(self) -> set[str]:
        """Choose which jobs give way to one that waits; what was chosen stays so while it waits."""
        waiting = [each.job for each in self._there.values() if not each.job.slot]
        urgent = sorted(
            (job for job in waiting if job.may_preempt),
            key=lambda job: (-job.priority, job.created, job.key),
        )
        placed = [each.job for each in self._placed()]
        if not urgent and not any(job.preempted_by for job in placed):
            return set()
        wanted = {job.key for job in waiting}
        chosen = {job.uid: job.preempted_by for job in placed if job.preempted_by in wanted}
        chosen |= victims(placed, self._table, self._looked.runs, urgent)
        return self._mark("preempted_by", chosen)

    def _move(self, now: datetime, now_s: float) -> set[str]:
        """Choose which jobs leave a slot where decode leaves them little."""
        if now_s - self._looked.moves_s < _MOVES_EVERY_S:
            return set()
        self._looked.moves_s = now_s
        placed = [each.job for each in self._placed()]
        chosen = {job.uid: job.moves for job in placed if job.moves}
        return self._mark("moves", self._moves.due(placed, self._table, now) | chosen)

    def _mark(self, what: str, chosen: dict[str, str]) -> set[str]:
        changed: set[str] = set()
        for each in self._placed():
            said = chosen.get(each.job.uid, "")
            if getattr(each.job, what) != said:
                marks: dict[str, Any] = {what: said}
                each.job = replace(each.job, **marks)
                changed.add(each.job.uid)
        return changed

    def _take_turns(self, jobs: Iterable[SimulatedJob], now: datetime, now_s: float) -> None:
        for each in jobs:
            run = self._looked.runs.get(each.job.uid)
            current = run if run is not None and run.epoch == each.job.epoch else None
            actions = reconcile(each.job, current, self._table, now, self._timeouts)
            self._carry_out(each, actions, now, now_s)

    def _carry_out(self, each: SimulatedJob, actions: Actions, now: datetime, now_s: float) -> None:
        job, before = each.job, self._sidecars.get(each.job.slot)
        each.due_s = 1e18 if actions.wake_at is None else (actions.wake_at - _BEGIN).total_seconds()
        if actions.finalizer is not None:
            job = replace(job, has_finalizer=actions.finalizer)
        if actions.status is not None:
            job = replace(job, status=actions.status)
        if before is not None and not job.slot:
            before.forget(job.uid)
            job = replace(job, preempted_by="", moves="")
        each.job = job
        for command in actions.commands:
            at = self._sidecars[command.slot]
            if command.action == "ASSIGN":
                run = JobPlacement(
                    *(job.uid, command.epoch, command.slot, RunState.ASSIGNED, now),
                    resumed=each.saved > 0,
                    checkpoint_before=0,
                )
                self._looked.runs[job.uid] = run
                at.stays.append(
                    SimulatedRun(
                        *(run, _holder(job), each.tokens, each.saved),
                        until_s=now_s + self._times.load_s,
                        saved=each.saved,
                        trained_s=each.trained_s,
                        lost_s=each.lost_s,
                    )
                )
            elif command.action == "STOP":
                at.stop(job.uid, command.reason, now, now_s)
            else:
                at.forget(job.uid)
            self._table.put(self._view(at))
        if before is not None:
            self._table.put(self._view(before))
        if each.finished:
            each.ended_s = now_s
            del self._there[job.uid]

    def _view(self, at: SimulatedSidecar) -> Slot:
        """Return a slot as placement sees it."""
        return Slot(
            at.key,
            node=at.node,
            model=self._model,
            breaker=at.share.refusal,
            memory_full=at.share.is_full,
            predicted_tokens_per_second=at.share.promise,
            terms=self._terms,
            holders=tuple(stay.holder for stay in at.stays),
            max_jobs=self._per_slot,
            outputs=(_FOLDER,),
        )

    def figures(self) -> JobFigures:
        """Return what has become of the jobs so far, the most important ones first."""
        come = [each for each in self.jobs if each.arrived_s <= self._looked.at_s]
        priorities = sorted({each.job.priority for each in self.jobs}, reverse=True)
        return JobFigures(
            tuple(
                _figures(str(value), [each for each in come if each.job.priority == value])
                for value in priorities
            ),
            _figures("all", come),
        )


def _figures(priority: str, jobs: Sequence[SimulatedJob]) -> PriorityFigures:
    ended = [each for each in jobs if each.ended_s >= 0]
    running = [each for each in jobs if each.job.slot]
    return PriorityFigures(
        priority,
        submitted=len(jobs),
        ended=len(ended),
        running=len(running),
        waiting=len(jobs) - len(ended) - len(running),
        wait_s=mean(each.waited_s for each in jobs) if jobs else 0.0,
        longest_wait_s=max((each.waited_s for each in jobs), default=0.0),
        turnaround_s=mean(each.ended_s - each.arrived_s for each in ended) if ended else 0.0,
        preemptions=sum(each.evicted(Reason.PREEMPTED) for each in jobs),
        moves=sum(each.evicted(Reason.DECODE_BUSY) for each in jobs),
        lost_s=sum(each.lost_s for each in jobs),
        lost_tokens=sum(each.lost_tokens for each in jobs),
        tokens=sum(each.done for each in jobs),
    )


def _holder(job: Job) -> Holder:
    return Holder(job.uid, job.key, Base.of(job.spec) if job.spec else None)


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


def _job(number: int, spec: FinetuneJobSpec, arrival: JobArrival, *, may_preempt: bool) -> Job:
    name = f"job-{number:06}"
    return Job(
        namespace=_NAMESPACE,
        name=name,
        uid=name,
        generation=1,
        created=_BEGIN + timedelta(seconds=arrival.at_s),
        spec=spec,
        priority=arrival.priority,
        may_preempt=may_preempt,
    )
