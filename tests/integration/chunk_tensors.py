"""A chunk of an arena as one tensor, for tests that look into it."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from windrow_sidecar._core import Arena


def chunk_tensor(arena: Arena, chunk: int, dtype: torch.dtype) -> torch.Tensor:
    """One chunk as [2 * layers, slots, kv_heads, head_dim]: K and V of each layer in turn.

    Of the per-layer layout (`kv_tensor` knows both). With elements of another size than the
    geometry's it is [2 * layers, elements of a block].
    """
    g = arena.geometry
    blocks, stride = 2 * g.layers, arena.block_stride // dtype.itemsize
    n_bytes = (blocks - 1) * arena.block_stride + g.block_bytes
    raw = from_dlpack(arena.tensor(arena.chunk_offset(chunk), n_bytes)).view(dtype)
    if dtype.itemsize != g.dtype_bytes:
        return raw.as_strided((blocks, g.block_bytes // dtype.itemsize), (stride, 1))
    return raw.as_strided(
        (blocks, g.slots_per_chunk, g.kv_heads, g.head_dim),
        (stride, g.kv_heads * g.head_dim, g.head_dim, 1),
    )
