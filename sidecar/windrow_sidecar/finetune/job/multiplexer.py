"""Run several jobs over one base model in one worker: joined where they can be, else in turns.

Joined jobs pass their rows in the same tasklets and have their turns together (`joint_turns`); any
other has turns of its own (FineInfer's multiplexing). A turn begins and ends at tasklet boundaries:
between two groups of micro-batches while both may run, or wherever the present job ends or gets a
command to pause. What the one has on the device goes to the host, the other's comes back.

The assigner of jobs may rely on this: every job keeps its own stream, position, folder, reporter,
ending and commands, so each can be paused, checkpointed, stopped and fenced alone; one that fails
ends alone. All of them run under the one gate of their device, one tasklet at a time. A job may
come later, between two turns, when nothing of the others is on the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from windrow.protocol import Ending
from windrow_sidecar.finetune.job.job_handle import JobHandle, JobShare
from windrow_sidecar.finetune.job.joint_turns import JointTurns
from windrow_sidecar.finetune.memory.training_memory import NoRoom
from windrow_sidecar.heap import settle_heap

log = logging.getLogger(__name__)

# What has the device for a turn.
Occupant = JobHandle | JointTurns
Arrival = Callable[[], JobHandle | None]  # makes a job join; None: it has ended, which is reported


def _bring(to: Occupant) -> None:
    """Bring an occupant's state to the device; where there is no room, before its first tasklet."""
    with suppress(NoRoom):
        to.memory.restore()


def _nobody() -> Arrival | None:
    return None


class JobMultiplexer:
    """Run jobs in turns until each has ended.

    Args:
        jobs: their trees of modules share weights, nothing else (see `twin`).
        arrivals: returns the next job that can join now, None where there is none. It may wait
            while there is no job to run.
        clock: monotonic seconds.
        joint: makes what runs joined jobs, called when nothing of any job is on the device; None:
            none are joined.
    """

    def __init__(
        self,
        jobs: Sequence[JobHandle] = (),
        *,
        arrivals: Callable[[], Arrival | None] = _nobody,
        clock: Callable[[], float] = time.monotonic,
        joint: Callable[[], JointTurns] | None = None,
    ) -> None:
        self._live, self._arrivals, self._clock = list(jobs), arrivals, clock
        self._make_joint = joint
        self._joint: JointTurns | None = None
        self._told: dict[JobHandle, tuple[int, str]] = {}  # with how many others each is joined
        self._most: int | None = None  # jobs that are joined; None: as many as can be
        self._most_until_s = 0.0
        self._now: Occupant | None = None
        self._starved: set[Occupant] = set()  # held up for memory since another had a turn
        self._turn_began_s = self._switch_s = 0.0
        self._one_ended = False

    def run(self) -> None:
        """Run all; an error of one ends that one."""
        for job in tuple(self._live):
            self._begin(job)
        self._admit()
        self._let_go()
        while self._live:
            self._cycle()
            self._let_go()

    def _cycle(self) -> None:
        # Those that wait hear of signals and commands as soon as the one that runs.
        for job in tuple(self._live):
            self._act(job, job.runner.obey)
        self._join()
        if (chosen := self._whose_turn()) is not None:
            self._turn(chosen)
        self._admit()

    def _let_go(self) -> None:
        """Free what jobs that have ended leave; here no frame refers to one of them any more."""
        joint = self._joint.stream if self._joint is not None else None
        if self._one_ended or (joint is not None and joint.let_go):
            self._one_ended = False
            if joint is not None:
                joint.let_go = False
            settle_heap()

    def _turn(self, chosen: Occupant) -> None:
        """Let a job, or those that are joined, run a tasklet, or wait where none may run."""
        if isinstance(chosen, JointTurns):
            for act in (chosen.turn, chosen.wait):
                for job, of_job in act():
                    self._act(job, of_job)
                if self._gives_way(chosen):
                    return
            return
        self._act(chosen, chosen.runner.turn)
        if not self._gives_way(chosen):
            self._act(chosen, chosen.runner.wait)

    def _join(self) -> None:
        """Have the jobs pass their rows together that can, where there are two or more."""
        if self._make_joint is None:
            return
        were = list(self._joint.jobs) if self._joint else []
        if self._joint is not None and self._joint.broken:
            self._make_joint, can = None, []
        else:
            can = [job for job in self._live if not job.apart][: self._bound(were)]
        together = can if len(can) > 1 else []
        if together != were:
            self._form(were, together)
        self._tell_joined()

    def _bound(self, joined: Sequence[JobHandle]) -> int | None:
        """Return how many jobs may be joined now; None: any number.

        One less than before where memory has no room for the states of all of them and would have
        for those of one; more are tried again after a while, and when a job comes or ends.
        """
        if self._joint is not None and self._joint.crowded():
            self._bind(len(joined) - 1)
            log.info("no room for the adapters and moments of %d joined jobs", len(joined))
        if self._most is not None and self._clock() >= self._most_until_s:
            self._most = None
        return self._most

    def _bind(self, most: int) -> None:
        self._most, self._most_until_s = most, self._clock() + TRIED_AGAIN_AFTER_S

    def _form(self, were: Sequence[JobHandle], together: Sequence[JobHandle]) -> None:
        """Have other jobs than before be joined; none: each has turns of its own."""
        self._leave()
        if self._joint is None and self._make_joint is not None:
            try:
                self._joint = self._make_joint()
            except Exception:
                # Each can do without: memory was short, or the model cannot be called so.
                log.exception("jobs cannot be joined; they go on in turns of their own")
                self._bind(1)
                return
        assert self._joint is not None
        _bring(self._joint)
        for job in were:
            if job not in together:
                self._joint.leave(job)
                job.memory.offload()
        for job in together:
            if job not in were:
                _bring(job)
                self._joint.join(job)
        _bring(self._joint)
        self._now = self._joint
        if not together:
            self._leave()
            self._joint = None

    def _tell_joined(self) -> None:
        """Say in each job's log how its rows pass, where that has changed; no other is named."""
        together = self._joint.jobs if self._joint is not None else []
        more = len(together) - 1
        said = {
            job: (more, "") if job in together else (0, self._why_apart(job)) for job in self._live
        }
        for job, (others, why) in said.items():
            if self._told.get(job, (0, "")) == (others, why):
                continue
            job.joined(others, why)
            job.acts()
            if others:
                how = f"pass in the same tasklets as those of {others} more"
                if job.program != "eager":
                    how += f", by layers that run eagerly: {job.program} ones take one job's rows"
            else:
                how = f"have turns of their own: {why}" if why else "have the worker alone"
            log.info("rows of %s %s", job.name, how)
        self._told = said

    def _why_apart(self, job: JobHandle) -> str:
        """Return why a job that is not joined has turns of its own; "": nobody else is there."""
        if len(self._live) < 2:
            return ""
        if job.apart:
            return job.apart
        if self._most is not None:
            return "no room for the adapters and moments of more joined jobs"
        return "no other job can be joined"

    def _admit(self) -> None:
        """Take those that have come; nobody is on the device while they are attached."""
        while (arrival := self._arrivals()) is not None:
            self._leave()
            if (job := arrival()) is not None:
                job.head_start = fair_start(job.weight, [one.share() for one in self._live])
                self._live.append(job)
                self._most = None
                self._begin(job)

    def _begin(self, job: JobHandle) -> None:
        self._act(job, job.runner.begin)
        if job in self._live:
            job.memory.offload()

    def _whose_turn(self) -> Occupant | None:
        """Return the job, or the joined ones, to run now, at home on the device.

        None: none is left.
        """
        if not self._live:
            return None
        if not self._may_switch():
            return self._now
        if self._now not in self._starved:
            self._starved.clear()
        able = [job for job in self._live if self._carrier(job) not in self._starved] or self._live
        at = next_turn([job.share() for job in able])
        # Where all have to pause, one of them waits for all.
        chosen = self._carrier(able[at or 0])
        if chosen is not self._now:
            self._switch(chosen)
        return chosen

    def _carrier(self, job: JobHandle) -> Occupant:
        """Return what runs the job's tasklets: the joined jobs, where it is one of them."""
        return self._joint if self._joint is not None and job in self._joint.jobs else job

    def _may_switch(self) -> bool:
        now = self._now
        if now is None or now.told_to_pause or now in self._starved:
            return True
        lasted_s = self._clock() - self._turn_began_s
        return now.stream.between_micro_batches and turn_is_over(lasted_s, self._switch_s)

    def _gives_way(self, to: Occupant) -> bool:
        """Return whether `to` was held up for memory and must give way to another job."""
        if not (to is self._joint or to in self._live) or not to.starving:
            return False
        self._starved.add(to)
        others = [one for one in self._live if self._carrier(one) not in self._starved]
        if any(one.share().may_run for one in others):
            return True
        self._starved.clear()
        return False

    def _switch(self, to: Occupant) -> None:
        began_s = self._clock()
        self._leave()
        to.acts()
        _bring(to)
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
            self._told.pop(job, None)
            self._most, self._one_ended = None, True
            if self._joint is not None and job in self._joint.jobs:
                self._joint.leave(job)
            self._now = None if self._now is job else self._now
            job.memory.release()
            job.ended(ending)


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


# After so long more jobs are joined again than memory had room for.
TRIED_AGAIN_AFTER_S = 120.0
# A turn lasts so many times as long as the switch that began it took: switching costs 5% at most.
TURN_PER_SWITCH = 20.0


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
