"""Memory of a slot whose engine lends none: a job's activations are in the worker's own memory.

An engine over several ranks shares time and compute only. What a job may take is what the pod has
left, and its groups are formed for that.
"""

from __future__ import annotations

from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.memory.training_memory import replan_if_short
from windrow_sidecar.finetune.model.boundaries import Boundaries, TorchBoundaries
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget
from windrow_sidecar.finetune.tasklets import Tasklet

# More than any row has.
_NO_BOUND_TOKENS = 1 << 40


class OwnSlotMemory:
    """The memory of a slot without lent chunks (see `slot_memory.SlotMemory`)."""

    one_job, holds_all = True, False
    held_chunks = 0
    wanted_by_layers = 0

    def capacity_tokens(self, micro_batches: int = 1) -> int:
        """Return more tokens than there are: the activation budget is the bound."""
        del micro_batches
        return _NO_BOUND_TOKENS

    def settle(self) -> bool:
        """Return False: nothing is borrowed."""
        return False

    def groups_want(self, chunks: int) -> None:
        """Do nothing: there are no chunks."""
        del chunks

    def tenancy(self) -> OwnTenancy:
        """Return the job's part."""
        return OwnTenancy()

    def vacated(self) -> None:
        """Do nothing: nothing is borrowed."""

    def give_all_back(self) -> None:
        """Do nothing: nothing is borrowed."""


class OwnTenancy:
    """The one job's part of such a memory (see `slot_memory.Tenancy`)."""

    is_tenant = True

    def __init__(self) -> None:
        self._boundaries = TorchBoundaries()

    @property
    def boundaries(self) -> Boundaries:
        """Return what holds the job's boundary activations: torch's own memory."""
        return self._boundaries

    def chunks_for(self, tokens: int, micro_batches: int = 1) -> int:
        """Return 0: nothing is borrowed."""
        del tokens, micro_batches
        return 0

    def serve(
        self, stream: TaskletStream | JointStream, activation_budget: ActivationBudget
    ) -> UnlentMemory:
        """Return the memory of the job with that stream, whose groups take `activation_budget`."""
        return UnlentMemory(stream, activation_budget)


class UnlentMemory:
    """The memory of a job beside decode that borrows nothing (see `slot_memory.TenantMemory`).

    Args:
        stream: of the job.
        activation_budget: what its groups take of the worker's memory.
    """

    is_starving = False

    def __init__(
        self, stream: TaskletStream | JointStream, activation_budget: ActivationBudget
    ) -> None:
        self._stream, self._activation_budget = stream, activation_budget

    def settle(self) -> None:
        """Form the next group again where less memory is free than when it was formed."""
        replan_if_short(self._stream, self._activation_budget)

    def starving(self, tasklet: Tasklet) -> bool:
        """Return whether a group that has not begun does not fit into what is free now."""
        del tasklet
        tokens = self._stream.tokens_to_begin
        self.is_starving = bool(tokens) and not self._activation_budget.fits(tokens)
        return self.is_starving

    def asked_back(self) -> bool:
        """Return False: nothing is borrowed."""
        return False

    def offload(self) -> None:
        """Do nothing: a pause leaves all where it is, in host memory."""

    def restore(self) -> bool:
        """Return False: nothing was moved."""
        return False

    def release(self) -> None:
        """Drop the group on its way; torch frees it."""
        self._stream.drop()
