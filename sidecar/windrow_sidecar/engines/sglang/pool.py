"""The arena under SGLang's KV pool: the KV of every layer as views of it, in SGLang's shape.

Latent attention keeps one vector for a token where others keep K and V: its layers lie in pairs,
the first of a pair where K would lie and the second where V would. KV in 8 bits is kept as bytes;
its scales are numbers of SGLang's layers, not of the pool.

What SGLang keeps beside it under the same page numbers stays SGLang's: a draft's pool, the keys
of a sparse attention's index. A lent page is handed out to nobody, so nobody reads or writes there.
So does the KV of layers with a sliding window, which has pages and an allocator of its own.
"""

from __future__ import annotations

from math import ceil, lcm
from typing import Any

import torch

from windrow.errors import UserError
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.memory.geometry import KvShape, geometry_for, require_memory
from windrow_sidecar.memory.tensors import kv_tensor

_PAGE_BYTES = 4096
# On a GPU what its virtual memory maps; on the host a chunk of some hundred tokens, or more where
# the blocks would be more than a worker's process should map.
_GPU_BLOCK_BYTES = 2 << 20
_HOST_TOKENS_PER_CHUNK, _HOST_BLOCKS = 256, 16_384
# Whole pages of a GPU's memory and whole pages of KV: beyond this a chunk is too much to lend.
_MOST_BLOCK_BYTES = 64 << 20
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_latent(pool: Any) -> bool:  # noqa: ANN401
    """Return whether a pool keeps one vector for a token (DeepSeek's latent attention)."""
    return hasattr(pool, "kv_lora_rank")


def pool_of_tokens(pool: Any) -> Any:  # noqa: ANN401
    """Return the pool whose pages can be lent: that of the layers which attend to all tokens.

    Other layers keep the state of a request, or the KV of a sliding window under page numbers of
    its own. Theirs stays SGLang's.
    """
    return getattr(pool, "full_kv_pool", pool)


def bytes_beside(pool: Any) -> int:  # noqa: ANN401
    """Return the bytes that a pool keeps by token beside its KV: an index of sparse attention."""
    return sum(buffer.nbytes for buffer in getattr(pool, "index_k_with_scale_buffer", ()))


def check_pool(pool: Any) -> None:  # noqa: ANN401
    """Refuse a pool whose layout is not plain KV by token slot. Raises UserError."""
    as_bytes = pool.dtype in _EIGHT_BITS and pool.store_dtype == torch.uint8
    refused = {
        "its KV is quantized": pool.store_dtype != pool.dtype and not as_bytes,
        "a custom memory pool holds it": pool.enable_custom_mem_pool,
        "no layer attends to all tokens": pool.layer_num < 1,
    }
    if is_latent(pool):
        refused |= {
            "its layers are sharded": pool.layer_shard_enabled or pool.dcp_replicated,
        }
    else:
        refused |= {
            "its KV has scales of its own": pool.is_quantized_kv_cache,
            "its layout is not NHD": pool.use_hnd or pool.kv_cache_layout != "nhd",
            "K and V have different sizes": pool.v_head_dim != pool.head_dim,
            "its memory is sized after graphs are captured": pool.post_capture_active,
        }
    for why, is_so in refused.items():
        if is_so:
            raise UserError(
                f"{type(pool).__name__} cannot be lent: {why}",
                remedy="Serve with the default KV layout and --kv-cache-dtype auto or fp8_e4m3.",
            )


def plan_geometry(pool: Any) -> Geometry:  # noqa: ANN401
    """The smallest arena that holds the pool, its padding page included.

    K and V of each layer are contiguous in decode, as kernels and transfers want them.

    Raises:
        UserError: a page of this many tokens does not fit into blocks.
    """
    if is_latent(pool):
        pairs = ceil(pool.layer_num / 2)
        shape = KvShape(pairs, 1, pool.kv_cache_dim, pool.store_dtype.itemsize)
    else:
        shape = KvShape(pool.layer_num, pool.head_num, pool.head_dim, pool.store_dtype.itemsize)
    entry, page, tokens = shape.entry_bytes, pool.page_size, pool.size + pool.page_size
    # Whole pages of memory and whole pages of KV.
    if torch.device(pool.device).type == "cuda":
        block = lcm(_GPU_BLOCK_BYTES, entry * page)
    else:
        unit = lcm(_PAGE_BYTES, entry * page)
        of_a_chunk = max(_HOST_TOKENS_PER_CHUNK, ceil(tokens * 2 * shape.layers / _HOST_BLOCKS))
        block = unit * ceil(of_a_chunk * entry / unit)
    slots = block // entry
    if block > _MOST_BLOCK_BYTES and block > lcm(_PAGE_BYTES, entry * page):
        raise UserError(
            f"pages of {page} tokens fit only into blocks of {block >> 20} MiB",
            field="--page-size",
            remedy="Use a power of two.",
        )
    chunks = max(2, ceil(tokens / slots))
    return geometry_for(shape, block_bytes=block, arena_bytes=chunks * 2 * shape.layers * block)


def driver_of(device: str) -> str:
    """The arena's driver for a device as SGLang names it."""
    found = torch.device(device)
    if found.type != "cuda":
        return "host"
    return f"cuda:{found.index if found.index is not None else torch.cuda.current_device()}"


def make_arena(pool: Any, *, reserved_chunks: int = 1) -> Arena:  # noqa: ANN401
    """Make the arena for a pool that has no buffers yet. Raises UserError, GeometryError.

    `reserved_chunks`: none over ranks, whose reserve rank 0 keeps in its account.
    """
    check_pool(pool)
    geometry = plan_geometry(pool)
    driver = driver_of(pool.device)
    if driver == "host":
        require_memory(geometry.arena_bytes)
    return Arena.create(geometry, reserved_chunks=reserved_chunks, driver=driver)


def use_arena(pool: Any, arena: Arena) -> None:  # noqa: ANN401
    """Give the pool its buffers: views of the arena."""
    if is_latent(pool):
        pool.kv_buffer = [
            _rows(pool, arena, layer // 2, 1, pool.kv_cache_dim, value=bool(layer % 2))
            for layer in range(pool.layer_num)
        ]
        return
    heads, dim = pool.head_num, pool.head_dim
    for name, value in (("k_buffer", False), ("v_buffer", True)):
        of_layers = [
            _rows(pool, arena, layer, heads, dim, value=value) for layer in range(pool.layer_num)
        ]
        setattr(pool, name, of_layers)
    for absent in ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer"):
        setattr(pool, absent, None)
    pool.native_v_scale_buffer = pool.dq_k_buffer = pool.dq_v_buffer = None
    pool._kv_buffer_descs = pool._build_kv_buffer_descs()
    pool._init_data_ptrs_and_strides()


def buffers_of(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the KV that a pool keeps, [slots, heads, dim] each."""
    return [*pool.kv_buffer] if is_latent(pool) else [*pool.k_buffer, *pool.v_buffer]


def _rows(
    pool: Any,  # noqa: ANN401
    arena: Arena,
    layer: int,
    heads: int,
    dim: int,
    *,
    value: bool,
) -> torch.Tensor:
    """Return K's or V's rows of a layer: [slots of the pool, heads, dim]."""
    by_chunk = kv_tensor(arena, layer, pool.store_dtype, value=value)
    return by_chunk.view(-1, heads, dim)[: pool.size + pool.page_size]
