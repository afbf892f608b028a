"""Memory that decode lends to a slot: what the slot, a job in it, and its runner ask of it.

Two modules implement them: `lent` on a host, where boundary activations are in chunks; `allocated`
on a GPU, where chunks hold all that torch allocates, adapters and moments included.
"""

from __future__ import annotations

from typing import Protocol

from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.memory.training_memory import TrainingMemory
from windrow_sidecar.finetune.model.boundaries import Boundaries
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget


class TenantMemory(TrainingMemory, Protocol):
    """Memory of a running job beside decode.

    Attributes:
        is_starving: whether there was no room, as `starving` last found.
    """

    is_starving: bool

    def asked_back(self) -> bool:
        """Return whether decode waits for a chunk."""


class Tenancy(Protocol):
    """One job's part of a slot's memory."""

    @property
    def boundaries(self) -> Boundaries:
        """Return what holds the job's boundary activations."""

    @property
    def is_tenant(self) -> bool:
        """True where the chunks are this job's, until another one comes."""

    def chunks_for(self, tokens: int, micro_batches: int = 1) -> int:
        """Return the chunks that a group needs, of so many padded tokens in each micro-batch."""

    def serve(
        self, stream: TaskletStream | JointStream, activation_budget: ActivationBudget
    ) -> TenantMemory:
        """Return the memory of the job with that stream, whose groups take `activation_budget`."""


class SlotMemory(Protocol):
    """The chunks that decode lends to a slot's worker.

    Attributes:
        one_job: whether only one job can be in it.
        holds_all: whether all that torch allocates for a job is in the chunks, so that without any
            a job cannot even be attached.
    """

    one_job: bool
    holds_all: bool

    @property
    def held_chunks(self) -> int:
        """Chunks that the worker has, as of the last time that it looked."""

    @property
    def wanted_by_layers(self) -> int:
        """Chunks besides those of groups that would hold every frozen layer."""

    def capacity_tokens(self, micro_batches: int = 1) -> int:
        """Return padded tokens of each of so many micro-batches, the most that fit together."""

    def settle(self) -> bool:
        """Follow the table of owners; returns whether that has changed anything."""

    def groups_want(self, chunks: int) -> None:
        """Leave so many chunks to groups."""

    def tenancy(self) -> Tenancy:
        """Return a further job's part."""

    def vacated(self) -> None:
        """Follow that no job is left."""

    def give_all_back(self) -> None:
        """Return every chunk; nothing of a job is needed any more."""
