"""One job of a worker that carries several, as who gives out turns sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windrow.protocol import Ending
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.job.runner import Runner
from windrow_sidecar.finetune.memory.training_memory import TrainingMemory
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget

# Until somebody has looked whether its rows can pass beside those of others.
NOT_LOOKED_AT = "nobody has looked whether it can be joined"


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


def _nothing() -> None:
    pass


def _ignore(others: int, why: str) -> None:
    del others, why


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
        joined: called as it changes with the number of other jobs whose rows pass beside its own,
            and, where there are none, why it has turns of its own; "": it has the worker alone.
        apart: why its rows cannot pass beside those of others; "": they can.
        activation_budget: what its groups take; needed where its rows can be joined.
        program: that its own layers run by (see `layer_programs`); joint ones run eagerly.
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
    joined: Callable[[int, str], None] = _ignore
    apart: str = NOT_LOOKED_AT
    activation_budget: ActivationBudget | None = None
    program: str = "eager"

    @property
    def told_to_pause(self) -> bool:
        """True where a command holds it back."""
        return self.runner.told_to_pause

    @property
    def starving(self) -> bool:
        """True where its last turn was held up for want of memory."""
        return self.runner.starving

    def share(self) -> JobShare:
        """Return the share as the scheduler sees it."""
        may_run = not self.runner.told_to_pause
        return JobShare(self.head_start + self.stream.tokens_seen, self.weight, may_run)
