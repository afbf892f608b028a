"""The tasklets of a job on one rank of several: the first rank decides, the others follow.

A tasklet has collectives in it, so all ranks run it or none does. The first rank tells the others
each act before it does it itself, and each checks that the tasklet is its own next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windrow.errors import WindrowError
from windrow_sidecar.finetune.engine.stages import Outcome
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.finetune.tensor_parallel.adapter import AdapterParts
from windrow_sidecar.finetune.training.checkpoint import Position
from windrow_sidecar.finetune.training.snapshot import TensorSnapshot


class RanksDiffer(WindrowError):
    """A rank would run another tasklet next than the first rank does."""


@dataclass(frozen=True, slots=True)
class RunTasklet:
    """Tells the ranks to run a tasklet."""

    tasklet: Tasklet


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


Act = RunTasklet | AssembleTensors | RestoreTensors


class ShardedStream(TaskletStream):
    """The tasklets of one job on one rank.

    On the first rank it is used as any stream is, once `tell` is set. On the others `follow` does
    the same acts. The others do not hear of a group that is dropped: the first rank drops one only
    when the job ends.

    Args:
        parts: of the adapter.
        options: of `TaskletStream`.

    Attributes:
        tell: called on the first rank with each act before it.
    """

    def __init__(self, parts: AdapterParts, *options: Any, **named: Any) -> None:  # noqa: ANN401
        super().__init__(*options, **named)
        self._adapter_parts = parts
        self.tell: Callable[[Act], None] = lambda act: None

    def run(self, tasklet: Tasklet) -> Outcome | None:
        """Run a tasklet on all ranks (see `TaskletStream.run`)."""
        self.tell(RunTasklet(tasklet))
        return super().run(tasklet)

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
            RanksDiffer: a tasklet is not the one that is next here.
        """
        for act in acts:
            if isinstance(act, RunTasklet):
                if (mine := self.peek()) != act.tasklet:
                    raise RanksDiffer(f"the first rank runs {act.tasklet}, next here is {mine}")
                super().run(act.tasklet)
            elif isinstance(act, AssembleTensors):
                self._adapter_parts.assemble(self.tensors())
            else:
                empty = {
                    name: torch.empty(shape, dtype=dtype)
                    for name, (shape, dtype) in act.shapes.items()
                }
                self._restore(act.position, empty)

    def _assembled(self) -> dict[str, Tensor]:
        self.tell(AssembleTensors())
        return self._adapter_parts.assemble(self.tensors())

    def _restore(self, position: Position, tensors: Mapping[str, Tensor]) -> None:
        found = self._adapter_parts.spread(tensors)
        super().restore(position, self._adapter_parts.taken(found))
