"""The compute device of an engine, cores or a GPU: its driver, and how a worker shares it.

The same for every engine; see `opening` for what an engine does with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.finding import find_device
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.compute.sharing import Sharing, choose_sharing, probe
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.engines.profile import host_splits
from windrow_sidecar.memory.geometry import require_memory
from windrow_sidecar.qos.levels import Partitioning, overlapping_levels, whole_levels

_log = logging.getLogger(__name__)

# Of a GPU's free memory: graphs, workspaces and the worker's context need the rest.
MOST_OF_GPU_MEMORY = 0.9


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """A device as an engine uses it.

    Attributes:
        driver: of arena and weights: "host", "cuda:1".
        torch_device: where tensors over them are.
        layout: of the arena's chunks. On a GPU a chunk is one memory (token-major): with two for
            every layer an arena of 400 chunks of an 8B model would have 25,600 descriptors.
        partition: decode's own share.
        splits: how it can be shared with a worker.
        finetune_levels: the worker's shares, ascending; the whole device is none of them.
        label: what a latency profile calls it.
        background_threads: threads that start inside stay out of decode's way.
        sharing: how a GPU is shared with a worker, and why so; None on the host.
        cores: of a host that can be shared.
    """

    driver: str
    torch_device: torch.device
    layout: str
    partition: Partition
    splits: Partitioning
    finetune_levels: tuple[int, ...]
    label: str
    background_threads: Callable[[], AbstractContextManager[None]]
    sharing: Sharing | None = None
    cores: tuple[int, ...] = ()

    @property
    def units(self) -> int:
        """Cores, or SMs."""
        return self.partition.total_units


def require_room(device: EngineDevice, arena_bytes: int, weights_bytes: int) -> None:
    """Refuse an arena that the device cannot hold beside the weights, before it is made.

    Raises:
        UserError: with the largest size that would do.
    """
    if device.torch_device.type == "cpu":
        require_memory(arena_bytes)
        return
    free, _ = torch.cuda.mem_get_info(device.torch_device)
    most = int(free * MOST_OF_GPU_MEMORY) - weights_bytes
    if arena_bytes > most:
        raise UserError(
            f"an arena of {arena_bytes} bytes is too large: {free} are free on "
            f"{device.torch_device}, and the weights take {weights_bytes}",
            field="--arena-bytes",
            remedy=f"Ask for at most {max(most, 0)} bytes, or free memory of the GPU.",
            reason="NotEnoughMemory",
        )


def open_cores(
    set_threads: Callable[[int], None], *, shared: bool, in_turns: bool = False
) -> EngineDevice:
    """Return the cores that this process may use.

    Args:
        set_threads: is called with the number of cores that decode has from now on.
        shared: a worker may get some of them; else decode keeps them all.
        in_turns: decode and finetuning have all of them in turns, in one process.

    Raises:
        UserError: cores that are to be shared cannot be.
    """
    background: Callable[[], AbstractContextManager[None]] = nullcontext
    partition: Partition
    cores: tuple[int, ...] = ()
    if shared:
        partition = host = HostPartition.from_affinity("decode", set_threads=set_threads)
        background, cores = host.background_threads, host.cpus
    else:
        partition = WholeDevice.cores("decode", set_threads=set_threads)
    units = partition.total_units
    return EngineDevice(
        driver="host",
        torch_device=torch.device("cpu"),
        layout="per-layer",
        partition=partition,
        splits=whole_levels(units) if in_turns else host_splits(units),
        finetune_levels=partition.levels()[:-1],
        # Profiles of the two are not exchanged: one in turns knows nothing of a part of the cores.
        label=f"host:{units}-cores{'-in-turns' if in_turns else ''}",
        background_threads=background,
        cores=cores,
    )


def open_gpu(name: str) -> EngineDevice:
    """Return a GPU on whose every SM decode runs; only the worker's share is capped.

    Raises:
        UserError: it is not there.
    """
    device = find_device(name)
    try:
        facts = _core.driver(name).facts
    except _core.DriverUnavailable as error:
        raise UserError(
            str(error), field="--device", remedy="Use --device cpu.", reason="NoCudaDevice"
        ) from error
    units = int(facts["units"])
    levels: tuple[int, ...] = ()
    splits = whole_levels(units)
    sharing = choose_sharing(probe(name, os.environ))
    if sharing.mode == "spatial":
        levels = CudaPartition("finetune", name).levels()[:-1]
        splits = overlapping_levels(units, levels)
    else:  # the worker knows no share but the whole GPU, and would refuse any other
        _log.warning("a worker gets the GPU only while decode idles: %s", sharing.reason)
    return EngineDevice(
        driver=name,
        torch_device=device.torch,
        layout="token-major",
        partition=WholeDevice("decode", units, "SMs"),
        splits=splits,
        finetune_levels=levels,
        label=f"gpu:{facts['name'].replace(' ', '-')}",
        background_threads=nullcontext,
        sharing=sharing,
    )
