"""The joined jobs of a colocated worker: their stream, its memory, and the chunks it wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from windrow_sidecar.finetune.colocated.job_context import JobContext
from windrow_sidecar.finetune.colocated.pace import RowsOfPace, Shared, TaskletPace
from windrow_sidecar.finetune.engine.suspension import Suspension
from windrow_sidecar.finetune.job.job_handle import JobHandle
from windrow_sidecar.finetune.job.joint_turns import (
    JointRuntime,
    JointTurns,
    JointWatch,
    open_joint,
)
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget


class JointContext:
    """One turn, one group and one wish for jobs whose rows pass together.

    Args:
        base: with modules of its own, without an adapter.
        shared: what the worker's jobs share.
        contexts: returns those of all jobs of the worker.

    Attributes:
        turns: what runs them.
        memory: of their stream.
        activation_budget: what their groups take.
    """

    def __init__(
        self, base: BaseModel, shared: Shared, contexts: Callable[[], Sequence[JobContext]]
    ) -> None:
        self._contexts = contexts
        self._tenancy = shared.memory.tenancy()
        watch = JointWatch()
        rows = RowsOfPace(
            windows=lambda: not self._stream.stack.windows_refused,
            micro_batch_tokens=self._micro_batch_tokens,
            longest=lambda: max(one.session.longest_row for one in self._joined()),
            most=1,
        )
        self._pace = TaskletPace(shared, self._tenancy, rows)
        runtime = JointRuntime(
            self._tenancy.boundaries,
            self._pace.limits,
            shared.slot_device.device,
            sizing=self._pace.sizing,
            between=Suspension(shared.gate, watch, self._give_up).point,
            units=shared.slot_device.units_of(shared.gate),
        )
        self._stream, budget = open_joint(base, runtime)
        self.activation_budget: ActivationBudget = budget
        self.memory = self._tenancy.serve(self._stream, budget)
        weights = max(one.session.stream.parts.weights for one in contexts())
        self.turns = JointTurns(
            *(self._stream, self.memory, budget, shared.gate, watch),
            expected_s=lambda tasklet: shared.estimates.expected_s(tasklet, weights),
            fits_alone=self._fits_alone if shared.memory.holds_all else lambda job: False,
        )

    @property
    def has_turn(self) -> bool:
        """True where the slot's memory is that of the joined jobs."""
        return self._tenancy.is_tenant

    @property
    def wanted_chunks(self) -> int:
        """Chunks that their groups want, the most so far."""
        return self._pace.wanted_chunks

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return self._stream.stack.depth

    def carries(self, context: JobContext) -> bool:
        """Return whether a job is one of them."""
        return any(job.stream is context.session.stream for job in self.turns.jobs)

    def _joined(self) -> list[JobContext]:
        return [one for one in self._contexts() if self.carries(one)]

    def _micro_batch_tokens(self, most: int) -> int:
        """Return the padded tokens of a micro-batch that may have at most so many."""
        return min(most, sum(one.session.micro_batch_tokens(most) for one in self._joined()))

    @staticmethod
    def _fits_alone(job: JobHandle) -> bool:
        """Return whether memory has room for a job's state and its longest row."""
        budget = job.activation_budget
        return budget is not None and budget.fits(budget.longest, job.stream.away_bytes)

    def _give_up(self) -> bool:
        """Return whether a layer that is held up in its middle should be given up."""
        stops = any(one.job_state.stop_asked for one in self._joined())
        return stops or self.memory.asked_back()
