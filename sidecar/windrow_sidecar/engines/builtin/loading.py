"""Build the engine: arena, weights, cache, and the decoder over them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

from windrow.errors import UserError
from windrow.eventlog import EventLog
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, Geometry, GeometryError, SharedWeights
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.kv.paging import PagePool
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.llama.layer_ops import LayerOps, TorchOps
from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.weights import (
    Layout,
    fill_random,
    load_weights,
    plan_layout,
    write_manifest,
)
from windrow_sidecar.engines.builtin.loop import LoopParts
from windrow_sidecar.engines.builtin.ranks.shard import EngineShard, ShardedLlama
from windrow_sidecar.engines.builtin.scheduler import Scheduler
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.step.decoder import Decoder
from windrow_sidecar.engines.builtin.step.gathered import GatheredDecode
from windrow_sidecar.engines.builtin.step.paged_attention import PagedAttention, TorchPagedAttention
from windrow_sidecar.engines.builtin.step.static_step import StaticDecode
from windrow_sidecar.engines.builtin.streamed import StreamedWeights, stream_weights
from windrow_sidecar.engines.confined import GraphShares
from windrow_sidecar.engines.device import EngineDevice, require_room
from windrow_sidecar.engines.hook import FailClosed, NullHook
from windrow_sidecar.engines.rank_chunks import RankChunks
from windrow_sidecar.engines.weight_files import SERVED_FIELD, unread_note
from windrow_sidecar.memory.geometry import KvShape, geometry_for

_log = logging.getLogger(__name__)

_EXPORTED_WEIGHTS = "weights"  # the name under which the worker asks the arena for them


def dtype_of(settings: EngineSettings) -> torch.dtype:
    """Return the type of weights and KV."""
    found: torch.dtype = getattr(torch, settings.dtype)
    return found


def make_arena(settings: EngineSettings, config: LlamaConfig, device: EngineDevice) -> Arena:
    """Make the arena for the model's KV; raises UserError for sizes that do not fit."""
    dtype = dtype_of(settings)
    shape = KvShape(config.layers, config.kv_heads, config.head_dim, dtype_bytes=dtype.itemsize)
    plain = geometry_for(shape, block_bytes=settings.block_bytes, arena_bytes=settings.arena_bytes)
    geometry = Geometry(
        layers=plain.layers,
        kv_heads=plain.kv_heads,
        head_dim=plain.head_dim,
        dtype_bytes=plain.dtype_bytes,
        block_bytes=plain.block_bytes,
        chunks=plain.chunks,
        layout=device.layout,
    )
    if geometry.slots_per_chunk % settings.page_size:
        raise UserError(
            f"pages of {settings.page_size} tokens do not divide a block of "
            f"{geometry.slots_per_chunk}",
            field="--page-size",
            remedy="Use a power of two.",
        )
    weights_bytes = settings.weights_budget_bytes or plan_layout(config, dtype).n_bytes
    require_room(device, geometry.arena_bytes, weights_bytes)
    # Over ranks rank 0 keeps the reserve in its account: what ranks may take has to be the same.
    reserved = 1 if settings.run_dir and settings.ranks == 1 else 0
    try:
        return Arena.create(geometry, reserved_chunks=reserved, driver=device.driver)
    except GeometryError as error:
        raise UserError(
            str(error),
            field="--block-bytes",
            remedy="Leave it out: the default fits the device. Or lower --arena-bytes.",
            reason="BlockDoesNotDivide",
        ) from error


def load(
    settings: EngineSettings,
    config: LlamaConfig,
    device: EngineDevice,
    arena: Arena,
    log: EventLog | None,
    max_context: int,
    fingerprint: str,
    shard: EngineShard | None = None,
) -> LoopParts:
    """Load the weights and put together what the loop drives, without a hook yet.

    `config`: of the part of the model that `shard` is; None: of all of it.

    Raises:
        UserError: weights that cannot be read, or kernels that this machine cannot run.
    """
    device.partition.activate(device.units)
    dtype = dtype_of(settings)
    streamed: StreamedWeights | None = None
    if settings.weights_budget_bytes:
        streamed = stream_weights(
            settings.model_path,
            config,
            dtype,
            fingerprint,
            budget_bytes=settings.weights_budget_bytes,
            bytes_per_s=settings.weights_rate,
            beside_a_job=settings.in_engine,
        )
        layout, storage = streamed.layout, streamed.pages.storage
        _say_unread(settings.model_path)
    else:
        layout, storage = _resident(settings, config, device, arena, fingerprint, shard)
    cache = KvCache(
        from_dlpack(arena.tensor(0, arena.geometry.arena_bytes)).view(dtype),
        config,
        KvPlaces.of(arena),
        page_size=settings.page_size,
        max_tokens=max_context,
        heads=shard.kv_heads if shard is not None else None,
    )
    chunks = arena if shard is None else RankChunks(arena)
    pool = PagePool(chunks, pages_per_chunk=cache.pages_per_chunk)
    if shard is None:
        holds = streamed.layers.step if streamed is not None else None
        model = LlamaModel(config, layout, storage, cache, holds)
    else:
        model = ShardedLlama(shard, layout, storage, cache)
    return LoopParts(
        scheduler=Scheduler(
            pool,
            cache,
            max_running=settings.max_running,
            reserve_tokens=settings.reserve_tokens,
        ),
        model=model,
        decoder=make_decoder(settings, model, device.units, _graph_shares(device)),
        cache=cache,
        arena=chunks,
        partition=device.partition,
        hook=FailClosed(NullHook()),
        log=log,
        clock_ns=time.monotonic_ns,
        units=device.units,
        on_completed=lambda: None,
        streamed=streamed,
    )


def _resident(
    settings: EngineSettings,
    config: LlamaConfig,
    device: EngineDevice,
    arena: Arena,
    fingerprint: str,
    shard: EngineShard | None,
) -> tuple[Layout, torch.Tensor]:
    """Return all weights in memory that a worker maps: their layout, and uint8 [its bytes]."""
    layout = plan_layout(config, dtype_of(settings))
    shared = SharedWeights.create(layout.n_bytes, driver=device.driver)
    storage = from_dlpack(shared.tensor())
    _fill(settings.model_path, settings.random_weights, layout, storage, shard)
    if storage.is_cuda:
        torch.cuda.synchronize()  # a write that is still on its way would hit a sealed page
    shared.seal()
    if settings.run_dir is not None:
        export_weights(arena, shared, layout, settings.run_dir, fingerprint, settings.ranks)
    return layout, storage


def export_weights(
    arena: Arena,
    shared: SharedWeights,
    layout: Layout,
    run_dir: RunDir,
    fingerprint: str,
    ranks: int = 1,
) -> None:
    """Let the worker map the sealed weights, and write where in them each parameter is."""
    arena.export(_EXPORTED_WEIGHTS, shared.fd, n_bytes=layout.n_bytes)
    write_manifest(run_dir.weights_manifest(), layout, fingerprint, ranks)


def _graph_shares(device: EngineDevice) -> GraphShares | None:
    return device.partition if isinstance(device.partition, GraphShares) else None


def make_decoder(
    settings: EngineSettings, model: LlamaModel, units: int, shares: GraphShares | None = None
) -> Decoder:
    """Return the decoder that was asked for; on a GPU its graphs are captured here.

    Raises:
        UserError: Triton was asked for and cannot run here.
    """
    if settings.decode_step == "gathered":
        return GatheredDecode(model)
    attention, ops = _kernels(settings.attention_backend, model, units)
    return StaticDecode(model, attention, ops, max_running=settings.max_running, shares=shares)


def _kernels(backend: str, model: LlamaModel, units: int) -> tuple[PagedAttention, LayerOps]:
    config, cache = model.config, model.cache
    on_gpu = model.device.type == "cuda"
    missing = "" if backend == "torch" else _triton_missing(model.device)
    if missing and backend == "triton":
        raise _no_triton(missing)
    if missing:
        _log.warning("--attention-backend torch is used, which is slower: %s", missing)
    if missing or backend == "torch":
        attention = TorchPagedAttention(config, cache, fixed=on_gpu)
        return attention, TorchOps(config, cache, model.rotary)
    from windrow_sidecar.engines.builtin.llama.triton_ops import TritonOps
    from windrow_sidecar.engines.builtin.step.triton_attention import TritonPagedAttention

    return (
        TritonPagedAttention(config, cache, units=units),
        TritonOps(config, cache, model.rotary),
    )


def _triton_missing(device: torch.device) -> str:
    """Say why Triton's kernels cannot run there; "" where they can, as was tried on a GPU."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    # Before the kernels are imported: what they are, compiled or interpreted, is settled then.
    if triton.knobs.runtime.interpret:
        return ""
    if device.type != "cuda":
        return "Triton has no compiler for the host"
    from windrow_sidecar.compute.triton_launch import NEEDS, try_triton

    why = try_triton(device)
    return f"Triton cannot launch a kernel here ({why}); it needs {NEEDS}" if why else ""


def _fill(
    folder: Path,
    seed: int | None,
    layout: Layout,
    storage: torch.Tensor,
    shard: EngineShard | None,
) -> None:
    began_s = time.monotonic()
    if seed is None and shard is not None:
        load_weights(folder, layout, storage, shard.cut)
    elif seed is None:
        load_weights(folder, layout, storage)
    elif shard is not None:
        fill_random(layout, storage, seed, plan_layout(shard.whole, layout.dtype), shard.cut)
    else:
        fill_random(layout, storage, seed)
    if seed is None:
        _say_unread(folder)
    _log.info("%.2f GB of weights in %.1f s", layout.n_bytes / 1e9, time.monotonic() - began_s)


def _say_unread(folder: Path) -> None:
    if note := unread_note(folder, field=SERVED_FIELD):
        _log.warning("%s", note)


def _no_triton(why: str) -> UserError:
    return UserError(
        why,
        field="--attention-backend",
        remedy="Use --attention-backend torch.",
        reason="NoTriton",
    )
