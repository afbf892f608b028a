"""Memory of colocated jobs on a host: boundary activations in lent chunks, all else their own.

The table of owners is the truth: what is DRAINING goes back at the next tasklet boundary, in two
steps. `LentBoundaries.must_leave` says whether the running group uses such a chunk. `LentMemory`
then spills the group to the worker's own memory and forms the next one for the remaining chunks.
`LentBoundaries.settle` gives back what is empty.

Jobs that share a worker share its chunks, one after the other: the tenant is the one whose turn it
is, and what the others do (end, forget, look) leaves its activations alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from windrow.errors import InvariantBroken
from windrow_sidecar._core import Geometry
from windrow_sidecar.compute.host_device import available_bytes
from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.memory.chunk_layout import (
    aligned,
    chunks_needed,
    runs_of,
    tokens_that_fit,
)
from windrow_sidecar.finetune.memory.lent_layers import LentLayers
from windrow_sidecar.finetune.memory.training_memory import replan_if_short
from windrow_sidecar.finetune.offload.job_state import SPILL_SHARE, JobOffload
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.memory.tensors import HasBytes, arena_tensor


class LentChunks(HasBytes, Protocol):
    """Chunks that a worker has been lent: an attached `Arena`, or what ranks have agreed on."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the arena."""

    def chunk_offset(self, chunk: int) -> int:
        """Return where a chunk begins in the arena."""

    def held(self, owner: int) -> list[int]:
        """Chunks that are lent to that owner, ascending."""

    def draining(self, owner: int) -> list[int]:
        """Chunks of that owner that are asked back."""

    def give_back(self, chunk: int, *, owner: int) -> None:
        """Return a chunk to decode."""


class LentBoundaries:
    """The worker's lent chunks, laid out for the boundaries of one group at a time.

    The memory of a slot on a host (see `slot_memory.SlotMemory`). All of a group's are laid out at
    once, each of the largest micro-batch's size, so that chunks that go back meanwhile are never
    missing later.

    Args:
        arena: attached, as a peer; or the chunks that ranks have agreed on.
        owner: this worker's epoch.
        boundaries: of a micro-batch: one for each layer.
        bytes_per_token: of one boundary.
        layers: frozen ones, which may have what groups leave of the chunks.

    Attributes:
        tenant: whose the boundaries are: the job that came last.
        wanted_by_groups: chunks that groups of any job have asked for; layers get none of them.
    """

    one_job = holds_all = False

    def __init__(
        self,
        arena: LentChunks,
        owner: int,
        *,
        boundaries: int,
        bytes_per_token: int,
        layers: LentLayers | None = None,
    ) -> None:
        self._arena, self._owner = arena, owner
        self._boundaries, self._bytes_per_token = boundaries, bytes_per_token
        self._chunk_bytes = arena.geometry.chunk_bytes
        self._layers = layers
        self._held: tuple[int, ...] = ()
        self._room: tuple[int, ...] = ()  # of those held, the chunks without a layer
        self._slots: list[int] = []  # offsets, for the boundaries that are still to come
        self._used: set[int] = set()  # chunks that hold the group on its way
        self.tenant: object = None
        self.wanted_by_groups = 0

    @property
    def held_chunks(self) -> int:
        """Chunks that this worker has, as of the last `settle`."""
        return len(self._held)

    @property
    def wanted_by_layers(self) -> int:
        """Chunks more that would hold every frozen layer."""
        return self._layers.wanted_chunks if self._layers else 0

    def groups_want(self, chunks: int) -> None:
        """Leave so many chunks to groups, the most that was said."""
        self.wanted_by_groups = max(self.wanted_by_groups, chunks)

    def tenancy(self) -> TenantBoundaries:
        """Return a further job's part."""
        return TenantBoundaries(self)

    def vacated(self) -> None:
        """Give every chunk back: no job is left to use it."""
        self.give_all_back()

    def capacity_tokens(self, micro_batches: int = 1) -> int:
        """Padded tokens of each of so many micro-batches, the most that fit together."""
        return tokens_that_fit(
            runs_of(self._room),
            chunk_bytes=self._chunk_bytes,
            boundaries=micro_batches * self._boundaries,
            bytes_per_token=self._bytes_per_token,
        )

    def chunks_for(self, tokens: int, micro_batches: int = 1) -> int:
        """Return the chunks that a group of micro-batches of so many padded tokens each needs."""
        return chunks_needed(
            tokens,
            chunk_bytes=self._chunk_bytes,
            boundaries=micro_batches * self._boundaries,
            bytes_per_token=self._bytes_per_token,
        )

    def must_leave(self) -> bool:
        """Return whether the running group is in a chunk that is asked back; drops layers."""
        draining = self._arena.draining(self._owner)
        if self._layers is not None:
            self._layers.leave(draining)
        return not self._used.isdisjoint(draining)

    def settle(self) -> bool:
        """Give back what drains and is empty, and take note of new chunks.

        A chunk that is asked back between `must_leave` and here, and is not empty, stays for the
        next tasklet boundary.

        Returns:
            whether the next micro-batch has other memory than was known.
        """
        in_use = self._used | (self._layers.chunks if self._layers else frozenset())
        for chunk in self._arena.draining(self._owner):
            if chunk not in in_use:
                self._arena.give_back(chunk, owner=self._owner)
        self._held = tuple(self._arena.held(self._owner))
        room = self._without_layers(self._layers) if self._layers else self._held
        changed = room != self._room
        self._room = room
        return changed

    def _without_layers(self, layers: LentLayers) -> tuple[int, ...]:
        """Let layers have what groups do not want; return what is left of the held chunks.

        Groups have the highest ids, as they are laid out from there (see `expect`).
        """
        for_layers = max(0, len(self._held) - self.wanted_by_groups)
        layers.leave(self._held[for_layers:])
        spare = set(self._held[:for_layers]) - layers.chunks - self._used
        layers.grow(sorted(spare))
        return tuple(chunk for chunk in self._held if chunk not in layers.chunks)

    def asked_back(self) -> bool:
        """Return whether a chunk drains."""
        return bool(self._arena.draining(self._owner))

    def give_all_back(self) -> None:
        """Return every chunk. No activation may be left in them."""
        self.clear()
        if self._layers is not None:
            self._layers.leave(self._layers.chunks)
        for chunk in (*self._arena.draining(self._owner), *self._arena.held(self._owner)):
            self._arena.give_back(chunk, owner=self._owner)
        self._held = self._room = ()

    @property
    def is_clear(self) -> bool:
        """True where no activation is in the chunks."""
        return not (self._slots or self._used)

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return memory for a boundary of the expected group: `shape`, [rows, tokens, hidden].

        In a lent chunk, of `like`'s dtype, not initialised; good until its group has ended.
        """
        # A tensor of its own: views of one tensor would share its version counter, and filling one
        # would invalidate what autograd has saved of the others.
        return arena_tensor(self._arena, self._slots.pop(), shape, like.dtype)

    def clear(self) -> None:
        """Forget all activations; their chunks stay lent."""
        self._slots.clear()
        self._used.clear()

    def expect(self, micro_batches: int, tokens: int) -> None:
        """Lay out the group that begins.

        Raises:
            MemoryError: it does not fit; groups are formed within `capacity_tokens`.
        """
        self.clear()
        size, missing = aligned(tokens * self._bytes_per_token), micro_batches * self._boundaries
        for run in runs_of(self._room):
            # From the end of a run: its lowest chunks stay empty for as long as possible.
            end = self._arena.chunk_offset(run.first) + run.chunks * self._chunk_bytes
            fitting = min(missing, run.chunks * self._chunk_bytes // size)
            self._slots += [end - size * (i + 1) for i in range(fitting)]
            lowest = run.end - -(-fitting * size // self._chunk_bytes)
            self._used.update(range(lowest, run.end))
            missing -= fitting
        if missing:
            self.clear()
            raise MemoryError(f"{missing} activations of {size} bytes fit into no lent chunk")


class TenantBoundaries:
    """One job's boundaries in the chunks that its worker's jobs share, one job at a time.

    A job's part of a slot's memory on a host (see `slot_memory.Tenancy`).
    """

    def __init__(self, lent: LentBoundaries) -> None:
        self._lent = lent

    @property
    def boundaries(self) -> TenantBoundaries:
        """Return what holds the job's boundaries: this."""
        return self

    def chunks_for(self, tokens: int, micro_batches: int = 1) -> int:
        """Return the chunks that a group needs, of so many padded tokens in each micro-batch."""
        return self._lent.chunks_for(tokens, micro_batches)

    def serve(
        self, stream: TaskletStream | JointStream, activation_budget: ActivationBudget
    ) -> LentMemory:
        """Return the memory of the job with that stream; its groups take `activation_budget`."""
        return LentMemory(self._lent, self, stream, activation_budget)

    @property
    def is_tenant(self) -> bool:
        """True where the chunks are this job's and no other has come since."""
        return self._lent.tenant is self

    def move_in(self) -> None:
        """Become the tenant.

        Raises:
            InvariantBroken: something of the tenant before is there still.
        """
        if not self.is_tenant:
            if not self._lent.is_clear:
                raise InvariantBroken("the lent chunks hold activations of another job")
            self._lent.tenant = self

    def expect(self, micro_batches: int, tokens: int) -> None:
        """Lay out the group that begins.

        Raises:
            MemoryError: see `LentBoundaries.expect`.
            InvariantBroken: it is another job's turn.
        """
        self._check_tenant()
        self._lent.expect(micro_batches, tokens)

    def place(self, hidden: Tensor) -> Tensor:
        """Copy `hidden`, [rows, tokens, hidden], into a lent chunk (see `room`); without graph."""
        return self.room(hidden, tuple(hidden.shape)).copy_(hidden.detach())

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return memory for a boundary, [rows, tokens, hidden]; see `LentBoundaries.room`.

        Raises:
            InvariantBroken: it is another job's turn.
        """
        self._check_tenant()
        return self._lent.room(like, shape)

    def clear(self) -> None:
        """Forget this job's activations; it has none where it is not the tenant."""
        if self.is_tenant:
            self._lent.clear()

    def _check_tenant(self) -> None:
        if not self.is_tenant:
            raise InvariantBroken("the lent chunks are another job's")


class LentMemory:
    """The memory of a colocated job on the host (see `slot_memory.TenantMemory`).

    Args:
        lent: what the worker has of decode's memory, shared with other jobs.
        boundaries: this job's in it.
        stream: of the job.
        activation_budget: what its groups take of the worker's own memory, which may be short.
        free_bytes: of the host's memory, for boundaries that leave their chunks.
    """

    def __init__(
        self,
        lent: LentBoundaries,
        boundaries: TenantBoundaries,
        stream: TaskletStream | JointStream,
        activation_budget: ActivationBudget,
        *,
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        self._lent, self._boundaries = lent, boundaries
        self._stream, self._activation_budget, self._free_bytes = (
            stream,
            activation_budget,
            free_bytes,
        )
        self._job_offload = JobOffload(stream, free_bytes)
        self.is_starving = False  # as `starving` last found

    def settle(self) -> None:
        """Follow the table of owners; what comes next is formed for what is there.

        To be called on the job whose turn it is.
        """
        if self._lent.must_leave():
            self._stream.spill(int(SPILL_SHARE * self._free_bytes()))
        if self._lent.settle():
            self._stream.replan()
        replan_if_short(self._stream, self._activation_budget)

    def starving(self, tasklet: Tasklet) -> bool:
        """Return whether an unbegun group does not fit, in lent chunks or in own memory."""
        del tasklet
        group = [micro.padded_tokens for micro in self._stream.group_to_begin]
        self.is_starving = bool(group) and (
            max(group) > self._lent.capacity_tokens(len(group))
            or not self._activation_budget.fits(sum(group))
        )
        return self.is_starving

    def asked_back(self) -> bool:
        """Return whether decode waits for a chunk."""
        return self._lent.asked_back()

    def offload(self) -> None:
        """Move the job's state to the host; chunks that are empty then stay until asked for."""
        self._job_offload.out()

    def restore(self) -> bool:
        """Move it back; from now on the chunks are this job's."""
        self._boundaries.move_in()
        return self._job_offload.back()

    def release(self) -> None:
        """Drop the micro-batch on its way; the chunks are the worker's, for its other jobs."""
        self._stream.drop()
