"""One loaded job of a colocated worker: its session, its memory, and the chunks it wants."""

from __future__ import annotations

from dataclasses import dataclass, replace

from windrow_sidecar.finetune.adapter.layer_programs import wanted_program
from windrow_sidecar.finetune.colocated.grants import DEFAULT_BOUND_US, GrantGate
from windrow_sidecar.finetune.colocated.slot_device import SlotDevice, in_time_only
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.engine.sizing import (
    Estimates,
    Paced,
    micro_batches_a_visit,
    most_that_fit,
)
from windrow_sidecar.finetune.engine.suspension import Suspension
from windrow_sidecar.finetune.job.assembly import (
    JobSpec,
    TaskletRuntime,
    TrainingSession,
    open_session,
)
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.memory.allocated import AllocatedMemory, Loaded, Residents
from windrow_sidecar.finetune.memory.boundaries import LentBoundaries, TenantBoundaries
from windrow_sidecar.finetune.memory.lent import LentMemory
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.finetune.training.health import ATTACHING, READING
from windrow_sidecar.qos.view import Grant, Phase


@dataclass(frozen=True, slots=True)
class Shared:
    """State that the jobs of one worker share.

    Attributes:
        gate: decode's grants.
        estimates: of tasklets; they are those of one base, which takes nearly all of their time.
        slot_device: what the slot's device is for this process.
        lent: decode's chunks for boundary activations.
        residents: layers of the base, where they take turns.
    """

    gate: GrantGate
    estimates: Estimates
    slot_device: SlotDevice
    lent: LentBoundaries
    residents: Residents | None


class JobContext:
    """A loaded job, with the memory and the limits that its slot gives it.

    Args:
        job: what to do.
        base: the frozen model; gets the adapter.
        shared: what it shares with other jobs.
        job_state: says whether the job's end is asked for.
        rows: its rows, where they have been read already.

    Raises:
        UserError: model, rows or adapter cannot be honoured.
        Transient: the place of the rows does not answer.
    """

    def __init__(
        self,
        job: JobSpec,
        base: BaseModel,
        shared: Shared,
        job_state: JobState,
        rows: DataSplit | None = None,
    ) -> None:
        self._shared, self.job_state = shared, job_state
        self.wanted_chunks, self._frozen = 0, base.frozen
        self._sized: Paced | None = None
        self._sized_for: Grant | None = None
        slot_device = shared.slot_device
        suspension = Suspension(shared.gate, job_state.stall, self._give_up)
        self._boundaries = TenantBoundaries(shared.lent)
        self._room: LentBoundaries | AllocatedMemory = slot_device.memory or shared.lent
        with job_state.stall.during(READING if rows is None else ATTACHING):
            self.session: TrainingSession = open_session(
                job,
                base,
                TaskletRuntime(
                    TorchBoundaries() if slot_device.memory else self._boundaries,
                    self._limits,
                    sizing=self._sizing,
                    windows=True,
                    between=suspension.point,
                    device=slot_device.device,
                    units=slot_device.units_of(shared.gate),
                    program=wanted_program(),
                ),
                rows=rows,
                alive=job_state.stall.renew,
            )
        self.memory = self._memory()
        if slot_device.memory is not None:
            sharing = slot_device.sharing
            job_state.sharing = (sharing.mode, sharing.reason, sharing.code)
        if slot_device.sharing.mode == "temporal":
            notes = (*self.session.notes, in_time_only(slot_device.sharing))
            self.session = replace(self.session, notes=notes)

    @property
    def has_turn(self) -> bool:
        """True where the slot's memory is this job's; one that has it alone always has it."""
        return self._shared.slot_device.memory is not None or self._boundaries.is_tenant

    @property
    def tokens_done(self) -> int:
        """Real tokens of the optimizer steps that this process has finished."""
        return self.session.stream.position.tokens_done - self.job_state.tokens_restored

    def _memory(self) -> LentMemory | AllocatedMemory:
        stream = self.session.stream
        if (allocated := self._shared.slot_device.memory) is not None:
            allocated.serve(Loaded(stream, self.session.activation_budget, self._shared.residents))
            return allocated
        return LentMemory(
            self._shared.lent,
            self._boundaries,
            stream,
            self.session.activation_budget,
        )

    def _limits(self) -> MicroLimits:
        """Return as many rows as keep a layer's backward within the bound and fit what is lent."""
        tokens = self._sizing().tokens(Phase.BACKWARD)
        of_each = self.session.micro_batch_tokens(tokens)
        most = self.session.job.spec.training.batch_size
        together = micro_batches_a_visit(self._frozen, self._shared.estimates, of_each, most)
        wanted = self._room.chunks_for(max(of_each, self.session.longest_row), together)
        # Never less than before: a wish that trembles would move chunks to and fro.
        self.wanted_chunks = max(wanted, self.wanted_chunks)
        lent = self._shared.lent
        lent.wanted_by_groups = max(lent.wanted_by_groups, self.wanted_chunks)
        together = most_that_fit(together, of_each, self._room.capacity_tokens)
        return MicroLimits(min(tokens, self._room.capacity_tokens(together)), together)

    def _sizing(self) -> Paced:
        """Return the sizes for the newest grant's time; one object until that changes."""
        grant = self._shared.gate.latest()
        windows = not self.session.stream.parts.stack.windows_refused
        if self._sized is not None and self._sized_for is grant and self._sized.windows == windows:
            return self._sized
        bound_us = grant.in_flight_bound_us or DEFAULT_BOUND_US
        queues = self._shared.slot_device.device.queues
        if queues:
            bound_us //= 2  # while one runs, the next is queued behind it
        if grant.budget_us:
            bound_us = min(bound_us, grant.budget_us)
        units = grant.finetune_units
        self._sized_for = grant
        self._sized = Paced(
            self._shared.estimates, bound_us, units, windows, grant.window_tokens, queues=queues
        )
        return self._sized

    def _give_up(self) -> bool:
        """Return whether a layer that is held up in its middle should be given up."""
        return bool(self.job_state.stop_asked) or self.memory.asked_back()
