"""Run the built-in engine: assemble front, arena, weights, profile and hook, then decode."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from windrow.crd import slot_name
from windrow.errors import UserError
from windrow.eventlog import EventLog
from windrow.wheel import installed_version
from windrow_sidecar._core import Arena, LiveTensorsError
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.engines.builtin import profiling
from windrow_sidecar.engines.builtin.device import open_device
from windrow_sidecar.engines.builtin.finetuning import InEngineFinetune
from windrow_sidecar.engines.builtin.joined_profile import profile_joined
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.loading import dtype_of, load, make_arena
from windrow_sidecar.engines.builtin.loop import DecodeLoop, LoopParts
from windrow_sidecar.engines.builtin.profiler import Bounds, Profiler, ProfileStore
from windrow_sidecar.engines.builtin.ranks.group import RankEnded, RankLeader
from windrow_sidecar.engines.builtin.ranks.serving import group_chunks, start_ranks, threads_of
from windrow_sidecar.engines.builtin.ranks.shard import EngineShard
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.threads import Threads
from windrow_sidecar.engines.builtin.web.channel import PeerGone
from windrow_sidecar.engines.builtin.web.frontprocess import FrontProcess
from windrow_sidecar.engines.builtin.web.messages import EngineReady
from windrow_sidecar.engines.builtin.web.token_batcher import TokenBatcher
from windrow_sidecar.engines.claim import SlotClaim, claim_slot
from windrow_sidecar.engines.device import EngineDevice
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.kept_profile import KeptProfile
from windrow_sidecar.engines.logflush import LogFlusher
from windrow_sidecar.engines.profile import Subject
from windrow_sidecar.engines.rank_chunks import RankChunks
from windrow_sidecar.engines.rank_pages import RankMeter, RankPages, look_at_others
from windrow_sidecar.heap import settle_heap
from windrow_sidecar.qos.deferred_passes import DeferredPasses

if TYPE_CHECKING:
    from windrow_sidecar.engines.opening import RunningHarvest

_log = logging.getLogger(__name__)

# How long a thread in the background may hold the interpreter while decode wants it; Python's own
# 5 ms are a whole step.
_SWITCH_INTERVAL_S = 0.0005
# Threads that have been waited for may still unwind their last calls.
_TENSORS_GONE_WITHIN_S = 2.0
# What the number of threads is tried with: a busy moment of a conversation service.
_USUAL_BATCH, _USUAL_CONTEXT = 8, 1024
# Finetuning is a layer above engines: by name, so that only an engine that finetunes loads it.
_IN_ENGINE = "windrow_sidecar.finetune.in_engine.builtin_host"


@dataclass(slots=True)
class _Signals:
    """SIGTERM and SIGINT end the start-up at once, and the loop before its next step."""

    stopped: bool = False
    stop_loop: Callable[[], None] | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stopped = True
        if self.stop_loop is None:
            raise SystemExit(0)
        self.stop_loop()


def _ignore() -> None:
    """A second signal changes nothing."""


def serve(settings: EngineSettings, config: LlamaConfig, front: FrontProcess) -> int:
    """Serve until SIGTERM or SIGINT (returns 0) or until the front dies (returns 1).

    Raises UserError for weights or sizes that cannot be had.
    """
    signals = _Signals()
    signals.install()
    finetune: InEngineFinetune | None = None
    if settings.in_engine:  # forks processes that read rows: before there is a second thread
        finetune = importlib.import_module(_IN_ENGINE).prepare(settings)
        assert finetune is not None
        settings = replace(settings, run_dir=finetune.run_dir)
    claim, why = _claim(settings)
    if why:
        _log.warning("harvesting is off, decode serves alone: %s", why)
        settings = replace(settings, run_dir=None, profile="none")
    elif claim is not None:
        settings = replace(settings, run_dir=claim.run_dir)
        # One that an engine before has left would send workers to nobody.
        claim.run_dir.in_engine_socket().unlink(missing_ok=True)
        claim.run_dir.refusal().unlink(missing_ok=True)
        if finetune is not None:
            finetune.claimed(claim.run_dir)
    ranks: tuple[RankLeader, EngineShard] | None = None
    if settings.ranks > 1:  # forks them: before there is a second thread
        ranks = start_ranks(settings, config)
    threads = threads_of(settings) if ranks else Threads(settings.threads)
    device = open_device(settings, threads)
    with ExitStack() as on_exit:
        if finetune is not None:
            on_exit.callback(finetune.remove_own_files)
        if claim is not None:
            on_exit.callback(claim.close)
        if ranks is not None:
            on_exit.callback(ranks[0].end)
        arena = make_arena(settings, ranks[1].config if ranks else config, device)
        on_exit.callback(_close_arena, arena)
        log = _open_log(settings)
        if log is not None:
            on_exit.callback(LogFlusher(log).close)
        return _run(settings, config, device, threads, front, arena, log, signals, finetune, ranks)


def _claim(settings: EngineSettings) -> tuple[SlotClaim | None, str]:
    """Take a slot; or say why this process cannot be harvested although its pod was prepared.

    Decode comes first: what only a finetune worker would need never keeps a server from serving.
    """
    if settings.run_dir is None:
        return None, ""
    root = settings.run_dir.root
    if not os.access(root, os.W_OK | os.X_OK):
        return None, f"this user cannot write to the run directory {root}"
    try:
        if settings.device == "cpu" and not settings.in_engine:
            HostPartition.from_affinity("decode", set_threads=lambda _: None)
        return claim_slot(settings.run_dir, os.environ), ""
    except (UserError, OSError) as error:
        return None, str(error)


def _run(
    settings: EngineSettings,
    config: LlamaConfig,
    device: EngineDevice,
    threads: Threads,
    front: FrontProcess,
    arena: Arena,
    log: EventLog | None,
    signals: _Signals,
    finetune: InEngineFinetune | None,
    ranks: tuple[RankLeader, EngineShard] | None,
) -> int:
    """Load, profile, serve. All tensors over the arena are gone when it returns."""
    max_context = _max_context(settings, config, arena)
    fingerprint = model_fingerprint(settings.model_path)
    torch.set_flush_denormal(True)  # of this process, which computes nothing else
    if ranks is None:
        parts = load(settings, config, device, arena, log, max_context, fingerprint)
    else:
        others, shard = ranks
        parts = load(settings, shard.config, device, arena, log, max_context, fingerprint, shard)
        parts = replace(parts, others=others)
        try:
            others.wait_until_ready()
        except RankEnded as error:
            _log.error("%s: so does the engine", error)
            return 1
    front.wait_until_up()  # its start would disturb the profile
    if device.torch_device.type == "cpu" and not threads.most and parts.streamed is None:
        batch = min(_USUAL_BATCH, settings.max_running)
        room = arena.geometry.chunks * arena.geometry.slots_per_chunk // (2 * batch)
        context = max(1, min(_USUAL_CONTEXT, max_context // 2, room))
        profiling.settle_threads(parts, threads, batch=batch, context=context)
    subject = Subject(
        device=device.label,
        driver=device.driver.partition(":")[0],
        engine="builtin",
        engine_version=installed_version(),
        model_fingerprint=fingerprint,
        tensor_parallel=settings.ranks,
    )
    harvesting = None
    if settings.run_dir is not None:
        started = _start_harvesting(
            settings, parts, arena, device, subject, max_context, config, log
        )
        if started is not None:
            harvesting, group = started
            parts = replace(parts, lending=group)
    else:
        profile = _take_profile(settings, parts, arena, device, subject, max_context, config)
        if settings.profile_only is not None and profile is not None:
            settings.profile_only.write_text(json.dumps(profile, indent=1))
            return 0
    if harvesting is not None:
        parts = replace(parts, hook=harvesting.hook, on_completed=harvesting.link.request_completed)
        if finetune is not None:
            finetune.serves(parts.model, parts.streamed)
            rider = parts.decoder if isinstance(parts.decoder, GatheredDecode) else None
            rider = rider if settings.finetune_fused else None
            if parts.streamed is not None:
                deferral_us = round(settings.finetune_deferral_s * 1e6)
                parts = replace(parts, deferred=DeferredPasses(deferral_us))
            elif rider is not None:
                finetune.turns.hybrid = profile_joined(parts.model, max_batch=settings.max_running)
            parts = replace(parts, turns=finetune.turns, rider=rider)
    outbox = TokenBatcher(front.channel, interval=settings.stream_interval)
    loop = DecodeLoop(parts, front.channel, outbox, prefill_tokens=settings.prefill_tokens)
    signals.stop_loop = loop.stop
    try:
        front.channel.send(EngineReady(max_context))
        _log.info("ready on %s:%d, context %d tokens", settings.host, settings.port, max_context)
        _quiet_interpreter()
        if finetune is not None and harvesting is not None:
            finetune.start(harvesting)
        loop.run()
    except PeerGone:
        _log.error("the HTTP front has ended: stopping")
        return 0 if signals.stopped else 1
    except OSError as error:
        if parts.streamed is None:
            raise
        _log.error("a layer cannot be read, so the engine ends: %s", error)
        return 1
    except (RankEnded, RuntimeError) as error:
        why = parts.others.why_ended() if parts.others is not None else ""
        if not why:
            raise
        _log.error("%s: so does the engine (%s)", why, error)
        return 1
    finally:
        signals.stop_loop = _ignore  # it would keep the loop alive, and with it the arena's tensors
        if finetune is not None:
            finetune.close()
        if harvesting is not None:
            harvesting.close()
        if parts.streamed is not None:
            parts.streamed.layers.close()
    return 0


def _start_harvesting(
    settings: EngineSettings,
    parts: LoopParts,
    arena: Arena,
    device: EngineDevice,
    subject: Subject,
    max_context: int,
    config: LlamaConfig,
    log: EventLog | None,
) -> tuple[RunningHarvest, GroupChunks | None] | None:
    """Return the harvesting side, and what lends over ranks, where the model is cut.

    None, with the reason in the log, where it does not start.
    """
    assert settings.run_dir is not None
    try:
        from windrow_sidecar.engines.builtin import harvesting

        profile = _take_profile(settings, parts, arena, device, subject, max_context, config)
        if profile is not None:
            KeptProfile(settings.run_dir).keep(profile)
        group: GroupChunks | None = None
        if parts.others is not None:
            assert isinstance(parts.arena, RankChunks)
            group = group_chunks(parts.arena, parts.others, settings.run_dir, settings.ranks)
        running = harvesting.start(
            settings,
            settings.run_dir,
            arena=arena,
            device=device,
            subject=subject,
            profile=profile,
            log=log,
            group=group,
        )
        if parts.others is not None:
            _show_ranks(running, parts.others, arena, settings)
    except Exception:  # noqa: BLE001 - serving must start without us, whatever it is
        _log.exception("harvesting is off: it did not start; decode serves alone")
        return None
    return running, group


def _show_ranks(
    running: RunningHarvest, others: RankLeader, arena: Arena, settings: EngineSettings
) -> None:
    """Have the link report the figures of every rank. Raises AttachError."""
    assert settings.run_dir is not None
    others.meter = RankMeter(arena.page)
    pages = RankPages(arena, look_at_others(settings.run_dir, settings.ranks))
    running.link.show_ranks(pages.figures)


def _close_arena(arena: Arena) -> None:
    """Close the arena once the last tensor over it is gone, or leave it to the process's end."""
    gc.unfreeze()
    until_s = time.monotonic() + _TENSORS_GONE_WITHIN_S
    while (in_use := _still_in_use(arena)) is not None:
        # A thread on its way out may have them.
        if time.monotonic() > until_s:
            # The process ends and its mappings with it; only the socket's file would stay.
            _log.warning("the arena is freed with the process: %s", in_use)
            return
        time.sleep(0.05)


def _still_in_use(arena: Arena) -> LiveTensorsError | None:
    """Close the arena; return the error where tensors over it are alive."""
    gc.collect()
    try:
        arena.close()
    except LiveTensorsError as error:
        return error
    return None


def _max_context(settings: EngineSettings, config: LlamaConfig, arena: Arena) -> int:
    tokens = arena.geometry.chunks * arena.geometry.slots_per_chunk
    bound = min(tokens, config.max_positions)
    if settings.context_length > bound:
        raise UserError(
            f"{settings.context_length} tokens are more than model and arena allow ({bound})",
            field="--context-length",
            remedy="Ask for less, or raise --arena-bytes.",
        )
    return settings.context_length or bound


def _take_profile(
    settings: EngineSettings,
    parts: LoopParts,
    arena: Arena,
    device: EngineDevice,
    subject: Subject,
    max_context: int,
    config: LlamaConfig,
) -> Mapping[str, Any] | None:
    """Read back what an engine of this kind has left, or measure; None where none is asked for."""
    if settings.profile == "none":
        return None
    store = ProfileStore.of(settings.run_dir)
    bounds = Bounds(
        settings.max_running,
        # Half of the arena: growth and the reserve take their part.
        max_tokens=arena.geometry.chunks * arena.geometry.slots_per_chunk // 2,
        max_context=max_context,
    )
    profiler = Profiler(parts, device.splits, subject, bounds, store)
    if not settings.profile_only and (stored := profiler.read_back()) is not None:
        return stored
    if settings.profile == "roofline":
        return profiler.prior(config, str(device.torch_device), dtype_of(settings))
    return profiler.take(settings.profile, config)


def _open_log(settings: EngineSettings) -> EventLog | None:
    if settings.log_dir is None:
        return None
    slot = settings.run_dir.slot if settings.run_dir else 0
    source = slot_name(settings.source, slot)
    return EventLog(settings.log_dir / f"{source}.events.jsonl", source=source)


def _quiet_interpreter() -> None:
    """No collection in the middle of a step, no thread in the background that holds it up."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    settle_heap()
    gc.disable()
