"""Run several jobs over one base model in one worker, in turns (FineInfer's multiplexing).

A turn begins and ends at tasklet boundaries: between two groups of micro-batches while both jobs
may run, or wherever the present job  ends or gets a command to pause. What the one job has on the
device goes to the host, the other's comes back.

The assigner of jobs may rely on this: every job keeps its own stream, position, folder, reporter,
ending and commands, so each can be paused, checkpointed, stopped and fenced alone; one that fails
ends alone. All of them run under the one gate of their device, one tasklet at a time. A job may
come later, between two turns, when nothing of the others is on the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from windrow.protocol import Ending
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.memory.training_memory import TrainingMemory
from windrow_sidecar.heap import settle_heap

log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


@dataclass(eq=False, slots=True)
class JobHandle:
    """One job of a multiplexer.

    Attributes:
        name: for logs.
        stream, memory, runner: its own.
        failed: tells its reporter of an error; returns what that means for the job.
        ended: called once with its ending; lets go of what the job holds.
        weight: of its share.
        head_start: tokens that count as had already.
        acts: called before it does anything.
    """

    name: str
    stream: TaskletStream
    memory: TrainingMemory
    runner: Runner
    failed: Callable[[Exception], Ending]
    ended: Callable[[Ending], None]
    weight: float = 1.0
    head_start: int = 0
    acts: Callable[[], None] = _nothing

    def share(self) -> JobShare:
        """Return the share as the scheduler sees it."""
        may_run = not self.runner.told_to_pause
        return JobShare(self.head_start + self.stream.tokens_seen, self.weight, may_run)


Arrival = Callable[[], JobHandle | None]  # makes a job join; None: it has ended, as has been told


def _nobody() -> Arrival | None:
    return None


class JobMultiplexer:
    """Run jobs in turns until each has ended.

    Args:
        jobs: their trees of modules share weights, nothing else (see `twin`).
        arrivals: returns the next job that can join now, None where there is none. It may wait
            while there is no job to run.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        jobs: Sequence[JobHandle] = (),
        *,
        arrivals: Callable[[], Arrival | None] = _nobody,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live, self._arrivals, self._clock = list(jobs), arrivals, clock
        self._now: JobHandle | None = None
        self._starved: set[JobHandle] = set()  # held up for memory since another had a turn
        self._turn_began_s = self._switch_s = 0.0

    def run(self) -> None:
        """Run all; an error of one ends that one."""
        for job in tuple(self._live):
            self._begin(job)
        self._admit()
        while self._live:
            # Those that wait hear of signals and commands as soon as the one that runs.
            for job in tuple(self._live):
                self._act(job, job.runner.obey)
            if (chosen := self._whose_turn()) is not None:
                self._act(chosen, chosen.runner.turn)
                if not self._gives_way(chosen):
                    self._act(chosen, chosen.runner.wait)
            self._admit()

    def _admit(self) -> None:
        """Take those that have come; nobody is on the device while they are attached."""
        while (arrival := self._arrivals()) is not None:
            self._leave()
            if (job := arrival()) is not None:
                job.head_start = fair_start(job.weight, [one.share() for one in self._live])
                self._live.append(job)
                self._begin(job)

    def _begin(self, job: JobHandle) -> None:
        self._act(job, job.runner.begin)
        if job in self._live:
            job.memory.offload()

    def _whose_turn(self) -> JobHandle | None:
        """Return the job to run now, at home on the device; None: none is left."""
        if not self._live:
            return None
        if not self._may_switch():
            return self._now
        if self._now not in self._starved:
            self._starved.clear()
        able = [job for job in self._live if job not in self._starved] or self._live
        at = next_turn([job.share() for job in able])
        # Where all are told to pause, one of them waits for all.
        chosen = able[at or 0]
        if chosen is not self._now:
            self._switch(chosen)
        return chosen

    def _may_switch(self) -> bool:
        now = self._now
        if now is None or now.runner.told_to_pause or now in self._starved:
            return True
        lasted_s = self._clock() - self._turn_began_s
        return now.stream.between_micro_batches and turn_is_over(lasted_s, self._switch_s)

    def _gives_way(self, job: JobHandle) -> bool:
        """Return whether `job` was held up for memory and must give way to another job."""
        if job not in self._live or not job.runner.starving:
            return False
        self._starved.add(job)
        if any(one.share().may_run for one in self._live if one not in self._starved):
            return True
        self._starved.clear()
        return False

    def _switch(self, to: JobHandle) -> None:
        began_s = self._clock()
        self._leave()
        to.acts()
        to.memory.restore()
        self._now, self._turn_began_s = to, self._clock()
        self._switch_s = self._turn_began_s - began_s

    def _leave(self) -> None:
        if self._now is not None:
            self._now.memory.offload()
            self._now = None

    def _act(self, job: JobHandle, act: Callable[[], Ending | None]) -> None:
        """Let a job that is still there act; whatever goes wrong is its own end."""
        if job not in self._live:
            return
        job.acts()
        try:
            ending = act()
        except Exception as error:
            # The edge of a job: the others know nothing of it.
            log.exception("job %s failed", job.name)
            ending = job.failed(error)
        if ending is not None:
            self._live.remove(job)
            self._starved.discard(job)
            self._now = None if self._now is job else self._now
            job.memory.release()
            job.ended(ending)
            del job
            settle_heap()


def worst(endings: Iterable[Ending]) -> Ending:
    """Return the worst of several endings; one that needs a person comes first."""
    order = (
        Ending.USER_ERROR,
        Ending.FAILED,
        Ending.FENCED,
        Ending.DECODE_GONE,
        Ending.STOPPED,
        Ending.SUCCEEDED,
    )
    return min(endings, key=order.index)


# A turn lasts so many times as long as the switch that began it took: switching costs 5% at most.
TURN_PER_SWITCH = 20.0


@dataclass(frozen=True, slots=True)
class JobShare:
    """A job's share of the worker, as the choice of the next turn needs it.

    Attributes:
        tokens: that it has had so far in this worker, evaluations included.
        weight: of its share; 1 is usual.
        may_run: nothing holds it back but the device.
    """

    tokens: int
    weight: float = 1.0
    may_run: bool = True


def next_turn(jobs: Sequence[JobShare]) -> int | None:
    """Return the index of the job that has run the least; None: none may run.

    Tokens differ by at most one turn over the weight, whatever the steps' sizes.
    """
    waiting = [i for i, job in enumerate(jobs) if job.may_run]
    return min(waiting, key=lambda i: (jobs[i].tokens / jobs[i].weight, i), default=None)


def turn_is_over(turn_s: float, switch_s: float) -> bool:
    """Return whether a turn has lasted long enough to be worth the switch that began it."""
    return turn_s >= TURN_PER_SWITCH * switch_s


def fair_start(weight: float, others: Sequence[JobShare]) -> int:
    """Return the tokens with which a job that joins `others` starts its count.

    As many as the one has that is furthest behind: else all would wait until it has caught up.
    """
    return int(weight * min((job.tokens / job.weight for job in others), default=0.0))
