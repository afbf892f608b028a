"""Open device, step hook, links and log for a scheduler of SGLang.

Called once, after SGLang has made its scheduler and before a worker can attach.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from windrow.crd import slot_name
from windrow.errors import InvariantBroken
from windrow.eventlog import EventLog
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, RunDir, stored_profiles
from windrow_sidecar._core import Arena
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.compute.sharing import GpuCapabilities, Sharing, choose_sharing
from windrow_sidecar.engines.builtin.logflush import LogFlusher
from windrow_sidecar.engines.harvest import EngineAgentLink, HarvestHook, HarvestSettings
from windrow_sidecar.engines.harvest.link import Profile
from windrow_sidecar.engines.hello import engine_hello
from windrow_sidecar.engines.hook import FailClosed
from windrow_sidecar.engines.profile import Subject, host_splits
from windrow_sidecar.engines.sglang.graphs import GraphShares, disjoint_levels
from windrow_sidecar.engines.sglang.harvesting import HarvestParts, SchedulerHarvest
from windrow_sidecar.engines.sglang.learning import KeptProfile, SoloLearner
from windrow_sidecar.engines.sglang.weights import SharedModel
from windrow_sidecar.qos.levels import Partitioning, whole_levels

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """Scheduler, and the parts of it in memory that a worker can reach."""

    scheduler: Any
    args: Any  # SGLang's ServerArgs
    allocator: Any  # LendingPagedAllocator
    arena: Arena
    weights: SharedModel | None
    fingerprint: str  # of the served checkpoint
    shares: GraphShares | None  # of a GPU's decode, where it is to be confined


@dataclass(frozen=True, slots=True)
class _Ground:
    """The device as decode shares it."""

    partition: Partition
    splits: Partitioning
    finetune_levels: tuple[int, ...]
    label: str
    driver: str
    background_threads: Callable[[], AbstractContextManager[None]]
    sharing: Sharing | None = None  # of a GPU
    cores: tuple[int, ...] = ()  # of a host

    @property
    def units(self) -> int:
        """Cores or SMs."""
        return self.splits.units


def open_harvest(
    opened: Opened,
    run_dir: RunDir,
    environment: Mapping[str, str],
    on_failure: Callable[[str], None],
) -> SchedulerHarvest:
    """Probe the scheduler's allocator, build the hook, let a worker and the agent come.

    Raises UserError where the device cannot be shared, InvariantBroken where the allocator counts
    otherwise than SGLang's own.
    """
    _probe(opened.scheduler, opened.allocator)
    arena, args, weights = opened.arena, opened.args, opened.weights
    ground = _ground(arena.driver, opened.shares)
    subject = Subject(
        device=ground.label,
        driver=ground.driver.partition(":")[0],
        engine="sglang",
        engine_version=version("sglang"),
        model_fingerprint=opened.fingerprint,
    )
    kept = KeptProfile(run_dir, stored_profiles(environment))
    profile = kept.of(subject.key)
    log_dir = environment.get(ENV_LOG_DIR)
    pod = environment.get(ENV_POD_NAME)
    source = slot_name(pod, run_dir.slot) if pod else f"sglang-{args.port}"
    log = EventLog(Path(log_dir) / f"{source}.events.jsonl", source=source) if log_dir else None
    # On a GPU with overlap scheduling the step before still runs when the next one is launched: to
    # launch that later would leave no turn to the worker.
    gaps = ground.driver == "host" or bool(args.disable_overlap_schedule)
    settings = HarvestSettings(
        max_batch=opened.scheduler.max_running_requests,
        gaps=gaps,
        layers=opened.allocator.get_kvcache().layer_num,
    )
    inner = HarvestHook(arena, ground.splits, profile, settings, log=log)
    hook = FailClosed(inner, on_failure=on_failure)
    reported = Profile(subject.key, json.dumps(profile)) if profile else None
    hello = engine_hello(
        subject,
        arena,
        ground,
        run_dir,
        model=str(args.model_path),
        endpoint=f"http://{args.host}:{args.port}",
    )
    link = EngineAgentLink(run_dir.agent_socket, hello, inner, reported)
    parts = HarvestParts(
        inner=inner,
        hook=hook,
        link=link,
        partition=ground.partition,
        splits=ground.splits,
        subject=subject,
        arena=arena,
        allocator=opened.allocator,
        log=log,
        keep_profile=kept.keep,
        reserved_tokens=args.num_reserved_decode_tokens,
    )
    # All of it before a worker can attach.
    if weights is not None:
        arena.export("weights", weights.shared.fd, n_bytes=weights.n_bytes)
        weights.write_manifest(run_dir.weights_manifest(), opened.fingerprint)
    else:
        run_dir.weights_manifest().unlink(missing_ok=True)
    arena.serve(str(run_dir.arena_socket()))
    harvest = SchedulerHarvest(parts, None if profile else SoloLearner(ground.splits))
    with ground.background_threads():
        if log is not None:
            LogFlusher(log)  # its thread writes for as long as this process lives
        link.start()
    g = arena.geometry
    _log.info(
        "windrow: %d chunks of %d tokens can be lent; weights are %s",
        g.chunks - 1,
        g.slots_per_chunk,
        "shared" if weights is not None else "not shared",
    )
    return harvest


def _probe(scheduler: Any, allocator: Any) -> None:  # noqa: ANN401
    """Allocate and free a page as SGLang does. Raises InvariantBroken when the sums do not stay."""
    total = scheduler.max_total_num_tokens // allocator.page_size * allocator.page_size
    page = allocator.alloc(allocator.page_size)
    left = allocator.available_size()
    if page is not None:
        allocator.free(page)
    after = allocator.available_size()
    if page is None or after != total or left != total - allocator.page_size:
        raise InvariantBroken(
            f"the KV allocator does not count as SGLang's: {total} tokens, {left} less a page, "
            f"{after} with it again"
        )


def _ground(driver: str, shares: GraphShares | None) -> _Ground:
    """Return how decode shares its device. Raises UserError where it cannot."""
    if driver == "host":
        most = torch.get_num_threads()  # what whoever started the server has chosen
        host = HostPartition.from_affinity(
            "decode", set_threads=lambda n: torch.set_num_threads(min(n, most))
        )
        units = host.total_units
        return _Ground(
            host,
            host_splits(units),
            host.levels()[:-1],
            f"host:{units}-cores",
            driver,
            host.background_threads,
            cores=host.cpus,
        )
    from windrow_sidecar.engines.builtin.device import open_gpu

    gpu = open_gpu(driver, torch.bfloat16)
    partition, splits, sharing = gpu.partition, gpu.splits, gpu.sharing
    if shares is not None and sharing is not None and sharing.mode == "spatial":
        sharing = choose_sharing(_measured(driver, shares))
        if sharing.mode == "spatial":
            partition, splits = shares, disjoint_levels(shares)
        else:
            splits = whole_levels(gpu.units)
    levels = gpu.finetune_levels if len(splits.splits) > 1 else ()
    return _Ground(partition, splits, levels, gpu.label, driver, nullcontext, sharing)


def _measured(driver: str, shares: GraphShares) -> GpuCapabilities:
    """See on which SMs decode's smallest share and the worker's largest run; waits for both."""
    level = shares.levels()[0]
    worker = CudaPartition("finetune", driver, use_stream=lambda _: None)
    return GpuCapabilities(
        green_missing="",
        mps_missing="",
        decode_partition="green",
        decode_sms=shares.measure(level),
        finetune_sms=worker.measure(shares.total_units - level),
    )
