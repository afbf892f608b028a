"""Run a job to its end, tasklet by tasklet, as its gate, memory and commands allow."""

from __future__ import annotations

import time
from collections.abc import Callable

from windrow.conditions import Reason
from windrow.protocol import Ending, WorkerEvent
from windrow_sidecar.finetune.engine.stages import Outcome
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.engine.suspension import BrokenOff
from windrow_sidecar.finetune.job.gate import Gate
from windrow_sidecar.finetune.job.in_flight import Ran
from windrow_sidecar.finetune.job.ledger import JobState, Ledger
from windrow_sidecar.finetune.job.report import JobReporter
from windrow_sidecar.finetune.memory.training_memory import NoRoom, TrainingMemory
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.finetune.training.health import LAST_CHECKPOINT, VERIFYING, StallWatch
from windrow_sidecar.heap import settle_heap

# A wait that is shorter is ordinary sharing, not worth an event for people.
PAUSE_EVENT_AFTER_S = 1.0
# A longer pause leaves no device memory behind; coming back costs up to a tenth of a second.
SET_ASIDE_AFTER_S = 10.0


class Runner:
    """Runs the tasklets of one job.

    Args:
        stream: what to run.
        gate, memory: what limits it.
        ledger: where it is written down.
        reporter: who may give commands.
        job_state: where a signal asks to stop.
        expected_s: how long a tasklet is expected to take; None: nobody knows.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        stream: TaskletStream,
        gate: Gate,
        memory: TrainingMemory,
        ledger: Ledger,
        reporter: JobReporter,
        job_state: JobState,
        *,
        expected_s: Callable[[Tasklet], float | None] = lambda tasklet: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._expected_s = clock, expected_s
        self._stream, self._gate, self._memory = stream, gate, memory
        self._ledger, self._reporter, self._job_state = ledger, reporter, job_state
        self._told_to_pause = self._starving = False
        self._held_up: Tasklet | None = None
        self._waiting_since: float | None = None
        self._said_paused = False

    @property
    def stall(self) -> StallWatch:
        """Watch over the job's work that does not end."""
        return self._job_state.stall

    @property
    def told_to_pause(self) -> bool:
        """True where a command holds this job back."""
        return self._told_to_pause

    @property
    def starving(self) -> bool:
        """True where the last turn was held up for want of memory."""
        return self._starving

    def run(self) -> Ending:
        """Run until the job has ended or someone ends it.

        Raises:
            NotFinite, Fenced, OSError, MemoryError: see the parts; the last checkpoint remains.
        """
        ending = self.begin()
        while ending is None:
            ending = self.cycle()
        return ending

    def begin(self) -> Ending | None:
        """Go on from the newest checkpoint, where there is one; an ending: nothing is to do."""
        with self._job_state.stall.during(VERIFYING):
            has_work = self._ledger.restore()
        settle_heap()
        return None if has_work else Ending.SUCCEEDED

    def cycle(self) -> Ending | None:
        """Obey, run a tasklet, or wait where none may run; an ending where that was the last."""
        for act in (self.obey, self.turn, self.wait):
            if (ending := act()) is not None:
                return ending
        return None

    def turn(self) -> Ending | None:
        """Run the next tasklet if it may run; an ending where there is none (see `wait`)."""
        self._held_up, self._starving = None, False
        if (tasklet := self._stream.peek()) is None:
            return self.succeed()
        self._memory.settle()
        tasklet = self._stream.peek() or tasklet
        if not self._may_run(tasklet):
            self._held_up = tasklet
            return None
        self.resumed()
        self._job_state.stall.begin_tasklet(self._expected_s(tasklet))
        try:
            outcome = self._stream.run(tasklet)
        except BrokenOff:
            self._stream.break_off(tasklet)
            self._held_up = self._stream.peek()
            return None
        finally:
            self._job_state.stall.end()
        self._gate.landed(tasklet)
        if outcome is not None:
            self._gate.quiet(self._stream.peek())
        self._note_ran()
        if outcome is not None:
            self._ledger.came(outcome)
        return None

    def _note_ran(self) -> None:
        for ran in self._gate.take_ran():
            self._ledger.ran(ran)

    def took_part(self, ran: Ran, share: float) -> None:
        """Note this job's part of a tasklet that was joint; `share`: of its time."""
        self._ledger.ran(ran, share)

    def came(self, outcome: Outcome) -> None:
        """Note the end of a step or of an evaluation whose tasklets others have run.

        Raises:
            Unhealthy, Fenced: see `Ledger.came`.
        """
        self._ledger.came(outcome)

    def wait(self) -> Ending | None:
        """Tell decode where the last turn was held up, and sleep until it is worth asking."""
        tasklet, self._held_up = self._held_up, None
        return None if tasklet is None else self._wait(tasklet)

    def obey(self) -> Ending | None:
        """Follow signals and commands; an ending where they ask for one."""
        self._ledger.settle()
        if self._job_state.stop_asked:
            return self._stop(self._job_state.stop_asked)
        while (command := self._reporter.take_command()) is not None:
            if command == "STOP":
                return self._stop("asked to stop")
            if command == "FORGET":
                return self._forget()
            if command == "ABORT":
                self._reporter.event(WorkerEvent("STOPPED", Reason.STALE_EPOCH, "aborted"))
                return Ending.FENCED
            if command == "CHECKPOINT":
                self._ledger.ask_for_checkpoint()
            else:
                self._told_to_pause = command == "PAUSE"
        if self._told_to_pause:
            self.say_if_long()  # among others it gets no turn in which it would wait
        return None

    def succeed(self) -> Ending:
        """End the job, whose stream has no tasklet left.

        Raises:
            Fenced, OSError: see `Ledger.succeeded`.
        """
        self._gate.quiet(None)
        self._note_ran()
        with self._job_state.stall.during(LAST_CHECKPOINT):
            self._ledger.succeeded()
        return Ending.SUCCEEDED

    def _may_run(self, tasklet: Tasklet) -> bool:
        self._starving = not self._told_to_pause and self._memory.starving(tasklet)
        if self._told_to_pause or self._starving:
            return False
        launched = self._gate.launch(tasklet)
        try:
            moved = launched and self._memory.restore()
        except NoRoom:
            self._starving = True
            return False
        # Moving took a while: what was granted before it may be gone.
        return self._gate.launch(tasklet) if moved else launched

    def _stop(self, why: str) -> Ending:
        self._gate.quiet(None)
        detail = f"{why}; {self._last_checkpoint()}"
        while (command := self._reporter.take_command()) is not None:
            if command == "FORGET":  # deleted while it stopped
                return self._forget()
        self._reporter.event(WorkerEvent("STOPPED", Reason.STOPPED, detail))
        return Ending.STOPPED

    def _forget(self) -> Ending:
        self._gate.quiet(None)
        self._ledger.forget()
        detail = "the job was deleted, its checkpoints are removed"
        self._reporter.event(WorkerEvent("STOPPED", Reason.STOPPED, detail))
        return Ending.STOPPED

    def _last_checkpoint(self) -> str:
        with self._job_state.stall.during(LAST_CHECKPOINT):
            return self._ledger.checkpoint()

    def _wait(self, tasklet: Tasklet) -> Ending | None:
        if self.say_if_long() > SET_ASIDE_AFTER_S:
            self._memory.offload()
        self._gate.quiet(tasklet)
        self._note_ran()
        self._gate.wait()
        return self.lost_decode() if self._gate.decode_gone() else None

    def lost_decode(self) -> Ending:
        """End the job at a checkpoint: the decode process has ended.

        Raises:
            Fenced, OSError: the checkpoint was not written.
        """
        detail = f"the decode process has ended; {self._last_checkpoint()}"
        self._reporter.event(WorkerEvent("STOPPED", Reason.SLOT_LOST, detail))
        return Ending.DECODE_GONE

    def say_if_long(self) -> float:
        """Tell of a pause once it is worth it; returns for how long it has lasted, seconds."""
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since = now
        waited_s = now - self._waiting_since
        if not self._said_paused and waited_s > PAUSE_EVENT_AFTER_S:
            self._said_paused = True
            why = "by command" if self._told_to_pause else "decode has the device"
            self._reporter.event(WorkerEvent("PAUSED", Reason.PAUSED, why))
        return waited_s

    def resumed(self) -> None:
        """Note that a tasklet of the job may run."""
        if self._said_paused and self._waiting_since is not None:
            waited = self._clock() - self._waiting_since
            self._reporter.event(WorkerEvent("RESUMED", Reason.RESUMED, f"after {waited:.1f} s"))
        self._waiting_since, self._said_paused = None, False
