"""Memory of a running job: the protocol, and its implementation on a device of its own."""

from __future__ import annotations

from typing import Protocol

from windrow.errors import Transient
from windrow_sidecar.compute.host_device import available_bytes
from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.offload.job_state import Home, JobOffload
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget
from windrow_sidecar.finetune.tasklets import Tasklet


class NoRoom(Transient):
    """Error of what was moved out and does not fit now; nothing of it has come back."""


class TrainingMemory(Protocol):
    """Holds a job's activations and state.

    Three do: `OwnMemory` (a device of its own), `lent.LentMemory` (beside decode on a host) and
    `allocated.AllocatedMemory` (beside decode on a GPU).
    """

    def settle(self) -> None:
        """Follow what was lent and what is asked back; the group on its way may be moved."""

    def starving(self, tasklet: Tasklet) -> bool:
        """Return whether there is no room for that tasklet."""

    def offload(self) -> None:
        """Leave device memory to others: the job's state goes to the host. Twice is once."""

    def restore(self) -> bool:
        """Undo `offload`, before anything of the job runs. Returns whether it had to.

        Raises:
            NoRoom: decode has taken the room for it meanwhile.
        """

    def release(self) -> None:
        """Drop the micro-batch on its way and give everything back."""


def replan_if_short(
    stream: TaskletStream | JointStream, activation_budget: ActivationBudget
) -> None:
    """Form a group again that has not begun and does not fit any more."""
    tokens = stream.tokens_to_begin
    if tokens and not activation_budget.fits(tokens):
        stream.replan()


class OwnMemory:
    """Torch's own memory, none of it lent: a group that does not fit fails the job.

    Args:
        stream: of the job.
        home: where it trains (default: where its adapter is).
        activation_budget: what its groups take; None: they are not asked about.
    """

    def __init__(
        self,
        stream: TaskletStream | JointStream,
        home: Home | None = None,
        activation_budget: ActivationBudget | None = None,
    ) -> None:
        self._stream, self._job_offload = stream, JobOffload(stream, available_bytes, home)
        self._activation_budget = activation_budget

    def settle(self) -> None:
        """Form the next group again where less is free than when it was formed."""
        if self._activation_budget is not None:
            replan_if_short(self._stream, self._activation_budget)

    def starving(self, tasklet: Tasklet) -> bool:
        """Return False always.

        Raises:
            MemoryError: the group that is about to begin, made as small as may be, does not fit.
        """
        del tasklet
        if self._activation_budget is not None and (tokens := self._stream.tokens_to_begin):
            self._activation_budget.check(tokens)
        return False

    def offload(self) -> None:
        """Move the job's state to the host."""
        self._job_offload.out()

    def restore(self) -> bool:
        """Move it back."""
        return self._job_offload.back()

    def release(self) -> None:
        """Drop the group on its way; torch frees it."""
        self._stream.drop()
