"""Choose the geometry of an arena for a model, a block size and a memory budget."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from math import gcd
from typing import Any

from windrow.errors import UserError
from windrow_sidecar._core import Geometry
from windrow_sidecar.cgroup import CgroupLimits, read_limits

# An arena may take this much of what the machine (or the control group) has: weights, torch's own
# buffers and the worker's intermediates need the rest.
MOST_OF_MEMORY = 0.75


@dataclass(frozen=True)
class KvShape:
    """Shape of one token's K and V.

    Attributes:
        layers: decoder layers that keep KV.
        kv_heads: key and value heads of a layer.
        head_dim: elements of a head.
        dtype_bytes: bytes of an element as it is stored (4: fp32, 2: bf16).
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    @classmethod
    def from_config(cls, config: Any, *, dtype_bytes: int) -> KvShape:  # noqa: ANN401
        """Take it from a `transformers` configuration or anything that has its attributes."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype_bytes=dtype_bytes,
        )

    @property
    def entry_bytes(self) -> int:
        """Bytes of K (or V) of one token in one layer."""
        return self.kv_heads * self.head_dim * self.dtype_bytes


def geometry_for(shape: KvShape, *, block_bytes: int, arena_bytes: int) -> Geometry:
    """The arena of at most `arena_bytes` whose blocks have `block_bytes`.

    Raises:
        UserError: a block does not hold a whole number of tokens or of memory pages, or the budget
            holds no two chunks (one for decode, one for its reserve).
    """
    _require_block(shape, block_bytes)
    chunk_bytes = 2 * shape.layers * block_bytes
    chunks = arena_bytes // chunk_bytes
    if chunks < 2:
        raise UserError(
            f"{arena_bytes} bytes do not hold two chunks of {chunk_bytes} "
            f"({2 * shape.layers} blocks of {block_bytes})",
            field="arena_bytes",
            remedy=f"Give at least {2 * chunk_bytes} bytes, or smaller blocks.",
            reason="ArenaTooSmall",
        )
    return Geometry(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=shape.dtype_bytes,
        block_bytes=block_bytes,
        chunks=chunks,
    )


def require_memory(arena_bytes: int, *, limits: CgroupLimits | None = None) -> None:
    """Refuse an arena that this machine or this control group cannot hold, before it is made.

    The arena is made whole and resident, so one that is too large would not fail: the kernel would
    kill the process that serves.

    Raises:
        UserError: with the largest size that would do.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    limit = (limits if limits is not None else read_limits()).memory_bytes
    whole = min(physical, limit) if limit is not None else physical
    most = int(whole * MOST_OF_MEMORY)
    if arena_bytes > most:
        who = "the machine has" if whole == physical else "the control group allows"
        raise UserError(
            f"an arena of {arena_bytes} bytes is too large: {who} {whole}",
            field="arena_bytes",
            remedy=f"Ask for at most {most} bytes ({MOST_OF_MEMORY:.0%}), or raise the limit.",
            reason="NotEnoughMemory",
        )


def _require_block(shape: KvShape, block_bytes: int) -> None:
    page, entry = mmap.PAGESIZE, shape.entry_bytes
    unit = page * entry // gcd(page, entry)
    if block_bytes <= 0 or block_bytes % unit:
        below = block_bytes // unit * unit
        fitting = [n for n in (below, below + unit) if n > 0]
        raise UserError(
            f"blocks of {block_bytes} bytes do not hold whole pages of {page} bytes "
            f"and whole tokens of {entry}",
            field="block_bytes",
            remedy=f"Use a multiple of {unit}: {' or '.join(map(str, fitting))}.",
            reason="BlockDoesNotDivide",
        )
