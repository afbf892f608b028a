"""Produce and run the tasklets of several jobs over one base model, joined in micro-batches.

Rows to train on pass in joint micro-batches; what else a job does (evaluations, optimizer steps)
are tasklets of its own stream, one job after the other. Each job keeps its stream: what is done of
it, its optimizer, its checkpoints. So jobs come and go between two micro-batches, and one that
fails, pauses or ends in the middle of one only takes its rows back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from windrow.errors import UserError
from windrow_sidecar.finetune.adapter.joint_linears import JointLinears, adapts_head
from windrow_sidecar.finetune.engine.joint_group import JointGroup, JointPart
from windrow_sidecar.finetune.engine.orders import Lookahead, layer_major
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.engine.stages import JobStage, Outcome
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.engine.suspension import BrokenOff
from windrow_sidecar.finetune.model.boundaries import Boundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.offload.job_state import Home
from windrow_sidecar.finetune.tasklets import MicroBatch, MicroLimits, Tasklet
from windrow_sidecar.finetune.training.optimizer import NotFinite
from windrow_sidecar.qos.view import Phase

log = logging.getLogger(__name__)

# Padded tokens of a joint micro-batch, at most so many times those that its jobs' rows would have
# in micro-batches of their own: what joining gains is a few tenths. Products over so few tokens
# read weights for as long as they multiply (see `sizing.LEAST_QUEUED_TOKENS`), and padding is free.
MOST_PADDING, FREE_TOKENS = 1.25, 256


def _always() -> bool:
    return True


@dataclass(eq=False, slots=True)
class Member:
    """A job of a joint stream.

    Attributes:
        name: for logs.
        stream: its own; nobody else runs it meanwhile.
        had: tokens that it has had so far, divided by the weight of its share.
        weight: of its share.
        may_run: whether nothing but the device holds it back.
    """

    name: str
    stream: TaskletStream
    had: Callable[[], float]
    weight: float = 1.0
    may_run: Callable[[], bool] = _always


@dataclass(frozen=True, slots=True)
class Happened:
    """A step or an evaluation of a member has ended, or the member has failed."""

    member: Member
    what: Outcome | Exception


@dataclass(frozen=True, slots=True)
class MemberPart:
    """The part of a tasklet that is a member's.

    Attributes:
        member: whose it is.
        tasklet: as that of its rows alone.
        share: of the work: of the real tokens.
    """

    member: Member
    tasklet: Tasklet
    share: float


class JointStream:
    """The tasklets of several jobs.

    Args:
        stack: the base's layers, in a tree of modules of its own.
        boundaries: where activations between layers live.
        limits: asked before each joint micro-batch; one at a time is on its way.
        sizing: asked before each tasklet of one.
        keep_for: called with the padded tokens of each before it begins.

    Attributes:
        stack: the base's layers.
        members: jobs that take part; may be changed by `join` and `leave` only.
        let_go: whether the last reference to a job that has left went with a micro-batch, since
            somebody has set it to False.
    """

    def __init__(
        self,
        stack: DecoderStack,
        *,
        boundaries: Boundaries,
        limits: Callable[[], MicroLimits],
        sizing: Callable[[], TaskletSizing] = WholeRows,
        keep_for: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.stack, self._boundaries = stack, boundaries
        self._limits, self._sizing, self._keep_for = limits, sizing, keep_for
        self.members: list[Member] = []
        self.let_go = False
        self._linears = JointLinears(stack.model)
        self._own_heads: set[Member] = set()  # whose head is not the base's
        self._group: JointGroup | None = None
        self._in_group: list[Member | None] = []  # by part; None: it has taken its rows back
        self._acts: Member | None = None  # whose own tasklet is next
        self._formed = 0

    def join(self, member: Member) -> None:
        """Let a job take part from the next micro-batch on."""
        tuned = member.stream.parts.adapter.model
        self._linears.add(member, tuned)
        if adapts_head(tuned, member.stream.parts.stack):
            self._own_heads.add(member)
        self.members.append(member)

    def leave(self, member: Member) -> None:
        """Let a job go; its rows in the micro-batch on its way are not done."""
        self._take_back(member)
        self.members.remove(member)
        self._own_heads.discard(member)
        if self._acts is member:
            self._acts = None
        on_its_way = () if self._group is None else self._group.parts
        if not any(part.key is member for part in on_its_way):  # else with the micro-batch
            self._linears.remove(member)

    @property
    def device(self) -> torch.device:
        """Device on which the jobs train."""
        return self.stack.device

    @property
    def away_bytes(self) -> int:
        """Bytes of the jobs' states that are on the host and `bring_back` would bring."""
        return sum(member.stream.away_bytes for member in self.members)

    @property
    def graph_bytes(self) -> int:
        """Bytes of lent memory that CUDA graphs of jobs' own layers have, less the driver's."""
        return sum(member.stream.graph_bytes for member in self.members)

    @property
    def between_micro_batches(self) -> bool:
        """True where nothing is on its way that `drop` would lose."""
        begun = self._group is not None and not self._group.progress.untouched
        return not begun and all(one.stream.between_micro_batches for one in self.members)

    @property
    def group_to_begin(self) -> tuple[MicroBatch, ...]:
        """The micro-batch to be trained on next; empty: there is none, or it has begun."""
        if self._group is None or not self._group.progress.untouched:
            return ()
        return self._group.group

    @property
    def tokens_to_begin(self) -> int:
        """Padded tokens of that micro-batch."""
        return sum(micro.padded_tokens for micro in self.group_to_begin)

    def peek(self) -> Tasklet | None:
        """Return the tasklet to run next; None: no member may run, or has anything left."""
        for member in self._in_group:
            if member is not None and not member.may_run():
                self._take_back(member)
        if self._group is not None and not any(self._in_group):
            self._forget_group()
        if self._group is None:
            self._acts = self._whose_own()
            if self._acts is not None:
                return self._acts.stream.peek()
            self._form()
        return None if self._group is None else self._lookahead.peek(self._sizing())

    def parts_of(self, tasklet: Tasklet) -> list[MemberPart]:
        """Return what of a tasklet that `peek` has returned is whose."""
        if self._group is None:
            return [MemberPart(self._acts, tasklet, 1.0)] if self._acts else []
        found = [
            (member, part.tasklet(tasklet))
            for member, part in zip(self._in_group, self._group.parts, strict=True)
            if member is not None
        ]
        tokens = sum(of_member.real_tokens for _, of_member in found)
        return [
            MemberPart(member, of_member, of_member.real_tokens / tokens if tokens else 0.0)
            for member, of_member in found
        ]

    def run(self, tasklet: Tasklet) -> list[Happened]:
        """Run what `peek` returned; return what ended with it. A member that failed is to leave.

        Raises:
            Exception: what ran was joint, and it is not known whose fault it is (see `drop`).
        """
        if self._group is None:
            return self._run_own(tasklet)
        group = self._group
        group.run(tasklet)
        self._lookahead.ran(tasklet)
        if tasklet.phase is Phase.LOSS:
            for part in self.parts_of(tasklet):
                part.member.stream.saw(part.tasklet.real_tokens)
        done, happened = group.progress.done, list[Happened]()
        if done or (tasklet.phase is Phase.LOSS and group.loss_is_here):
            happened = self._check_losses(group)
        if done:
            self._commit(group)
        return happened

    def break_off(self, tasklet: Tasklet) -> None:
        """Forget a tasklet that was given up in its middle; it, or its group, runs again."""
        if self._group is None:
            if self._acts is not None:
                self._acts.stream.break_off(tasklet)
        elif tasklet.phase is Phase.BACKWARD and not self._group.can_repeat(tasklet):
            self.drop()
        else:
            self._lookahead.forget()  # of several layers some may have run

    def drop(self) -> None:
        """Give up what is on its way, its memory included; the rows run again later."""
        self.replan(force=True)
        for member in self.members:
            member.stream.drop()

    def replan(self, *, force: bool = False) -> None:
        """Form the next micro-batch again after limits changed; one that has begun goes on."""
        if self._group is not None and (force or self._group.progress.untouched):
            for member in tuple(self._in_group):
                if member is not None:
                    self._take_back(member)
            self._forget_group()
        for member in self.members:
            member.stream.replan(force=force)

    def forget(self) -> None:
        """Free what groups on their way can compute again, without a copy."""
        if self._group is not None:
            self._group.forget()
        for member in self.members:
            member.stream.forget()

    def spill(self, room_bytes: int) -> None:
        """Leave nothing on its way in device memory; it goes on from the host.

        Dropped instead where that takes more than `room_bytes` of host memory.
        """
        group = self._group
        if group is None or group.progress.untouched:
            self.replan()
        elif group.spill_bytes <= room_bytes:
            group.spill()
        else:
            self.replan(force=True)
        for member in self.members:
            member.stream.spill(room_bytes)

    def offload(self, home: Home, room_bytes: int) -> None:
        """Move what changes with training to the host (see `TaskletStream.offload`)."""
        self.spill(room_bytes)
        for member in self.members:
            member.stream.offload(home, room_bytes)

    def bring_back(self, home: Home) -> None:
        """Take back what `offload` has moved; between the two nothing may run."""
        for member in self.members:
            member.stream.bring_back(home)

    def move_buffers(self, *, to_host: bool) -> None:
        """Leave nothing on the device but the base's parameters, or come back."""
        if to_host:
            self.drop()
        self.stack.move_buffers(to_host=to_host)
        for member in self.members:
            member.stream.move_buffers(to_host=to_host)

    def _whose_own(self) -> Member | None:
        """Return the member whose own tasklet comes next; None: rows are to be trained on.

        What has begun goes on; optimizer steps come first, so that rows can join the next
        micro-batch; else it is the turn of the member that is furthest behind.
        """
        able = self._able()
        if self._acts in able and not self._acts.stream.between_micro_batches:
            return self._acts
        for member in able:
            if member.stream.before_optimizer:
                return member
        if not able or able[0].stream.lengths_to_train():
            return None
        return able[0]

    def _able(self) -> list[Member]:
        """Return the members that may run and have work, the one furthest behind first."""
        able = [
            one
            for one in self.members
            if one.may_run() and one.stream.stage is not JobStage.FINISHED
        ]
        return sorted(able, key=lambda one: one.had())

    def _form(self) -> None:
        """Form the next micro-batch of the rows of members that have some."""
        able = [one for one in self._able() if one.stream.lengths_to_train()]
        if not able:
            return
        for one in self.members:
            one.stream.forget()  # of graphs that its own evaluations ran by, memory is left
        takes = fair_rows(
            [
                Offered(one.stream.lengths_to_train(), one.had(), one.weight, one.stream.most_rows)
                for one in able
            ],
            self._limits().max_tokens,
        )
        members = [(one, rows) for one, rows in zip(able, takes, strict=True) if rows]
        parts = [
            JointPart(one, one.stream.parts, one.stream.lend(rows), one in self._own_heads)
            for one, rows in members
        ]
        self._formed += 1
        self._group = JointGroup(
            self.stack, self._linears, parts, self._boundaries, number=self._formed
        )
        self._in_group = [one for one, _ in members]
        self._keep_for(self.tokens_to_begin)
        self._lookahead = Lookahead(layer_major, self._group.progress)

    def _run_own(self, tasklet: Tasklet) -> list[Happened]:
        member = self._acts
        if member is None:
            raise ValueError(f"{tasklet} is not next")
        try:
            outcome = member.stream.run(tasklet)
        except BrokenOff:
            raise
        except Exception as error:
            # The edge of a job: what ran was its own alone.
            log.info("%s failed", member.name, exc_info=True)
            return [Happened(member, error)]
        return [] if outcome is None else [Happened(member, outcome)]

    def _check_losses(self, group: JointGroup) -> list[Happened]:
        """Have members take rows back whose loss is no number."""
        failed = []
        for n, member in enumerate(self._in_group):
            if member is None:
                continue
            try:
                member.stream.check_loss(group.parts[n].rows.micro.rows, group.loss_of(n))
            except (NotFinite, UserError) as error:
                self._take_back(member)
                failed.append(Happened(member, error))
        return failed

    def _commit(self, group: JointGroup) -> None:
        for n, member in enumerate(self._in_group):
            if member is not None:
                member.stream.commit(group.parts[n].rows, group.loss_of(n))
        self._forget_group()

    def _take_back(self, member: Member) -> None:
        if self._group is not None and member in self._in_group:
            part = self._in_group.index(member)
            self._in_group[part] = None
            member.stream.take_back(self._group.parts[part].rows)

    def _forget_group(self) -> None:
        """Forget the micro-batch, and what rows that were taken back have left since."""
        group, self._group, self._in_group = self._group, None, []
        assert group is not None
        self._boundaries.clear()
        self._linears.run_for(())
        for part in group.parts:
            if isinstance(part.key, Member) and part.key in self.members:
                part.key.stream.forget_gradients()
            else:
                self._linears.remove(part.key)
                self.let_go = True


@dataclass(frozen=True, slots=True)
class Offered:
    """Rows that a job could have in the next micro-batch.

    Attributes:
        lengths: tokens of each, in the order in which they are taken.
        had: tokens that the job has had, divided by its weight.
        weight: of its share.
        most_rows: that it may have in a micro-batch; 0: no bound.
    """

    lengths: Sequence[int]
    had: float
    weight: float = 1.0
    most_rows: int = 0


def fair_rows(offered: Sequence[Offered], max_tokens: int) -> list[int]:
    """Return how many rows each job gets in a micro-batch of so many padded tokens, one in all.

    Row by row it is the turn of the job that is furthest behind; where that has no more rows, the
    micro-batch is full, else the others would get ahead of it step by step. A row that would pad
    the others too much, or they it, waits: its job is then furthest behind, and begins the next.
    """
    takes, had = [0] * len(offered), [one.had for one in offered]
    widths, waits = [0] * len(offered), set[int]()
    for n in _turns(had, waits):
        job = offered[n]
        if takes[n] == min(len(job.lengths), job.most_rows or len(job.lengths)):
            break
        length = job.lengths[takes[n]]
        width, lines = max(*widths, length, 0), sum(takes) + 1
        if lines > 1 and width * lines > max_tokens:
            break
        alone = sum(w * rows for w, rows in zip(widths, takes, strict=True))
        alone += max(0, length - widths[n]) * takes[n] + max(widths[n], length)
        if width * lines > max(FREE_TOKENS, MOST_PADDING * alone):
            waits.add(n)
            continue
        takes[n] += 1
        widths[n] = max(widths[n], length)
        had[n] += length / job.weight
    return takes


def _turns(had: Sequence[float], waits: set[int]) -> Iterator[int]:
    """Yield the job that is furthest behind, as long as one does not wait."""
    while able := [n for n in range(len(had)) if n not in waits]:
        yield min(able, key=lambda n: (had[n], n))
