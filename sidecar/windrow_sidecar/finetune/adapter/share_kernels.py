"""Triton kernels of an adapter's share: its products with inputs and gradients, and packed copies.

`u` is the input of a group of linear layers times its A matrices, `v` the gradient of its output
times its B matrices, both [tokens, ranks] and scaled. All tensors are contiguous unless strides are
arguments.
"""

# Triton compiles these functions: annotations are types of its own, and no checker knows them.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def share_of_u(u, b, tokens_at, here, columns, inside, RANKS, COLUMNS: tl.constexpr):
    """Multiply u [tokens, ranks] by rows of B [out, ranks]: [tokens, columns]."""
    ranks = tl.arange(0, COLUMNS)
    real = ranks < RANKS
    left = tl.load(
        u + tokens_at[:, None] * RANKS + ranks[None, :],
        mask=here[:, None] & real[None, :],
        other=0.0,
    )
    right = tl.load(
        b + columns[None, :] * RANKS + ranks[:, None],
        mask=inside[None, :] & real[:, None],
        other=0.0,
    )
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def share_of_v(v, a, tokens_at, here, columns, inside, UNITS, RANKS, COLUMNS: tl.constexpr):
    """Multiply v [tokens, ranks] by columns of A [ranks, in]: [tokens, columns]."""
    ranks = tl.arange(0, COLUMNS)
    real = ranks < RANKS
    left = tl.load(
        v + tokens_at[:, None] * RANKS + ranks[None, :],
        mask=here[:, None] & real[None, :],
        other=0.0,
    )
    right = tl.load(
        a + ranks[:, None] * UNITS + columns[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def onto_ranks(block, a, columns, inside, UNITS, RANKS, COLUMNS: tl.constexpr):
    """Multiply columns of an input [tokens, UNITS] by A [ranks, UNITS]: [tokens, ranks]."""
    ranks = tl.arange(0, COLUMNS)
    right = tl.load(
        a + ranks[None, :] * UNITS + columns[:, None],
        mask=(ranks < RANKS)[None, :] & inside[:, None],
        other=0.0,
    )
    return tl.dot(block, right, input_precision="ieee")


@triton.jit
def store_ranks(into, total, scale, at, here, RANKS, COLUMNS: tl.constexpr):
    """Write sums [tokens, ranks], scaled, into memory of that shape."""
    ranks = tl.arange(0, COLUMNS)
    inside = here[:, None] & (ranks < RANKS)[None, :]
    made = (total * scale).to(into.dtype.element_ty)
    tl.store(into + at[:, None] * RANKS + ranks[None, :], made, mask=inside)


@triton.jit
def pack_b(
    b0,  # B of each projection, [out, rank]
    b1,
    b2,
    packed,  # [all out, all ranks], written
    OUT0: tl.constexpr,
    OUT1: tl.constexpr,
    OUT2: tl.constexpr,
    RANK0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Put up to three B matrices into their rows and columns of one, with zeros beside them."""
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    rank = tl.arange(0, RANK_COLUMNS)[None, :]
    in0 = (out < OUT0) & (rank < RANK0)
    found = tl.load(b0 + out * RANK0 + rank, mask=in0, other=0.0)
    out1, rank1 = out - OUT0, rank - RANK0
    in1 = (out1 >= 0) & (out1 < OUT1) & (rank1 >= 0) & (rank1 < RANK1)
    found += tl.load(b1 + out1 * RANK1 + rank1, mask=in1, other=0.0)
    out2, rank2 = out1 - OUT1, rank1 - RANK1
    in2 = (out2 >= 0) & (out2 < OUT2) & (rank2 >= 0) & (rank2 < RANK2)
    found += tl.load(b2 + out2 * RANK2 + rank2, mask=in2, other=0.0)
    inside = (out2 < OUT2) & (rank2 < RANK2)
    place = out * (RANK0 + RANK1 + RANK2) + rank
    tl.store(packed + place, found.to(packed.dtype.element_ty), mask=inside)


@triton.jit
def add_share(
    product,  # [tokens, UNITS]; the sum is written to it
    residual,  # [tokens, UNITS]
    u,
    b,
    tokens,
    UNITS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum a product, its adapter's share and the residual."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < UNITS
    inside = here[:, None] & real[None, :]
    place = at[:, None] * UNITS + columns[None, :]
    total = tl.load(product + place, mask=inside, other=0.0).to(WIDE)
    total += tl.load(residual + place, mask=inside, other=0.0).to(WIDE)
    total += share_of_u(u, b, at, here, columns, real, RANKS, RANK_COLUMNS)
    tl.store(product + place, total.to(product.dtype.element_ty), mask=inside)
