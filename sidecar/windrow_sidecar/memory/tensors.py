"""Typed tensors over the arena and over shared weights, without a copy."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from windrow_sidecar._core import Arena


def arena_tensor(
    arena: Arena, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor over part of the arena, contiguous, in that shape and type.

    It keeps the mapping alive, and `Arena.close` refuses as long as it lives.

    Args:
        arena: of this process, created or attached.
        offset: first byte, a multiple of the element's size.
        shape: every extent at least 1.
        dtype: of the elements.

    Raises:
        IndexError: the range is not inside of the arena.
        ValueError: the offset is not aligned.
    """
    _require_aligned(offset, dtype)
    raw = arena.tensor(offset, prod(shape) * dtype.itemsize)
    return from_dlpack(raw).view(dtype).view(shape)


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


def typed_view(
    raw: Any,  # noqa: ANN401  the core's tensors have no type of their own
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A parameter inside of shared weights (`SharedWeights.tensor()`, `Arena.imported(name)`).

    Over sealed weights the tensor is read-only by the kernel's hand: a write ends the process.

    Args:
        raw: uint8, as the core hands it out.
        offset: first byte, a multiple of the element's size.
        shape: every extent at least 1.
        dtype: of the elements.

    Raises:
        IndexError: the range is not inside of the weights.
        ValueError: the offset is not aligned.
    """
    _require_aligned(offset, dtype)
    flat = from_dlpack(raw)
    end = offset + prod(shape) * dtype.itemsize
    if offset < 0 or end > flat.numel():
        raise IndexError(f"bytes {offset} to {end} are not inside of the weights' {flat.numel()}")
    return flat[offset:end].view(dtype).view(shape)


def _require_aligned(offset: int, dtype: torch.dtype) -> None:
    if offset % dtype.itemsize:
        raise ValueError(f"offset {offset} is no multiple of {dtype.itemsize}, the size of {dtype}")
