"""Memory of a colocated job on a host: boundary activations in lent chunks, all else its own.

When decode asks for a chunk that the running group uses, the group is spilled: it goes on
from copies in the worker's own memory, and the next one is formed for what is left.
"""

from __future__ import annotations

from collections.abc import Callable

from windrow_sidecar.compute.host_device import available_bytes
from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.memory.boundaries import LentBoundaries, TenantBoundaries
from windrow_sidecar.finetune.memory.training_memory import replan_if_short
from windrow_sidecar.finetune.offload.job_state import SPILL_SHARE, JobOffload
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget
from windrow_sidecar.finetune.tasklets import Tasklet


class LentMemory:
    """The memory of a colocated job on the host (see `training_memory.TrainingMemory`).

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
