"""Typed tensors over the arena, without a copy."""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from windrow_sidecar._core import Arena


class HasBytes(Protocol):
    """Memory of an arena, by the byte."""

    def tensor(self, offset: int, n_bytes: int) -> Any:  # noqa: ANN401 - as `Arena.tensor`
        """Return a part of it: uint8 [n_bytes], by DLPack."""


def arena_tensor(
    arena: HasBytes, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor over part of the arena: [*shape], contiguous, nothing is copied.

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


def _require_aligned(offset: int, dtype: torch.dtype) -> None:
    if offset % dtype.itemsize:
        raise ValueError(f"offset {offset} is not a multiple of {dtype.itemsize} bytes ({dtype})")


def kv_tensor(arena: Arena, layer: int, dtype: torch.dtype, *, value: bool) -> torch.Tensor:
    """K (or V) of a layer: [chunks, slots of a chunk, kv_heads, head_dim], without a copy.

    On a GPU decode's chunks follow each other without a gap, so that the first two dimensions may
    be viewed as one: the row of token slots that engines index. It keeps the mapping alive, and
    `Arena.close` refuses as long as it lives.

    Raises:
        IndexError: there is no such layer.
        OwnershipError: in a worker on a GPU, unless the whole arena is lent.
        ValueError: elements of another size than the geometry's.
    """
    g = arena.geometry
    if dtype.itemsize != g.dtype_bytes:
        raise ValueError(
            f"{dtype} has {dtype.itemsize} bytes, the arena's elements {g.dtype_bytes}"
        )
    offset, chunk_stride, slot_stride = arena.kv_view(layer, value=value)
    elements = from_dlpack(arena.tensor(0, g.arena_bytes)).view(dtype)
    return elements.as_strided(
        (g.chunks, g.slots_per_chunk, g.kv_heads, g.head_dim),
        (chunk_stride // g.dtype_bytes, slot_stride // g.dtype_bytes, g.head_dim, 1),
        offset // g.dtype_bytes,
    )
