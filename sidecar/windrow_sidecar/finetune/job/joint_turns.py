"""Run joined jobs tasklet by tasklet, as gate and memory allow, and tell each what came of it.

The rows of all pass in the same tasklets (`engine.joint_stream`). Each job keeps its runner for all
else: commands, checkpoints, figures and its end.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from windrow.protocol import Ending
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.finetune.adapter.joint_linears import refused
from windrow_sidecar.finetune.engine.joint_stream import (
    Happened,
    JointStream,
    Member,
    MemberPart,
)
from windrow_sidecar.finetune.engine.sharded_stream import ShardedStream
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.engine.stages import JobStage
from windrow_sidecar.finetune.engine.suspension import BrokenOff, between_modules
from windrow_sidecar.finetune.job.assembly import TrainingSession
from windrow_sidecar.finetune.job.gate import Gate
from windrow_sidecar.finetune.job.job_handle import JobHandle
from windrow_sidecar.finetune.job.runner import SET_ASIDE_AFTER_S
from windrow_sidecar.finetune.memory.training_memory import NoRoom, TrainingMemory
from windrow_sidecar.finetune.model.boundaries import Boundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.recompute.checkpointed_layers import PlannedLayers
from windrow_sidecar.finetune.recompute.joint_budget import JointBudget
from windrow_sidecar.finetune.tasklets import MicroLimits, Tasklet
from windrow_sidecar.finetune.training.health import StallWatch
from windrow_sidecar.finetune.training.preference import PreferenceLoss

log = logging.getLogger(__name__)

# What a job does because of a joint tasklet; an error is that job's alone.
Act = tuple[JobHandle, Callable[[], Ending | None]]


def why_apart(session: TrainingSession, base: BaseModel) -> str:
    """Return why the rows of a job cannot pass beside those of others; "" if they can.

    Args:
        session: the job.
        base: its base model.
    """
    spec, parts = session.job.spec, session.stream.parts
    if base.frozen is not None:
        return "the model's layers take turns in memory"
    if base.streamed is not None:
        return "the model's layers are streamed"
    if isinstance(session.stream, ShardedStream):
        return "its model is cut over ranks"
    if session.stream.packed:
        return "its rows are packed into lines (spec.training.packing)"
    if PreferenceLoss.of(spec.training) is not None:
        return "its rows are pairs of answers"
    return refused(parts.adapter.model, session.stream.learns, parts.stack)


@dataclass(frozen=True, slots=True)
class JointRuntime:
    """Environment of joint tasklets (see `assembly.TaskletRuntime`).

    Attributes:
        boundaries: where activations between layers live.
        limits: of micro-batches, asked before each.
        sizing: of tasklets, asked before each.
        between: called between the modules of a layer that runs.
        device: that the base model is on.
        units: of the device that the next tasklet computes on.
    """

    boundaries: Boundaries
    limits: Callable[[], MicroLimits]
    device: ComputeDevice
    sizing: Callable[[], TaskletSizing] = WholeRows
    between: Callable[..., None] | None = None
    units: Callable[[], int] = lambda: 0


def open_joint(base: BaseModel, runtime: JointRuntime) -> tuple[JointStream, JointBudget]:
    """Return a stream for joined jobs over a base model, and what its groups take.

    Args:
        base: with modules of its own (see `shallow_clone`), without an adapter.
        runtime: where its tasklets run.
    """
    stack = DecoderStack(base.model, units=runtime.units)
    stack.around_layer = planned = PlannedLayers(stack.layers)
    budget = JointBudget(planned, runtime.device.free_bytes, runtime.device.release_caches)
    if runtime.between is not None:
        # A head is that of each job's own model.
        between_modules(stack.layers, None, runtime.between)
    stream = JointStream(
        stack,
        boundaries=runtime.boundaries,
        limits=lambda: budget.before(runtime.limits()),
        sizing=runtime.sizing,
        keep_for=budget.keep_for,
    )
    return stream, budget


class JointWatch:
    """Watch over a joint tasklet: that of the job which is furthest behind."""

    def __init__(self) -> None:
        self.now: StallWatch | None = None

    def held(self) -> AbstractContextManager[None]:
        """Exclude the time in which running work waits for decode."""
        return nullcontext() if self.now is None else self.now.held()


class JointTurns:
    """The joined jobs of a worker.

    Args:
        stream: theirs.
        memory: of the stream.
        budget: what its groups take.
        gate: of the device.
        watch: over what runs; begun and ended here.
        expected_s: how long a tasklet is expected to take; None: nobody knows.
        fits_alone: whether there is room for one of the jobs, what it has on the host included.

    Attributes:
        stream, memory: as given.
        jobs: that are joined.
        starving: whether the last turn was held up for want of memory.
        broken: whether a joint tasklet has failed, and nobody knows whose fault it is.
    """

    def __init__(
        self,
        stream: JointStream,
        memory: TrainingMemory,
        budget: JointBudget,
        gate: Gate,
        watch: JointWatch,
        *,
        expected_s: Callable[[Tasklet], float | None] = lambda tasklet: None,
        fits_alone: Callable[[JobHandle], bool] = lambda job: False,
    ) -> None:
        self._fits_alone = fits_alone
        self.stream, self.memory, self._budget = stream, memory, budget
        self._gate, self._watch, self._expected_s = gate, watch, expected_s
        self.jobs: list[JobHandle] = []
        self.starving = self.broken = False
        self._members: dict[JobHandle, Member] = {}
        self._launched: deque[tuple[Tasklet, list[MemberPart]]] = deque()
        self._held_up: Tasklet | None = None
        self._nothing_may_run = False

    def join(self, job: JobHandle) -> None:
        """Let a job take part, whose state is on the device and whose stream has begun nothing."""
        member = Member(
            job.name,
            job.stream,
            had=lambda: (job.head_start + job.stream.tokens_seen) / job.weight,
            weight=job.weight,
            may_run=lambda: not job.told_to_pause,
        )
        self.stream.join(member)
        self._members[job] = member
        self.jobs.append(job)
        self._follow()

    def leave(self, job: JobHandle) -> None:
        """Let a job go, wherever the micro-batch on its way is."""
        self.jobs.remove(job)
        member = self._members.pop(job)
        self.stream.leave(member)
        self._launched = deque(
            (tasklet, [part for part in parts if part.member is not member])
            for tasklet, parts in self._launched
        )
        self._follow()

    def _follow(self) -> None:
        budgets = [job.activation_budget for job in self.jobs if job.activation_budget]
        if budgets:
            self._budget.follow(budgets)

    def crowded(self) -> bool:
        """Return whether there is no room for what all of them have on the host, and for one's."""
        if not (self.starving and self.stream.away_bytes):
            return False
        return any(map(self._fits_alone, self.jobs))

    @property
    def told_to_pause(self) -> bool:
        """True where commands hold all of them back."""
        return all(job.told_to_pause for job in self.jobs)

    def acts(self) -> None:
        """Note that they have the device: as the turn of the one that is furthest behind."""
        if self.jobs:
            min(self.jobs, key=lambda job: self._members[job].had()).acts()

    def turn(self) -> list[Act]:
        """Run the next tasklet if it may run; return what jobs do then (see `wait`)."""
        self._held_up, self.starving = None, False
        over = [job for job in self.jobs if job.stream.stage is JobStage.FINISHED]
        if over:
            self._gate.quiet(None)
            self._note_ran()
            return [(job, job.runner.succeed) for job in over]
        try:
            happened = self._run_next()
        except Exception:
            # Each of them may be at fault: they go on in turns, in which it fails alone.
            log.exception("a joint tasklet failed; jobs go on in turns of their own")
            self.stream.drop()
            self.broken = True
            return []
        acts = []
        for one in happened:
            job = self._job_of(one.member)
            acts.append((job, _act_of(job, one)))
        return acts

    def _run_next(self) -> list[Happened]:
        tasklet = self.stream.peek()
        self._nothing_may_run = tasklet is None
        if tasklet is None:
            return []
        self.memory.settle()
        tasklet = self.stream.peek() or tasklet
        if not self._may_run(tasklet):
            self._held_up = tasklet
            return []
        return self._run(tasklet)

    def _run(self, tasklet: Tasklet) -> list[Happened]:
        parts = self.stream.parts_of(tasklet)
        first = min((part.member for part in parts), key=lambda member: member.had())
        self._job_of(first).acts()
        for job in self.jobs:
            if not job.told_to_pause:
                job.runner.resumed()
        self._watch.now = self._job_of(first).runner.stall
        self._watch.now.begin_tasklet(self._expected_s(tasklet))
        try:
            happened = self.stream.run(tasklet)
        except BrokenOff:
            self.stream.break_off(tasklet)
            self._held_up = self.stream.peek()
            return []
        finally:
            self._watch.now.end()
            self._watch.now = None
        self._launched.append((tasklet, parts))
        self._gate.landed(tasklet)
        if happened:
            failed = any(isinstance(one.what, Exception) for one in happened)
            self._gate.quiet(None if failed else self.stream.peek())
        self._note_ran()
        return happened

    def wait(self) -> list[Act]:
        """Tell decode where the last turn was held up, and sleep until it is worth asking."""
        tasklet, self._held_up = self._held_up, None
        if tasklet is None and not self._nothing_may_run:
            return []
        waited = [job.runner.say_if_long() for job in self.jobs if not job.told_to_pause]
        if waited and max(waited) > SET_ASIDE_AFTER_S:
            self.memory.offload()
        self._gate.quiet(tasklet)
        self._note_ran()
        self._gate.wait()
        if not self._gate.decode_gone():
            return []
        return [(job, job.runner.lost_decode) for job in self.jobs]

    def _may_run(self, tasklet: Tasklet) -> bool:
        self.starving = self.memory.starving(tasklet)
        if self.starving:
            return False
        launched = self._gate.launch(tasklet)
        try:
            moved = launched and self.memory.restore()
        except NoRoom:
            self.starving = True
            return False
        # Moving took a while: what was granted before it may be gone.
        return self._gate.launch(tasklet) if moved else launched

    def _note_ran(self) -> None:
        """Give each job its part of what has ended."""
        for ran in self._gate.take_ran():
            while self._launched:
                tasklet, parts = self._launched.popleft()
                if tasklet is ran.tasklet:
                    break
            else:
                continue  # of a turn before
            for part in parts:
                of_job = replace(ran, tasklet=part.tasklet)
                self._job_of(part.member).runner.took_part(of_job, part.share)

    def _job_of(self, member: Member) -> JobHandle:
        return next(job for job, one in self._members.items() if one is member)


def _act_of(job: JobHandle, happened: Happened) -> Callable[[], Ending | None]:
    """Return what a job does as its step or evaluation has ended, or it has failed."""
    what = happened.what

    def act() -> Ending | None:
        if isinstance(what, Exception):
            raise what
        job.runner.came(what)
        return None

    return act
