"""Choose the sizes of tasklets and micro-batches for decode's newest grant and what it lends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windrow_sidecar.engines.streaming.streamed_layers import StreamedLayers
from windrow_sidecar.finetune.colocated.grants import DEFAULT_BOUND_US, GrantGate
from windrow_sidecar.finetune.colocated.ranks import RankGroup
from windrow_sidecar.finetune.colocated.slot_device import SlotDevice
from windrow_sidecar.finetune.engine.orders import Order, layer_major
from windrow_sidecar.finetune.engine.sizing import (
    Estimates,
    Paced,
    micro_batches_a_visit,
    most_that_fit,
)
from windrow_sidecar.finetune.memory.slot_memory import SlotMemory, Tenancy
from windrow_sidecar.finetune.offload.frozen_layers import FrozenLayers
from windrow_sidecar.finetune.tasklets import MicroLimits
from windrow_sidecar.qos.view import Grant, Phase


@dataclass(frozen=True, slots=True)
class Shared:
    """State that the jobs of one worker share.

    Attributes:
        gate: decode's grants.
        estimates: of tasklets; they are those of one base, which takes nearly all of their time.
        slot_device: what the slot's device is for this process.
        memory: that decode lends.
        order: of the tasklets of a job that passes its rows alone.
        group: ranks that train the one job together; None: there are none.
    """

    gate: GrantGate
    estimates: Estimates
    slot_device: SlotDevice
    memory: SlotMemory
    order: Order = layer_major
    group: RankGroup | None = None


@dataclass(frozen=True, slots=True)
class RowsOfPace:
    """Facts that the sizes depend on besides the grant.

    Attributes:
        windows: whether rows may be cut.
        micro_batch_tokens: padded tokens of a micro-batch that may have at most so many: rows may
            be too few.
        longest: tokens of the longest row.
        most: micro-batches of a step.
    """

    windows: Callable[[], bool]
    micro_batch_tokens: Callable[[int], int]
    longest: Callable[[], int]
    most: int


class TaskletPace:
    """Sizes of the tasklets of a job, or of joined ones.

    Args:
        shared: by the jobs of the worker.
        tenancy: part of the memory that the groups are in.
        rows: whose sizes.
        frozen: layers that take turns in memory; None: they do not.

    Attributes:
        wanted_chunks: chunks that the groups want, the most so far.
    """

    def __init__(
        self,
        shared: Shared,
        tenancy: Tenancy,
        rows: RowsOfPace,
        frozen: FrozenLayers | StreamedLayers | None = None,
    ) -> None:
        self._shared, self._tenancy = shared, tenancy
        self._rows, self._frozen = rows, frozen
        self.wanted_chunks = 0
        self._sized: Paced | None = None
        self._sized_for: Grant | None = None

    def limits(self) -> MicroLimits:
        """Return as many rows as keep a layer's backward within the bound and fit what is lent."""
        memory = self._shared.memory
        tokens = self.sizing().tokens(Phase.BACKWARD)
        of_each = self._rows.micro_batch_tokens(tokens)
        together = micro_batches_a_visit(
            self._frozen, self._shared.estimates, of_each, self._rows.most
        )
        wanted = self._tenancy.chunks_for(max(of_each, self._rows.longest()), together)
        # Never less than before: a wish that trembles would move chunks to and fro.
        self.wanted_chunks = max(wanted, self.wanted_chunks)
        memory.groups_want(self.wanted_chunks)
        together = most_that_fit(together, of_each, memory.capacity_tokens)
        return MicroLimits(min(tokens, memory.capacity_tokens(together)), together)

    def sizing(self) -> Paced:
        """Return the sizes for the newest grant's time; one object until that changes."""
        grant = self._shared.gate.latest()
        windows = self._rows.windows()
        if self._sized is not None and self._sized_for is grant and self._sized.windows == windows:
            return self._sized
        bound_us = grant.in_flight_bound_us or DEFAULT_BOUND_US
        queues = self._shared.slot_device.device.queues
        if queues:
            bound_us //= 2  # while one runs, the next is queued behind it
        whole = queues or self._shared.slot_device.whole
        if grant.budget_us:
            bound_us = min(bound_us, grant.budget_us)
        units = grant.finetune_units
        self._sized_for = grant
        self._sized = Paced(
            self._shared.estimates, bound_us, units, windows, grant.window_tokens, queues=whole
        )
        return self._sized
