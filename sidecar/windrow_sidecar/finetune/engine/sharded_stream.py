"""The tasklets of a job on one rank of several: the first rank decides, the others follow.

A tasklet has collectives in it, so all ranks run it or none does. The first rank tells the others
each act before it does it itself, and each checks that the tasklet begins where its own next one
does. How large groups and tasklets are is the first rank's choice alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windrow.errors import WindrowError
from windrow_sidecar.finetune.engine.micro_batch_group import MicroBatchGroup
from windrow_sidecar.finetune.engine.stages import Outcome
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.tasklets import MicroLimits, Tasklet
from windrow_sidecar.finetune.tensor_parallel.adapter import AdapterParts
from windrow_sidecar.finetune.training.checkpoint import Position
from windrow_sidecar.finetune.training.snapshot import TensorSnapshot
from windrow_sidecar.qos.view import Phase


class RanksDiffer(WindrowError):
    """A rank would run another tasklet next than the first rank does."""


@dataclass(frozen=True, slots=True)
class RunTasklet:
    """Tells the ranks to run a tasklet.

    Attributes:
        tasklet: to run.
        limits: with which its group was formed; None: it has none.
        units: that every rank computes on; 0: those of before.
    """

    tasklet: Tasklet
    limits: MicroLimits | None = None
    units: int = 0


@dataclass(frozen=True, slots=True)
class AssembleTensors:
    """Tells the ranks to hand over what a checkpoint holds."""


@dataclass(frozen=True, slots=True)
class RestoreTensors:
    """Tells the ranks to go on from a checkpoint, whose tensors follow.

    Attributes:
        position: in the job.
        shapes: of the tensors, in the order in which they come, with their dtypes.
    """

    position: Position
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class FollowChunks:
    """Tells the ranks which lent chunks to use, and which to leave, before the next tasklet.

    Attributes:
        held: chunks that every rank has, ascending.
        leave: chunks that every rank gives back.
        free_bytes: of the host's memory, for what leaves its chunks on one rank: all ranks decide
            by it whether a group goes on from there.
        vacated: nothing of the job is needed any more, and every chunk goes back.
    """

    held: tuple[int, ...]
    leave: tuple[int, ...]
    free_bytes: int
    vacated: bool = False


Act = RunTasklet | AssembleTensors | RestoreTensors | FollowChunks


class ShardedStream(TaskletStream):
    """The tasklets of one job on one rank.

    On the first rank it is used as any stream is, once `tell` is set. On the others `follow` does
    the same acts. A group that is given up on its way is given up on all of them by `FollowChunks`;
    of one that the first rank drops as the job ends they do not hear.

    Args:
        parts: of the adapter.
        options: of `TaskletStream`.
        limits: of it as well; asked on the first rank.

    Attributes:
        tell: called on the first rank with each act before it.
        await_ranks: called there after each tasklet: returns once all other ranks have run it.
        acted: called there at the end of each act that all ranks take part in.
        units: says there on how many units of its device a rank runs the next tasklet; 0: on as
            many as before.
        take_units: called on the others with that number.
        ran: called on the others after each tasklet.
        follow_chunks: called on the others with what the first rank says of lent chunks.
    """

    def __init__(
        self,
        parts: AdapterParts,
        *options: Any,  # noqa: ANN401
        limits: Callable[[], MicroLimits],
        **named: Any,  # noqa: ANN401
    ) -> None:
        self._own_limits = limits
        self._told_limits: MicroLimits | None = None  # by the first rank, for the next group
        self._asked_limits: MicroLimits | None = None  # as they were last
        self._group_limits: MicroLimits | None = None  # of the group that was formed last
        super().__init__(*options, limits=self._next_limits, **named)
        self._adapter_parts = parts
        self.tell: Callable[[Act], None] = lambda act: None
        self.await_ranks: Callable[[], None] = lambda: None
        self.acted: Callable[[], None] = lambda: None
        self.units: Callable[[], int] = lambda: 0
        self.take_units: Callable[[int], None] = lambda units: None
        self.ran: Callable[[], None] = lambda: None
        self.follow_chunks: Callable[[FollowChunks], None] = lambda told: None

    def run(self, tasklet: Tasklet) -> Outcome | None:
        """Run a tasklet on all ranks (see `TaskletStream.run`)."""
        self.tell(RunTasklet(tasklet, self._group_limits, self.units()))
        outcome = super().run(tasklet)
        self.await_ranks()
        self.acted()
        return outcome

    def _next_limits(self) -> MicroLimits:
        self._asked_limits = self._told_limits or self._own_limits()
        return self._asked_limits

    def _form(self) -> MicroBatchGroup:
        formed = super()._form()
        self._group_limits = self._asked_limits
        return formed

    def snapshot(self) -> TensorSnapshot:
        """Return what a checkpoint holds, whole; every rank hands over its part."""
        return TensorSnapshot(self._assembled())

    def restore(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        """Go on, on all ranks, from a whole checkpoint (see `TaskletStream.restore`).

        `tensors`, [...] each: as `snapshot` has them.
        """
        shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self.tell(RestoreTensors(position, shapes))
        self._restore(position, tensors)
        self.acted()

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of what a checkpoint holds, of all ranks."""
        return self._adapter_parts.whole_bytes(self.tensors())

    def adapted(self, tuned: Any) -> Any:  # noqa: ANN401 - peft is untyped
        """Return the stand-in of the whole model, with the adapter as it is now."""
        del tuned
        self._adapter_parts.fill(self._assembled())
        return self._adapter_parts.whole

    def follow(self, acts: Iterable[Act]) -> None:
        """Do what the first rank tells, until `acts` end.

        Raises:
            RanksDiffer: a tasklet does not begin where the one does that is next here.
        """
        for act in acts:
            if isinstance(act, RunTasklet):
                self._follow_tasklet(act)
            elif isinstance(act, FollowChunks):
                self.follow_chunks(act)
            elif isinstance(act, AssembleTensors):
                self._adapter_parts.assemble(self.tensors())
            else:
                empty = {
                    name: torch.empty(shape, dtype=dtype)
                    for name, (shape, dtype) in act.shapes.items()
                }
                self._restore(act.position, empty)

    def _follow_tasklet(self, act: RunTasklet) -> None:
        if act.limits is not None and act.limits != self._told_limits:
            self._told_limits = act.limits
            self.replan()  # a group that has not begun was formed with other limits
        if act.units:
            self.take_units(act.units)
        mine = self.peek()
        if mine is None or not _begin_alike(mine, act.tasklet):
            raise RanksDiffer(f"the first rank runs {act.tasklet}, next here is {mine}")
        super().run(act.tasklet)
        self.ran()

    def _assembled(self) -> dict[str, Tensor]:
        self.tell(AssembleTensors())
        assembled = self._adapter_parts.assemble(self.tensors())
        self.acted()
        return assembled

    def _restore(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        found = self._adapter_parts.spread(tensors)
        super().restore(position, self._adapter_parts.taken(found))


def _begin_alike(one: Tasklet, other: Tasklet) -> bool:
    """Return whether two tasklets begin at one place; they may be of different sizes."""
    if (one.step, one.phase, one.micro) != (other.step, other.phase, other.micro):
        return False
    if one.phase is Phase.BACKWARD:
        return one.layer_end == other.layer_end
    return (one.layer, one.window.begin) == (other.layer, other.window.begin)
