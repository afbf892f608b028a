"""The sidecar of a simulated slot: it loads, trains, saves and stops jobs as the operator says.

What it says of a job is a `JobPlacement`, as the operator knows one from a real sidecar's reports.
GPUs that are not simulated step by step have sidecars too: their jobs train at the pace of the
simulated GPU that they are like.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from math import ceil

from windrow_operator.model import Holder, JobPlacement, RunState, WorkerProgress
from windrow_simulator.decode import DecodeGpu

STEP_TOKENS = 16_384  # of an optimizer step: eight micro-batches of 2,048


@dataclass(frozen=True, slots=True)
class JobTimes:
    """Costs of a stay besides training. Assumed: no GPU has been measured.

    Attributes:
        load_s: from the assignment until the job trains, each time that it is placed.
        save_s: to write a checkpoint when it is asked to stop.
        checkpoint_s: between two checkpoints while it trains.
    """

    load_s: float = 20.0
    save_s: float = 2.0
    checkpoint_s: float = 60.0


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """A job on a slot, from its assignment to its last word."""

    run: JobPlacement
    holder: Holder
    tokens: float  # of the whole job
    done: float  # of these, made so far
    until_s: float  # it loads, or saves, until then
    saved: float = 0.0  # tokens in its newest checkpoint
    saved_at_s: float = 0.0
    # Of all stays so far: how long it trained, and how long slots spent on stopping or loading it
    # again while nobody trained there.
    trained_s: float = 0.0
    lost_s: float = 0.0

    @property
    def trains(self) -> bool:
        """True where it has loaded and was not asked to stop."""
        return self.run.state is RunState.RUNNING and self.run.stop_asked_at is None


class GpuShare:
    """Simulated GPU, with the slots of the cluster that it represents.

    Its worker trains while any of them has a job that does.
    """

    def __init__(self, gpu: DecodeGpu, slots: int) -> None:
        self.gpu, self.slots = gpu, slots
        self.promise = 0.0
        self._seen_tokens = gpu.worker.tokens
        self._epoch = 0
        self.train(0)

    def train(self, slots: int) -> None:
        """Let so many of its slots have a job that trains from now on."""
        worker = self.gpu.worker
        self.gpu.counted_share = slots / self.slots
        if bool(slots) != bool(worker.job_epoch):
            self._epoch += 1
            worker.assign(self._epoch if slots else 0)

    def take_tokens(self) -> float:
        """Return what the worker has made since this was asked last."""
        made, self._seen_tokens = self.gpu.worker.tokens - self._seen_tokens, self.gpu.worker.tokens
        return made

    def predict(self) -> float:
        """Return what its sidecar says that a worker would get, tokens a second."""
        hook = self.gpu.hook
        return hook.predicted_tokens_per_second(hook.snapshot())

    @property
    def refusal(self) -> str:
        """Reason why nothing is harvested there; "" where it is."""
        controller = self.gpu.hook.controller
        return controller.refusal or controller.guard.reason

    @property
    def is_full(self) -> bool:
        """True where decode has left no chunk that could be lent."""
        free, _, lent, _, _ = self.gpu.arena.counts()
        return free + lent == 0


@dataclass(slots=True, eq=False)
class SimulatedSidecar:
    """Simulated sidecar of one slot."""

    key: str
    node: str
    share: GpuShare
    times: JobTimes
    stays: list[SimulatedRun] = field(default_factory=list)

    def stop(self, uid: str, reason: str, now: datetime, now_s: float) -> None:
        """Save a checkpoint and end; what has not loaded yet ends at once."""
        stay = self.stay_of(uid)
        if stay is None or stay.run.stop_asked_at is not None:
            return
        loads = stay.run.state is RunState.ASSIGNED
        stay.until_s = now_s if loads else now_s + self.times.save_s
        stay.run = replace(stay.run, stop_asked_at=now, stop_sent_at=now, stop_reason=reason)

    def stay_of(self, uid: str) -> SimulatedRun | None:
        """Return a job's stay; None: it is not here."""
        return next((stay for stay in self.stays if stay.run.uid == uid), None)

    def forget(self, uid: str) -> None:
        """Drop a job: its last word was heard, or it is to end as it is."""
        self.stays = [stay for stay in self.stays if stay.run.uid != uid]

    @property
    def trains(self) -> bool:
        """True where any job trains here."""
        return any(stay.trains for stay in self.stays)

    def pass_time(self, now: datetime, now_s: float, elapsed_s: float, made: float) -> set[str]:
        """Train until now, with `made` tokens of the worker; return the jobs with news (UIDs)."""
        training = [stay for stay in self.stays if stay.trains]
        for stay in training:
            stay.done = min(stay.tokens, stay.done + made / len(training))
            stay.trained_s += elapsed_s
            if now_s - stay.saved_at_s >= self.times.checkpoint_s:
                stay.saved, stay.saved_at_s = stay.done, now_s
        if not training:
            for stay in self.stays:
                if stay.run.epoch > 1 or stay.run.stop_asked_at is not None:
                    stay.lost_s += elapsed_s / len(self.stays)
        return {stay.run.uid for stay in self.stays if self._turn(stay, now, now_s)}

    @staticmethod
    def _turn(stay: SimulatedRun, now: datetime, now_s: float) -> bool:
        """Bring a stay to where it is by now; return whether its state is another one."""
        before = after = stay.run.state
        over = now_s >= stay.until_s
        if before is RunState.RUNNING and stay.done >= stay.tokens:
            after = RunState.SUCCEEDED
        elif stay.run.stop_asked_at is not None:
            after = RunState.STOPPED if over else before
            if over and before is RunState.RUNNING:
                stay.saved = stay.done
        elif before is RunState.ASSIGNED:
            after = RunState.RUNNING if over else before
            stay.saved_at_s = now_s
        # What loads is heard of all the while.
        since = stay.run.since if after is before is not RunState.ASSIGNED else now
        stay.run = replace(
            stay.run, state=after, since=since, seen_at=now, progress=_progress(stay)
        )
        return after is not before


def _progress(stay: SimulatedRun) -> WorkerProgress:
    return WorkerProgress(
        step=int(stay.done // STEP_TOKENS),
        total_steps=ceil(stay.tokens / STEP_TOKENS),
        tokens=int(stay.done),
        checkpoint_step=int(stay.saved // STEP_TOKENS),
        checkpoint_path="checkpoint" if stay.saved else "",
    )
