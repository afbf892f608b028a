"""Memory of a colocated job on a GPU: torch allocates everything from lent chunks.

On the host only named tensors are in chunks (`lent.LentBoundaries`); here all of the job is,
so a chunk that is asked back may hold anything. It is left in steps: first frozen layers that take
turns, of which files have a copy, as many as need be; then what layers can compute again is
forgotten, without a copy; then activations of the group on its way go to the host, then adapter and
moments, then all else but the base's parameters; so a job whose base is decode's own leaves every
chunk, and comes back when there is room again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from windrow.errors import Transient
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.engines.streaming.schedule import LEAST_LAYERS
from windrow_sidecar.finetune.engine.joint_stream import JointStream
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.memory.training_memory import NoRoom, replan_if_short
from windrow_sidecar.finetune.model.boundaries import TorchBoundaries
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.offload.job_state import SPILL_SHARE, JobOffload
from windrow_sidecar.finetune.recompute.activation_budget import GROUP_SHARE, ActivationBudget
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.memory.allocator import LentBudget

log = logging.getLogger(__name__)

# Of what adapter and moments are known to take: blocks half full.
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


@dataclass(slots=True)
class _Served:
    """The job that memory is served to."""

    stream: TaskletStream | JointStream
    activation_budget: ActivationBudget


class AllocatedMemory:
    """Give back chunks that decode revokes, and use new ones, for one job.

    The memory of a slot on a GPU, that job's part of it, and the job's memory (see `slot_memory`).

    Args:
        budget: of the allocator that torch uses.
        device: that computes.
        chunk_bytes: of a chunk.
        host_free_bytes: of the host's memory, for what leaves the device.

    Attributes:
        residents: frozen layers of the base, where they take turns.
    """

    one_job = True  # all that torch allocates is in the chunks, whosever it is
    is_tenant = True
    wanted_by_layers = 0  # `chunks_for` counts them

    def __init__(
        self,
        budget: LentBudget,
        device: ComputeDevice,
        *,
        chunk_bytes: int,
        host_free_bytes: Callable[[], int],
    ) -> None:
        self._budget, self._device = budget, device
        self._chunk_bytes, self._host_free_bytes = chunk_bytes, host_free_bytes
        self.boundaries = TorchBoundaries()
        self.residents: Residents | None = None
        self._job: _Served | None = None
        self._job_offload: JobOffload | None = None
        self.is_starving = False  # as `starving` last found
        self._away_bytes = 0  # that adapter and moments will take when they come back
        self._buffers_away = False

    def tenancy(self) -> AllocatedMemory:
        """Return the only job's part: all of it."""
        return self

    def serve(
        self, stream: TaskletStream | JointStream, activation_budget: ActivationBudget
    ) -> AllocatedMemory:
        """Belong to the job with that stream; its groups take `activation_budget`."""
        self._job = _Served(stream, activation_budget)
        self._job_offload = JobOffload(stream, self._host_free_bytes)
        return self

    def groups_want(self, chunks: int) -> None:
        """Do nothing: layers come between two groups (see `settle`)."""
        del chunks

    def vacated(self) -> None:
        """Do nothing: the worker ends with its job, and `give_all_back` comes then."""

    def give_all_back(self) -> None:
        """Return every chunk that is empty once the group on its way is dropped."""
        self.release()

    @property
    def held_chunks(self) -> int:
        """Chunks that this worker has, as of the last `settle`."""
        return self._budget.chunks

    def capacity_tokens(self, micro_batches: int = 1) -> int:
        """No bound here: groups are formed for what is free (`ActivationBudget.before`)."""
        del micro_batches
        return 1 << 40

    def chunks_for(self, tokens: int, micro_batches: int = 1) -> int:
        """Return the chunks that a group needs, with all that is there and every missing layer.

        `tokens`: of each micro-batch.
        """
        assert self._job is not None
        group = self._job.activation_budget.peak_bytes(tokens * micro_batches)
        used = self._budget.used_bytes() + self._away_bytes
        stream = self._job.stream
        if isinstance(stream, TaskletStream) and (graphs := stream.parts.stack.graphs) is not None:
            # What they have of lent memory is the group's own; the driver's is beside it.
            used += max(graphs.driver_bytes, graphs.expected_bytes) - graphs.backed_bytes
        if self.residents is not None:
            used += self.residents.wanted_bytes
        return chunks_for(used, group, self._chunk_bytes)

    def settle(self) -> None:
        """Follow the table of owners; what comes next is formed for what is there.

        Raises:
            Transient: decode asks for memory that cannot be left.
        """
        before = self._budget.chunks
        if self._budget.asked_back():
            self._leave()
        changed = self._budget.settle() or self._budget.chunks != before
        if self._job is None:
            return
        if self.residents is not None:
            # Further layers come between two groups only, and leave the next one its share.
            spare = int((1 - GROUP_SHARE) * self._budget.free_bytes())
            self.residents.follow(spare if self._job.stream.between_micro_batches else 0)
        if changed:
            self._job.stream.replan()
        replan_if_short(self._job.stream, self._job.activation_budget)

    def starving(self, tasklet: Tasklet) -> bool:
        """Return whether an unbegun group does not fit, or layers, or what was moved out."""
        assert self._job is not None
        layers = self.residents.missing_bytes if self.residents else 0
        micro, activation_budget = tasklet.micro, self._job.activation_budget
        if self._away_bytes:
            tokens = micro.padded_tokens if micro else 0
            away = int(_SLACK * self._away_bytes)
            self.is_starving = not activation_budget.fits(tokens, away + layers)
        elif layers and layers > self._budget.free_bytes():
            self.is_starving = True
        else:
            group = self._job.stream.tokens_to_begin
            self.is_starving = bool(group) and not activation_budget.fits(group, layers)
        return self.is_starving

    def asked_back(self) -> bool:
        """Return whether decode waits for a chunk."""
        return self._budget.asked_back()

    def offload(self) -> None:
        """Move the job's state to the host, and give up what is empty then."""
        self._move_out()
        self._budget.settle()

    def restore(self) -> bool:
        """Move it back.

        Raises:
            NoRoom: what decode lends now does not hold it.
        """
        if self._job is None or self._job_offload is None:
            return False
        # What decode waits for counts as free, and takes nothing any more.
        if self._budget.asked_back() or self._away_bytes > self._budget.free_bytes():
            raise NoRoom(f"decode lends no room for the job's own {self._away_bytes} bytes")
        if self._buffers_away:
            self._job.stream.move_buffers(to_host=False)
            self._buffers_away = False
        self._away_bytes = 0
        return self._job_offload.back()

    def release(self) -> None:
        """Drop the group on its way and give back every chunk that is empty then."""
        if self._job is not None:
            self._job.stream.drop()
        self._budget.wait_freed()
        self._budget.give_back()

    def _leave(self) -> None:
        """Empty the chunks that drain, with as little moved as will do."""
        # The allocator keeps a chunk until whatever may use it has ended, on every stream: those of
        # a checkpoint's copies and of frozen layers too. After the wait its answer is final, and no
        # more is moved than has to be.
        self._budget.wait_freed()
        self._budget.settle()
        residents = self.residents
        shrinks = [residents.shrink] * residents.layers if residents else []
        # Workspaces of libraries first: they cost nothing but to be made again.
        steps = (
            self._device.release_caches,
            *shrinks,
            self._forget,
            self._spill,
            self._move_out,
            self._move_buffers,
        )
        for step in steps:
            if not self._budget.asked_back():
                return
            step()
            self._budget.wait_freed()
            self._budget.settle()
        if not self._budget.asked_back():
            return
        raise Transient(
            "decode asks for memory that holds what this job cannot do without; it goes on from "
            "its checkpoint where more is lent"
        )

    def _forget(self) -> None:
        if self._job is not None:
            self._job.stream.forget()

    def _spill(self) -> None:
        if self._job is not None:
            self._job.stream.spill(int(SPILL_SHARE * self._host_free_bytes()))

    def _move_out(self) -> None:
        """Move tensors out; they return before anything runs (see `runner`), to lasting chunks."""
        if self._job_offload is not None and not self._away_bytes:
            before = self._budget.used_bytes()
            self._job_offload.out()
            self._away_bytes = max(1, before - self._budget.used_bytes())

    def _move_buffers(self) -> None:
        if self._job is not None:
            self._job.stream.move_buffers(to_host=True)
            self._buffers_away = True
        # Moving has computed: a buffer of another type is converted on its way.
        self._device.release_caches()
