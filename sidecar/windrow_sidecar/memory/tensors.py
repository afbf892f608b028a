"""Typed tensors over the arena, without a copy."""

from __future__ import annotations

from math import prod

import torch
from torch.utils.dlpack import from_dlpack

from windrow_sidecar._core import Arena


def arena_tensor(
    arena: Arena, offset: int, shape: tuple[int, ...], dtype: torch.dtype
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
        raise ValueError(f"offset {offset} is no multiple of {dtype.itemsize}, the size of {dtype}")
