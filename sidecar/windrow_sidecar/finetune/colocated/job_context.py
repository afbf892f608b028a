"""One loaded job of a colocated worker: its session, its memory, and the chunks it wants."""

from __future__ import annotations

from dataclasses import replace

from windrow_sidecar.finetune.adapter.layer_programs import wanted_program
from windrow_sidecar.finetune.colocated.pace import RowsOfPace, Shared, TaskletPace
from windrow_sidecar.finetune.colocated.slot_device import in_time_only
from windrow_sidecar.finetune.data.split import DataSplit
from windrow_sidecar.finetune.engine.suspension import Suspension
from windrow_sidecar.finetune.job.assembly import (
    JobSpec,
    TaskletRuntime,
    TrainingSession,
    open_session,
)
from windrow_sidecar.finetune.job.joint_turns import why_apart
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget
from windrow_sidecar.finetune.training.health import ATTACHING, READING


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
        self.job_state, group = job_state, shared.group
        rows_of_pace = RowsOfPace(
            windows=lambda: group is None and not self.session.stream.parts.stack.windows_refused,
            micro_batch_tokens=lambda tokens: self.session.micro_batch_tokens(tokens),
            longest=lambda: self.session.longest_row,
            most=job.spec.training.batch_size,
        )
        self._tenancy = shared.memory.tenancy()
        self._pace = TaskletPace(shared, self._tenancy, rows_of_pace, base.in_turns)
        slot_device = shared.slot_device
        suspension = Suspension(shared.gate, job_state.stall, self._give_up)
        with job_state.stall.during(READING if rows is None else ATTACHING):
            self.session: TrainingSession = open_session(
                job,
                base,
                TaskletRuntime(
                    self._tenancy.boundaries,
                    self._pace.limits,
                    sizing=self._pace.sizing,
                    # Of several ranks all run a tasklet, to its end.
                    windows=group is None,
                    between=suspension.point if group is None else None,
                    device=slot_device.device,
                    units=slot_device.units_of(shared.gate),
                    program=wanted_program() if group is None else "eager",
                    order=shared.order,
                    bound_us=lambda: self._pace.sizing().bound_us,
                ),
                rows=rows,
                alive=job_state.stall.renew,
                sharding=group.sharding if group is not None else None,
            )
        if group is not None:
            group.lead(
                self.session.stream,
                units=lambda: shared.gate.active_units,
                bound_us=lambda: shared.gate.grant.in_flight_bound_us,
                stall=job_state.stall,
            )
        self._apart = why_apart(self.session, base)
        self.memory = self._tenancy.serve(self.session.stream, self.session.activation_budget)
        sharing = slot_device.sharing
        if slot_device.device.queues:  # a GPU: on a host there is one way only
            job_state.sharing = (sharing.mode, sharing.reason, sharing.code)
        if sharing.mode == "temporal":
            notes = (*self.session.notes, in_time_only(sharing))
            self.session = replace(self.session, notes=notes)

    @property
    def has_turn(self) -> bool:
        """True where the slot's memory is this job's; one that has it alone always has it."""
        return self._tenancy.is_tenant

    @property
    def apart(self) -> str:
        """Reason why its rows cannot pass beside those of other jobs; "": they can."""
        return self._apart

    @property
    def wanted_chunks(self) -> int:
        """Chunks that its groups want, the most so far."""
        return self._pace.wanted_chunks

    @property
    def activation_budget(self) -> ActivationBudget:
        """Bytes that its groups take."""
        return self.session.activation_budget

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return self.session.stream.parts.stack.depth

    @property
    def tokens_done(self) -> int:
        """Real tokens of the optimizer steps that this process has finished."""
        return self.session.stream.position.tokens_done - self.job_state.tokens_restored

    def _give_up(self) -> bool:
        """Return whether a layer that is held up in its middle should be given up."""
        return bool(self.job_state.stop_asked) or self.memory.asked_back()
