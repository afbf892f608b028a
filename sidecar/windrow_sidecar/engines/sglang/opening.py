"""Open device, step hook, links and log for a scheduler of SGLang.

Called once, after SGLang has made its scheduler and before a worker can attach.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from windrow.crd import slot_name
from windrow.errors import InvariantBroken, UserError
from windrow.eventlog import EventLog
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, RunDir, stored_profiles
from windrow.served_chats import server_of
from windrow_sidecar._core import Arena
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.confined import GraphShares, confine
from windrow_sidecar.engines.device import EngineDevice, open_cores, open_gpu
from windrow_sidecar.engines.harvest import HarvestSettings
from windrow_sidecar.engines.hello import engine_hello
from windrow_sidecar.engines.kept_profile import KeptProfile
from windrow_sidecar.engines.logflush import LogFlusher
from windrow_sidecar.engines.opening import open_harvest
from windrow_sidecar.engines.profile import Subject, check_reusable
from windrow_sidecar.engines.rank_pages import RankMeter, RankPages, look_at_others
from windrow_sidecar.engines.sglang import compat
from windrow_sidecar.engines.sglang.adapters import SchedulerAdapters, adapter_limits
from windrow_sidecar.engines.sglang.harvesting import HarvestParts, SchedulerHarvest
from windrow_sidecar.engines.sglang.in_engine import JobThread
from windrow_sidecar.engines.sglang.learning import ReusedProfile
from windrow_sidecar.engines.sglang.live_profile import LiveProfile
from windrow_sidecar.engines.sglang.rank_lending import LeadingRank, LendingRank
from windrow_sidecar.engines.sglang.ranks import AskedPartition, SchedulerRanks
from windrow_sidecar.engines.sglang.weights import SharedModel
from windrow_sidecar.qos.levels import Partitioning

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
    beside_bytes: int = 0  # of drafts, windows and indexes, of which nothing is lent
    jobs: JobThread | None = None  # where they run in this process
    ranks: SchedulerRanks | None = None  # that share the model; None: this one has all of it


def harvest_scheduler(
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
    ranks = opened.ranks
    lendable = _lendable(opened.allocator)
    speculation = _speculation(opened.args)
    arena, args = opened.arena, opened.args
    jobs = opened.jobs
    device = _device(arena.driver, opened.shares, ranks, in_turns=jobs is not None)
    partition: Partition = device.partition
    lending: LeadingRank | None = None
    if ranks is not None:
        ranks.open(device.partition)
        partition = AskedPartition(device.partition, ranks)
        lending = _lead(opened, ranks)
    subject = Subject(
        device=device.label,
        driver=device.driver.partition(":")[0],
        engine="sglang",
        engine_version=version("sglang") + speculation.label,
        model_fingerprint=opened.fingerprint,
        tensor_parallel=1 if ranks is None else ranks.ranks,
    )
    kept = KeptProfile(run_dir, stored_profiles(environment))
    profile = _reusable(kept.of(subject.key), subject, device.splits)
    log_dir = environment.get(ENV_LOG_DIR)
    pod = environment.get(ENV_POD_NAME)
    source = slot_name(pod, run_dir.slot) if pod else f"sglang-{args.port}"
    log = EventLog(Path(log_dir) / f"{source}.events.jsonl", source=source) if log_dir else None
    # On a GPU with overlap scheduling the step before still runs when the next one is launched: to
    # launch that later would leave no turn to the worker.
    gaps = device.driver == "host" or bool(args.disable_overlap_schedule)
    _export(opened, run_dir)
    hello = engine_hello(
        subject,
        arena,
        device,
        run_dir,
        model=str(args.model_path),
        endpoint=f"http://{args.host}:{args.port}",
        # Without a tokenizer it gets tokens, as from Dynamo's frontend, which writes chats itself.
        chats="" if args.skip_tokenizer_init else server_of("sglang", version("sglang")),
        adapters=adapter_limits(args),
    )
    if log is not None:
        with device.background_threads():
            LogFlusher(log)  # its thread writes for as long as this process lives
    running = open_harvest(
        device,
        arena,
        subject,
        hello,
        run_dir,
        HarvestSettings(
            max_batch=opened.scheduler.max_running_requests,
            gaps=gaps,
            layers=opened.scheduler.model_config.num_hidden_layers,
            in_turns=jobs is not None,
        ),
        profile=profile,
        log=log,
        group=lending.group if lending is not None else None,
        reports_profile=False,  # of another start: the first steps are compared with it before
        keep_profile=kept.keep,
        on_failure=on_failure,
    )
    if ranks is not None:
        pages = RankPages(arena, look_at_others(ranks.run_dir, ranks.ranks))
        running.link.show_ranks(pages.figures)
    if getattr(args, "enable_lora", False) and running.link is not None:
        model = str(args.served_model_name or args.model_path)
        running.link.show_adapters(SchedulerAdapters(opened.scheduler, model).read)
    parts = HarvestParts(
        inner=running.inner,
        hook=running.hook,
        link=running.link,
        partition=partition,
        splits=device.splits,
        arena=arena,
        allocator=opened.allocator,
        log=log,
        reserved_tokens=args.num_reserved_decode_tokens + speculation.reserved_tokens,
        speculates=bool(speculation.label),
        turns=jobs.turns if jobs is not None else None,
        ranks=ranks,
        lending=lending,
    )
    reused = ReusedProfile(profile, device.splits.units) if profile else None
    live = LiveProfile(
        running.inner, running.link, subject, device.splits, keep=kept.keep, reused=reused
    )
    harvest = SchedulerHarvest(parts, live)
    shared = "shared" if opened.weights is not None else "not shared"
    _log.info(
        "windrow: %d chunks of %d tokens can be lent%s; weights are %s",
        lendable,
        arena.geometry.slots_per_chunk,
        f" on each of {ranks.ranks} ranks" if ranks is not None else "",
        shared,
    )
    if opened.beside_bytes:
        _log.info(
            "windrow: %d MiB of KV of drafts, sliding windows and indexes are not lent",
            opened.beside_bytes >> 20,
        )
    if jobs is not None:
        jobs.claimed(run_dir)
        jobs.start(running)
    return harvest


def _reusable(
    profile: dict[str, Any] | None, subject: Subject, splits: Partitioning
) -> dict[str, Any] | None:
    """Return a profile that was found; None where none was, or it is not one of this device."""
    if profile is None:
        return None
    try:
        check_reusable(profile, subject, splits)
    except (UserError, KeyError, TypeError, ValueError) as error:
        _log.warning("windrow: the latency profile that was found is not used: %s", error)
        return None
    return profile


def open_rank(opened: Opened, run_dir: RunDir) -> None:
    """Let a worker's rank reach this rank of decode, which does what rank 0 tells.

    `run_dir`: as this rank sees it. Raises UserError where the device cannot be shared,
    InvariantBroken where the allocator counts otherwise than SGLang's own.
    """
    ranks = opened.ranks
    assert ranks is not None
    # As on rank 0, so that pages are handed out in the same order on all.
    _probe(opened.scheduler, opened.allocator)
    device = _device(opened.arena.driver, opened.shares, ranks, in_turns=False)
    ranks.open(device.partition)
    ranks.lending = _lending_rank(opened, ranks)
    _export(opened, run_dir)
    with device.background_threads():
        opened.arena.serve(str(run_dir.arena_socket()))
    shared = "shared" if opened.weights is not None else "not shared"
    _log.info("windrow: rank %d follows; its weights are %s", ranks.rank, shared)


def _lending_rank(opened: Opened, ranks: SchedulerRanks) -> LendingRank:
    assert ranks.chunks is not None
    ranks.meter = RankMeter(opened.arena.page)
    return LendingRank(ranks.chunks, opened.allocator, opened.arena.page)


def _lead(opened: Opened, ranks: SchedulerRanks) -> LeadingRank:
    """Return what decides on the chunks of all ranks, which serve them by now.

    Raises AttachError.
    """
    own = ranks.lending = _lending_rank(opened, ranks)
    return LeadingRank(own, look_at_others(ranks.run_dir, ranks.ranks))


def _export(opened: Opened, run_dir: RunDir) -> None:
    """Let a worker map the weights where they are shared, and say where each tensor is."""
    weights = opened.weights
    if weights is None:
        run_dir.weights_manifest().unlink(missing_ok=True)
        return
    opened.arena.export("weights", weights.shared.fd, n_bytes=weights.n_bytes)
    weights.write_manifest(run_dir.weights_manifest(), opened.fingerprint)


@dataclass(frozen=True, slots=True)
class _Speculation:
    """Way in which decode speculates.

    Attributes:
        label: part of the engine version that its latency profile is of; "": it does not.
        reserved_tokens: for which each request takes KV ahead of a step.
    """

    label: str = ""
    reserved_tokens: int = 0


def _speculation(args: Any) -> _Speculation:  # noqa: ANN401
    """Return how SGLang has settled to speculate. Raises UserError for a way that is untested."""
    if not args.speculative_algorithm:
        return _Speculation()
    settled = resolve_name(compat.SPECULATION)()
    algorithm, tokens = settled.speculative_algorithm, settled.speculative_num_draft_tokens
    compat.check_speculation(algorithm, settled.speculative_eagle_topk)
    return _Speculation(f"+{algorithm.lower()}{tokens}", resolve_name(compat.RESERVE)())


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


def _lendable(allocator: Any) -> int:  # noqa: ANN401
    """Return how many chunks can be lent. Raises UserError where it is none, whatever decode does.

    A job that came here would wait for memory without end.
    """
    lendable = int(allocator.chunks.most_lendable())
    if lendable:
        return lendable
    tokens = int(allocator.chunks.pages_per_chunk * allocator.page_size)
    raise UserError(
        f"no chunk of its KV pool could ever be lent: a chunk is {tokens} tokens, and decode keeps "
        f"all of the {int(allocator.size)} that the pool has",
        field="--max-total-tokens",
        remedy=f"Serve with {4 * tokens} tokens of KV or more: --max-total-tokens or "
        "--mem-fraction-static. A model that leaves no room for them cannot be harvested here.",
        reason="KvPoolTooSmall",
    )


def _device(
    driver: str, shares: GraphShares | None, ranks: SchedulerRanks | None, *, in_turns: bool
) -> EngineDevice:
    """Return how decode shares its device. Raises UserError where it cannot."""
    if driver == "host":
        most = torch.get_num_threads()  # what SGLang's server was started with
        each = 1 if ranks is None else ranks.ranks  # ranks share the cores

        def set_threads(cores: int) -> None:
            torch.set_num_threads(max(1, min(cores // each, most)))

        return open_cores(set_threads, shared=not in_turns, in_turns=in_turns)
    gpu = open_gpu(driver)
    return gpu if shares is None else confine(gpu, shares)
