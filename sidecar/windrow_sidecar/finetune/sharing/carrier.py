"""Several jobs over one base model in one worker (FineInfer's multiplexing), in turns.

A turn begins and ends at tasklet boundaries: between two groups of micro-batches while both jobs
may run, anywhere where the job of the moment ends or is told to pause. What the one job has on the
device goes to the host, the other's comes back.

What whoever assigns jobs may rely on: every job keeps its own stream, position, folder, reporter,
ending and commands, so each can be paused, checkpointed, stopped and fenced alone; one that fails
ends alone. All of them run under the one gate of their device, one tasklet at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windrow_sidecar.finetune.checkpoints.heap import settle_heap
from windrow_sidecar.finetune.device import Memory
from windrow_sidecar.finetune.runner import Ending, Runner
from windrow_sidecar.finetune.sharing.shares import Standing, next_turn, turn_is_over
from windrow_sidecar.finetune.stream import TaskletStream

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Carried:
    """One job.

    Attributes:
        name: for logs.
        stream, memory, runner: its own.
        failed: tells its reporter of an error; returns what that means for the job.
        ended: called once with its ending; lets go of what the job holds.
        weight: of its share.
    """

    name: str
    stream: TaskletStream
    memory: Memory
    runner: Runner
    failed: Callable[[Exception], Ending]
    ended: Callable[[Ending], None]
    weight: float = 1.0

    def standing(self) -> Standing:
        """As whoever chooses sees it."""
        may_run = not self.runner.told_to_pause
        return Standing(self.stream.tokens_seen, self.weight, may_run)


class Carrier:
    """Runs jobs until each has ended.

    Args:
        jobs: at least one; their trees of modules share weights, nothing else (see `twin`).
        clock: monotonic seconds.
    """

    def __init__(
        self, jobs: Sequence[Carried], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._live, self._clock = list(jobs), clock
        self._now: Carried | None = None
        self._turn_began_s = self._switch_s = 0.0

    def run(self) -> None:
        """Run all; an error of one ends that one."""
        for job in tuple(self._live):
            self._act(job, job.runner.begin)
            if job in self._live:
                job.memory.set_aside()
        while self._live:
            # Those that wait hear of signals and commands as soon as the one that runs.
            for job in tuple(self._live):
                self._act(job, job.runner.obey)
            if (chosen := self._whose_turn()) is not None:
                self._act(chosen, chosen.runner.turn)
                self._act(chosen, chosen.runner.wait)

    def _whose_turn(self) -> Carried | None:
        """Return the job to run now, at home on the device; None: none is left."""
        if not self._live:
            return None
        if not self._may_switch():
            return self._now
        at = next_turn([job.standing() for job in self._live])
        # Where all are told to pause, one of them waits for all.
        chosen = self._live[at or 0]
        if chosen is not self._now:
            self._switch(chosen)
        return chosen

    def _may_switch(self) -> bool:
        now = self._now
        if now is None or now.runner.told_to_pause:
            return True
        lasted_s = self._clock() - self._turn_began_s
        return now.stream.between_micro_batches and turn_is_over(lasted_s, self._switch_s)

    def _switch(self, to: Carried) -> None:
        began_s = self._clock()
        if self._now is not None:
            self._now.memory.set_aside()
        to.memory.bring_back()
        self._now, self._turn_began_s = to, self._clock()
        self._switch_s = self._turn_began_s - began_s

    def _act(self, job: Carried, act: Callable[[], Ending | None]) -> None:
        """Let a job that is still there act; whatever goes wrong is its own end."""
        if job not in self._live:
            return
        try:
            ending = act()
        except Exception as error:
            # The edge of a job: the others know nothing of it.
            log.exception("job %s failed", job.name)
            ending = job.failed(error)
        if ending is not None:
            self._live.remove(job)
            self._now = None if self._now is job else self._now
            job.memory.release()
            job.ended(ending)
            del job
            settle_heap()
