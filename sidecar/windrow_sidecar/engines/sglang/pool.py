"""The arena under SGLang's KV pool: K and V of every layer as views of it, in SGLang's shape."""

from __future__ import annotations

from math import ceil, gcd
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


def check_pool(pool: Any) -> None:  # noqa: ANN401
    """Refuse a pool whose layout is not plain K and V by token slot. Raises UserError."""
    refused = {
        "its KV is quantized": pool.is_quantized_kv_cache or pool.store_dtype != pool.dtype,
        "its layout is not NHD": pool.use_hnd or pool.kv_cache_layout != "nhd",
        "K and V have different sizes": pool.v_head_dim != pool.head_dim,
        "its memory is sized after graphs are captured": pool.post_capture_active,
        "a custom memory pool holds it": pool.enable_custom_mem_pool,
        "it has no layer": pool.layer_num < 1,
    }
    for why, is_so in refused.items():
        if is_so:
            raise UserError(
                f"{type(pool).__name__} cannot be lent: {why}",
                remedy="Serve with the default KV layout and --kv-cache-dtype auto.",
            )


def plan_geometry(pool: Any) -> Geometry:  # noqa: ANN401
    """The smallest arena that holds the pool, its padding page included.

    K and V of each layer are contiguous in decode, as kernels and transfers want them.

    Raises:
        UserError: a page of this many tokens does not fit into blocks.
    """
    shape = KvShape(pool.layer_num, pool.head_num, pool.head_dim, pool.store_dtype.itemsize)
    entry, page, tokens = shape.entry_bytes, pool.page_size, pool.size + pool.page_size
    if torch.device(pool.device).type == "cuda":
        block = _GPU_BLOCK_BYTES
    else:
        # Whole pages of memory and whole pages of KV.
        unit = _PAGE_BYTES * entry * page // gcd(_PAGE_BYTES, entry * page)
        of_a_chunk = max(_HOST_TOKENS_PER_CHUNK, ceil(tokens * 2 * shape.layers / _HOST_BLOCKS))
        block = unit * ceil(of_a_chunk * entry / unit)
    slots = block // entry
    if slots % page:
        raise UserError(
            f"pages of {page} tokens do not divide a block of {slots}",
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


def make_arena(pool: Any) -> Arena:  # noqa: ANN401
    """Make the arena for a pool that has no buffers yet. Raises UserError, GeometryError."""
    check_pool(pool)
    geometry = plan_geometry(pool)
    driver = driver_of(pool.device)
    if driver == "host":
        require_memory(geometry.arena_bytes)
    return Arena.create(geometry, reserved_chunks=1, driver=driver)


def use_arena(pool: Any, arena: Arena) -> None:  # noqa: ANN401
    """Give the pool its K and V buffers: views of the arena."""
    pool.k_buffer = [_rows(pool, arena, layer, value=False) for layer in range(pool.layer_num)]
    pool.v_buffer = [_rows(pool, arena, layer, value=True) for layer in range(pool.layer_num)]
    for absent in ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer"):
        setattr(pool, absent, None)
    pool.native_v_scale_buffer = pool.dq_k_buffer = pool.dq_v_buffer = None
    pool._kv_buffer_descs = pool._build_kv_buffer_descs()
    pool._init_data_ptrs_and_strides()


def _rows(pool: Any, arena: Arena, layer: int, *, value: bool) -> torch.Tensor:  # noqa: ANN401
    """K or V of a layer: [slots of the pool, heads, head dim]."""
    by_chunk = kv_tensor(arena, layer, pool.store_dtype, value=value)
    return by_chunk.view(-1, pool.head_num, pool.head_dim)[: pool.size + pool.page_size]
