"""Open the device of a slot for its worker: compute, partition and allocator."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from windrow_sidecar._core import Arena, DeviceAllocator
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice, available_bytes
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.compute.sharing import Sharing, choose_sharing, probe
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.memory.allocated import AllocatedMemory
from windrow_sidecar.memory.allocator import LentBudget

log = logging.getLogger(__name__)


class HasUnits(Protocol):
    """Source of the number of units that the next tasklet uses (see `grants.GrantGate`)."""

    @property
    def active_units(self) -> int:
        """Compute units that the last launch took."""


@dataclass(frozen=True, slots=True)
class SlotDevice:
    """The device of a slot, as its worker uses it.

    Attributes:
        device: that computes.
        partition: this process's share of it.
        sharing: with decode, and why so.
        memory: where torch takes all its memory from what decode lends; None: from the system, and
            boundary activations lie in chunks by name.
        whole: a tasklet that has begun runs to its end: other ranks run it too.
    """

    device: ComputeDevice
    partition: Partition
    sharing: Sharing
    memory: AllocatedMemory | None = None
    whole: bool = False

    def units_of(self, gate: HasUnits) -> Callable[[], int]:
        """Return what tells how many units a graph is made on; the host's threads all move."""
        return (lambda: gate.active_units) if self.device.queues else (lambda: 0)


def slot_device(
    arena: Arena, epoch: int, host: Partition, environ: Mapping[str, str] = os.environ
) -> SlotDevice:
    """Return the device of decode's arena; on a GPU torch allocates from lent chunks from now on.

    Args:
        arena: attached.
        epoch: of the job, to which chunks are lent.
        host: this process's share of the cores.
        environ: says which MPS daemon this process is a client of.

    Raises:
        UserError: torch does not see that GPU, or has allocated there already.
    """
    if arena.driver == "host":
        sharing = Sharing("spatial", "decode and worker have cores of their own")
        return SlotDevice(HostDevice(), host, sharing)
    from windrow_sidecar.compute.cuda_device import CudaDevice

    ordinal = int(arena.driver.partition(":")[2] or 0)
    budget = LentBudget(arena, epoch, DeviceAllocator.over(arena))
    device = CudaDevice(ordinal, field="driver of decode's arena", lent=budget)
    sharing = choose_sharing(probe(arena.driver, environ))
    if sharing.mode == "temporal":
        log.warning("%s", in_time_only(sharing))
    else:
        log.info("the GPU is shared in spatial mode: %s", sharing.reason)
    host.release()  # its cores only launch; the share that counts is that of the GPU
    return SlotDevice(
        device,
        gpu_partition(sharing, arena.driver, device),
        sharing,
        AllocatedMemory(
            budget,
            device,
            chunk_bytes=arena.geometry.chunk_bytes,
            host_free_bytes=available_bytes,
        ),
    )


def in_time_only(sharing: Sharing) -> str:
    """Say what sharing in time means for a job, and why it is so."""
    return (
        "this worker shares the GPU in time only and computes while decode has no request: "
        f"{sharing.reason}"
    )


def gpu_partition(sharing: Sharing, driver: str, device: ComputeDevice) -> Partition:
    """Return a partition by SMs where the GPU is shared in space, else the whole GPU.

    A decode that shares in space grants parts also where only this process is not a client of
    MPS: the worker takes none of them, and waits for the whole (see `grants.GrantGate`).
    """
    if sharing.mode == "spatial":
        return CudaPartition("finetune", driver)
    return WholeDevice("finetune", device.total_units(), "SMs")
