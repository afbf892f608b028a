"""Memory of colocated jobs on a GPU: torch allocates everything from lent chunks.

On the host only named tensors are in chunks (`lent.LentBoundaries`); here all of the jobs is,
so a chunk that is asked back may hold anything. It is left in steps: first frozen layers that take
turns, of which files have a copy, as many as need be; then what layers can compute again is
forgotten, without a copy; then activations of the group on its way go to the host, then adapter and
moments, then all else but the base's parameters; so jobs whose base is decode's own leave every
chunk, and come back when there is room again.

One job, or several that are joined, is on the device at a time; adapters and moments of the others
are on the host. What is on the device counts as taken, whosever it is, and what has to come back
before a tasklet may run counts with it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import nn

from windrow.errors import Transient
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.engines.streaming.schedule import LEAST_LAYERS
from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.memory.training_memory import NoRoom, replan_if_short
from windrow_sidecar.finetune.model.boundaries import Boundaries, TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import move_buffers
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.offload.job_state import SPILL_SHARE, Home, JobOffload
from windrow_sidecar.finetune.recompute.activation_budget import GROUP_SHARE, ActivationBudget
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.heap import settle_heap
from windrow_sidecar.memory.allocator import LentBudget

log = logging.getLogger(__name__)

# Of what adapters and moments take: blocks that are not full.
_SLACK = 1.15


def chunks_for(used_bytes: int, group_bytes: int, chunk_bytes: int) -> int:
    """Return how many chunks hold the live tensors and a group with that peak.

    So many that the share of what is free which a group may take is enough for it: with fewer,
    layers would keep a part and compute the rest again.
    """
    return -(-int(used_bytes + group_bytes / GROUP_SHARE) // chunk_bytes)


class Residents:
    """The number of frozen layers in memory, which follows what decode lends.

    Args:
        frozen: them.
    """

    def __init__(self, frozen: FrozenLayers) -> None:
        self._frozen = frozen

    @property
    def layers(self) -> int:
        """Layers that are in memory, or on their way there."""
        return len(self._frozen.resident)

    @property
    def missing_bytes(self) -> int:
        """Bytes of memory that the fewest layers that can take turns lack."""
        return max(0, LEAST_LAYERS - self._frozen.slots) * self._frozen.slot_bytes

    @property
    def wanted_bytes(self) -> int:
        """Bytes that all layers would take besides."""
        return (self._frozen.depth - self._frozen.slots) * self._frozen.slot_bytes

    def follow(self, room_bytes: int) -> None:
        """Hold as many as there is room for, two at least; to be called between tasklets.

        `room_bytes`: what further layers may take.
        """
        room = self._frozen.slots + room_bytes // self._frozen.slot_bytes
        wanted = max(LEAST_LAYERS, min(room, self._frozen.depth))
        if wanted != self._frozen.capacity:
            self._frozen.resize(wanted)

    def shrink(self) -> None:
        """Let the memory of one layer go, of that which is needed last; its file has it."""
        self._frozen.resize(max(0, self._frozen.slots - 1))


class AllocatedMemory:
    """The memory of a slot on a GPU (see `slot_memory.SlotMemory`).

    Args:
        budget: of the allocator that torch uses.
        device: that computes.
        chunk_bytes: of a chunk.
        host_free_bytes: of the host's memory, for what leaves the device.
        home: of what jobs offload (default: the device).

    Attributes:
        residents: frozen layers of the base, where they take turns.
    """

    one_job, holds_all = False, True
    wanted_by_layers = 0  # `AllocatedTenancy.chunks_for` counts them

    def __init__(
        self,
        budget: LentBudget,
        device: ComputeDevice,
        *,
        chunk_bytes: int,
        host_free_bytes: Callable[[], int],
        home: Home | None = None,
    ) -> None:
        self.budget, self.device, self._home = budget, device, home
        self._chunk_bytes, self.host_free_bytes = chunk_bytes, host_free_bytes
        self.residents: Residents | None = None
        self.present: AllocatedTenant | None = None
        # Whatever has a stream on the device, or has left buffers there; gone with its job.
        self._tenants: list[weakref.ref[AllocatedTenant]] = []
        self._base: nn.Module | None = None
        self._base_away = False

    def share(self, base: nn.Module) -> None:
        """Note the model of which each job gets modules of its own; its buffers can leave too."""
        self._base = base

    def tenancy(self) -> AllocatedTenancy:
        """Return a further job's part."""
        return AllocatedTenancy(self)

    def admit(
        self, stream: TaskletStream | JointStream, budget: ActivationBudget
    ) -> AllocatedTenant:
        """Return the memory of a job with that stream, whose groups take `budget`."""
        tenant = AllocatedTenant(
            self, stream, budget, JobOffload(stream, self.host_free_bytes, self._home)
        )
        self._tenants.append(weakref.ref(tenant))
        self.present = self.present or tenant
        return tenant

    def dismiss(self, tenant: AllocatedTenant) -> None:
        """Forget a job that has left; with the last one every empty chunk goes back."""
        left = [ref for ref in self._tenants if ref() not in (None, tenant)]
        self._tenants = left
        self.present = None if self.present is tenant else self.present
        if not left:
            self.budget.wait_freed()
            self.budget.give_back()

    def groups_want(self, chunks: int) -> None:
        """Do nothing: layers come between two groups (see `AllocatedTenant.settle`)."""
        del chunks

    def vacated(self) -> None:
        """Do nothing: what is empty has gone back, and goes when it is asked for."""

    def give_all_back(self) -> None:
        """Return every chunk that is empty once the groups on their way are dropped."""
        for tenant in self._there():
            tenant.stream.drop()
        self.budget.wait_freed()
        self.budget.give_back()

    def prepare(self) -> None:
        """Have what a further job is made of on the device; nothing of another job is needed there.

        Raises:
            Transient: decode asks for memory that cannot be left.
        """
        self.settle()
        if self._base is not None and self._base_away:
            move_buffers(self._base, self.device.torch)
            self._base_away = False

    @property
    def held_chunks(self) -> int:
        """Chunks that this worker has, as of the last `settle`."""
        return self.budget.chunks

    def capacity_tokens(self, micro_batches: int = 1) -> int:
        """No bound here: groups are formed for what is free (`ActivationBudget.before`)."""
        del micro_batches
        return 1 << 40

    def chunks_that_hold(self, used_bytes: int, group_bytes: int) -> int:
        """Return how many chunks hold live tensors, every missing layer, and a group's peak."""
        layers = self.residents.wanted_bytes if self.residents is not None else 0
        return chunks_for(used_bytes + layers, group_bytes, self._chunk_bytes)

    def settle(self) -> bool:
        """Follow the table of owners; returns whether the budget has changed.

        Raises:
            Transient: decode asks for memory that cannot be left.
        """
        before = self.budget.chunks
        if self.budget.asked_back():
            self._leave()
        return self.budget.settle() or self.budget.chunks != before

    def _there(self) -> list[AllocatedTenant]:
        """Return the tenants, the one whose turn it is first."""
        found = [tenant for ref in self._tenants if (tenant := ref()) is not None]
        return sorted(found, key=lambda tenant: tenant is not self.present)

    def _leave(self) -> None:
        """Empty the chunks that drain, with as little moved as will do."""
        # The allocator keeps a chunk until whatever may use it has ended, on every stream: those of
        # a checkpoint's copies and of frozen layers too. After the wait its answer is final, and no
        # more is moved than has to be.
        self.budget.wait_freed()
        self.budget.settle()
        residents = self.residents
        shrinks = [residents.shrink] * residents.layers if residents else []
        # Workspaces of libraries first: they cost nothing but to be made again.
        steps = (
            self.device.release_caches,
            *shrinks,
            self._forget,
            self._spill,
            self._move_out,
            self._move_buffers,
            settle_heap,  # of a job that has ended, what nobody refers to but itself
        )
        for step in steps:
            if not self.budget.asked_back():
                return
            step()
            self.budget.wait_freed()
            self.budget.settle()
        if not self.budget.asked_back():
            return
        raise Transient(
            "decode asks for memory that holds what this job cannot do without; it goes on from "
            "its checkpoint where more is lent"
        )

    def _forget(self) -> None:
        for tenant in self._there():
            tenant.stream.forget()

    def _spill(self) -> None:
        room_bytes = int(SPILL_SHARE * self.host_free_bytes())
        for tenant in self._there():
            tenant.stream.spill(room_bytes)

    def _move_out(self) -> None:
        """Move tensors out; they return before anything runs (see `runner`), to lasting chunks.

        Those of jobs that wait for their turn are out already.
        """
        if self.present is not None:
            self.present.move_out()

    def _move_buffers(self) -> None:
        for tenant in self._there():
            tenant.move_buffers_out()
        if self._base is not None and not self._base_away:
            move_buffers(self._base, torch.device("cpu"))
            self._base_away = True
        # Moving has computed: a buffer of another type is converted on its way.
        self.device.release_caches()


class AllocatedTenancy:
    """One job's part of such memory (see `slot_memory.Tenancy`)."""

    def __init__(self, slot: AllocatedMemory) -> None:
        self._slot, self._boundaries = slot, TorchBoundaries()
        self._tenant: AllocatedTenant | None = None

    @property
    def boundaries(self) -> Boundaries:
        """Return what holds the job's boundary activations: torch's memory, in chunks like all."""
        return self._boundaries

    @property
    def is_tenant(self) -> bool:
        """True where the job has the device, until another one comes."""
        return self._tenant is not None and self._slot.present is self._tenant

    def chunks_for(self, tokens: int, micro_batches: int = 1) -> int:
        """Return the chunks that a group needs, with all that is there and every missing layer.

        `tokens`: of each micro-batch. Adapters and moments of the job count, wherever they are.
        """
        assert self._tenant is not None
        return self._tenant.chunks_for(tokens * micro_batches)

    def serve(
        self, stream: TaskletStream | JointStream, activation_budget: ActivationBudget
    ) -> AllocatedTenant:
        """Return the memory of the job with that stream, whose groups take `activation_budget`."""
        self._tenant = self._slot.admit(stream, activation_budget)
        return self._tenant


class AllocatedTenant:
    """The memory of a job on a GPU, or of joined ones (see `slot_memory.TenantMemory`).

    Args:
        slot: the memory that it is part of.
        stream: of the job.
        activation_budget: what its groups take.
        job_offload: of the job's state.

    Attributes:
        stream: as given.
    """

    def __init__(
        self,
        slot: AllocatedMemory,
        stream: TaskletStream | JointStream,
        activation_budget: ActivationBudget,
        job_offload: JobOffload,
    ) -> None:
        self._slot, self.stream = slot, stream
        self._activation_budget, self._job_offload = activation_budget, job_offload
        self.is_starving = False  # as `starving` last found
        self._buffers_away = False

    def chunks_for(self, tokens: int) -> int:
        """Return the chunks that hold all that is there and a group of so many padded tokens."""
        used = self._slot.budget.used_bytes() + self._away_bytes()
        # What graphs have of lent memory is the group's own; the driver's is beside it.
        used -= self.stream.graph_bytes
        return self._slot.chunks_that_hold(used, self._activation_budget.peak_bytes(tokens))

    def settle(self) -> None:
        """Follow the table of owners; what comes next is formed for what is there.

        Raises:
            Transient: decode asks for memory that cannot be left.
        """
        self._slot.present = self
        changed = self._slot.settle()
        if self._slot.residents is not None:
            # Further layers come between two groups only, and leave the next one its share.
            spare = int((1 - GROUP_SHARE) * self._slot.budget.free_bytes())
            self._slot.residents.follow(spare if self.stream.between_micro_batches else 0)
        if changed:
            self.stream.replan()
        replan_if_short(self.stream, self._activation_budget)

    def starving(self, tasklet: Tasklet) -> bool:
        """Return whether an unbegun group does not fit, or layers, or what was moved out."""
        residents = self._slot.residents
        layers = residents.missing_bytes if residents else 0
        if away := self._away_bytes():
            tokens = tasklet.micro.padded_tokens if tasklet.micro else 0
            fits = self._activation_budget.fits(tokens, away + layers)
            self.is_starving = not fits or away > self._slot.budget.free_bytes()
        elif layers and layers > self._slot.budget.free_bytes():
            self.is_starving = True
        else:
            group = self.stream.tokens_to_begin
            self.is_starving = bool(group) and not self._activation_budget.fits(group, layers)
        return self.is_starving

    def asked_back(self) -> bool:
        """Return whether decode waits for a chunk."""
        return self._slot.budget.asked_back()

    def offload(self) -> None:
        """Move the job's state to the host, and give up what is empty then."""
        self.move_out()
        self._slot.budget.settle()

    def restore(self) -> bool:
        """Move it back.

        Raises:
            NoRoom: what decode lends now does not hold it.
        """
        self._slot.present = self
        away, budget = self._away_bytes(), self._slot.budget
        # What decode waits for counts as free, and takes nothing any more.
        if away and (budget.asked_back() or away > budget.free_bytes()):
            raise NoRoom(f"decode lends no room for the job's own {away} bytes")
        if self._buffers_away:
            self.stream.move_buffers(to_host=False)
            self._buffers_away = False
        return self._job_offload.back()

    def release(self) -> None:
        """Drop the group on its way; with the last job every chunk that is empty goes back."""
        self.stream.drop()
        self._slot.dismiss(self)

    def move_out(self) -> None:
        """Move the job's state to the host."""
        self._job_offload.out()

    def move_buffers_out(self) -> None:
        """Leave nothing of the job on the device but the base's parameters."""
        self.stream.move_buffers(to_host=True)
        self._buffers_away = True

    def _away_bytes(self) -> int:
        """Return the bytes that its state will take when it comes back; 0: it is there."""
        away = int(_SLACK * self.stream.away_bytes)
        return max(away, 1) if self._buffers_away else away
