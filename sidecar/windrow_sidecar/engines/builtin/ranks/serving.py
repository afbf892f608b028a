"""Start the ranks of an engine, and be one that follows rank 0."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from windrow.rundir import RunDir
from windrow_sidecar.compute.communicator import Communicator
from windrow_sidecar.engines.builtin.device import open_device
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.loading import load, make_arena
from windrow_sidecar.engines.builtin.ranks.group import RankFollower, RankLeader, Said, fork_ranks
from windrow_sidecar.engines.builtin.ranks.shard import EngineShard, shard_sizes
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.threads import Threads
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.rank_chunks import RankChunks
from windrow_sidecar.engines.rank_pages import RankMeter, look_at_others
from windrow_sidecar.engines.weight_files import SERVED_FIELD, read_header, weight_files

_log = logging.getLogger(__name__)


def context_bound(settings: EngineSettings, config: LlamaConfig, tokens: int) -> int:
    """Return the longest context of a request, where the arena holds so many tokens."""
    return settings.context_length or min(tokens, config.max_positions)


def start_ranks(settings: EngineSettings, config: LlamaConfig) -> tuple[RankLeader, EngineShard]:
    """Fork the other ranks; returns rank 0's hold on them, and its part of the model.

    To be called before this process has a second thread.

    Raises:
        UserError: the model cannot be cut so, or a file of its weights is damaged.
    """
    sizes = shard_sizes(config, settings.ranks)
    # Every rank reads them: what is wrong is said once, before there are ranks.
    for path in weight_files(settings.model_path, field=SERVED_FIELD):
        read_header(path, field=SERVED_FIELD)

    def follow(pipe: Connection, ranks: Communicator) -> None:
        shard = EngineShard(ranks.rank, sizes, config, ranks)
        _follow(settings, shard, pipe)

    leader, ranks = fork_ranks(settings.ranks, follow, late_after_s=settings.watchdog_s)
    return leader, EngineShard(0, sizes, config, ranks)


def threads_of(settings: EngineSettings) -> Threads:
    """Return how many threads a rank computes with: the ranks share the cores."""
    share = max(1, len(os.sched_getaffinity(0)) // settings.ranks)
    return Threads(min(settings.threads or share, share))


def _follow(settings: EngineSettings, shard: EngineShard, pipe: Connection) -> None:
    """Load a rank's part and follow rank 0, until that has gone."""
    run_dir = settings.run_dir.of_rank(shard.rank) if settings.run_dir else None
    settings = replace(settings, run_dir=run_dir, log_dir=None)
    device = open_device(settings, threads_of(settings))
    torch.set_flush_denormal(True)
    arena = make_arena(settings, shard.config, device)
    tokens = arena.geometry.chunks * arena.geometry.slots_per_chunk
    bound = context_bound(settings, shard.whole, tokens)
    fingerprint = model_fingerprint(settings.model_path) if run_dir else ""
    parts = load(settings, shard.config, device, arena, None, bound, fingerprint, shard)
    assert isinstance(parts.arena, RankChunks)
    if run_dir is not None:  # of the weights, for the worker's rank
        with device.background_threads():
            arena.serve(str(run_dir.arena_socket()))
    _log.info("rank %d of %d is ready", shard.rank, settings.ranks)
    RankFollower(
        parts.scheduler,
        lambda request: parts.cache.fill(request.kv, len(request.tokens) - 1),
        lambda request, part: parts.model.prefill(part, request.kv),
        lambda batch: parts.decoder.logits(batch),
        parts.partition.activate,
        parts.arena,
        RankMeter(arena.page),
        prefill_tokens=settings.prefill_tokens,
    ).follow(pipe)


def group_chunks(own: RankChunks, others: RankLeader, run_dir: RunDir, ranks: int) -> GroupChunks:
    """Return the chunks of all ranks, as rank 0 lends them.

    Args:
        own: of rank 0.
        others: what its ranks say of chunks is taken from here on.
        run_dir: of the slot, where each rank serves its arena.
        ranks: of the engine.

    Raises:
        AttachError: the arena of a rank cannot be looked at.
    """
    lending = GroupChunks(own, [table.states for table in look_at_others(run_dir, ranks)])

    def heard_of(rank: int, said: Said) -> None:
        lending.heard(rank, applied=said.applied, failed=said.failed)

    others.heard_of = heard_of
    return lending
