"""Triton kernel of the gradients of all adapters of a layer, in one launch.

`u` is the input of a group of linear layers times its A matrices, `v` the gradient of its output
times its B matrices, both [tokens, ranks] and scaled. All tensors are contiguous unless strides are
arguments.
"""

# Triton compiles these functions: annotations are types of its own, and no checker knows them.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _over_tokens(
    left,
    right,
    columns,
    real,
    tokens,
    UNITS,
    RANKS,
    RANK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply columns of left [tokens, UNITS] by right [tokens, ranks], over all tokens."""
    ranks = tl.arange(0, RANK_COLUMNS)
    total = tl.zeros([BLOCK, RANK_COLUMNS], WIDE)
    for begin in range(0, tokens, ROWS):
        at = (begin + tl.arange(0, ROWS)).to(tl.int64)
        here = at < tokens
        wide = tl.load(
            left + at[None, :] * UNITS + columns[:, None],
            mask=here[None, :] & real[:, None],
            other=0.0,
        )
        narrow = tl.load(
            right + at[:, None] * RANKS + ranks[None, :],
            mask=here[:, None] & (ranks < RANKS)[None, :],
            other=0.0,
        )
        total += tl.dot(wide, narrow, input_precision="ieee")
    return total


@triton.jit
def _gradients(
    block,
    x,
    v,
    d,
    u,
    places,  # int32 [3, OUT]: of each output, where its rank 0 is in `into`; its ranks, from and to
    into,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write one block of columns of the gradients of A, or behind those, of B."""
    ranks = tl.arange(0, RANK_COLUMNS)
    if block < tl.cdiv(IN, BLOCK):
        columns = block * BLOCK + tl.arange(0, BLOCK)
        real = columns < IN
        total = _over_tokens(
            x, v, columns, real, tokens, IN, RANKS, RANK_COLUMNS, BLOCK, ROWS, WIDE
        )
        inside = real[:, None] & (ranks < RANKS)[None, :]
        place = ranks[None, :] * IN + columns[:, None]
        tl.store(into + place, total.to(into.dtype.element_ty), mask=inside)
    else:
        columns = (block - tl.cdiv(IN, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
        real = columns < OUT
        total = _over_tokens(
            d, u, columns, real, tokens, OUT, RANKS, RANK_COLUMNS, BLOCK, ROWS, WIDE
        )
        start = tl.load(places + columns, mask=real, other=0)
        first = tl.load(places + OUT + columns, mask=real, other=0)
        last = tl.load(places + 2 * OUT + columns, mask=real, other=0)
        inside = (ranks[None, :] >= first[:, None]) & (ranks[None, :] < last[:, None])
        place = start[:, None] + ranks[None, :]
        tl.store(into + place, total.to(into.dtype.element_ty), mask=inside)


@triton.jit
def gradients(
    x0,
    v0,
    d0,
    u0,
    places0,
    into0,
    x1,
    v1,
    d1,
    u1,
    places1,
    into1,
    x2,
    v2,
    d2,
    u2,
    places2,
    into2,
    x3,
    v3,
    d3,
    u3,
    places3,
    into3,
    tokens,
    IN0: tl.constexpr,
    OUT0: tl.constexpr,
    RANKS0: tl.constexpr,
    COLUMNS0: tl.constexpr,
    IN1: tl.constexpr,
    OUT1: tl.constexpr,
    RANKS1: tl.constexpr,
    COLUMNS1: tl.constexpr,
    IN2: tl.constexpr,
    OUT2: tl.constexpr,
    RANKS2: tl.constexpr,
    COLUMNS2: tl.constexpr,
    IN3: tl.constexpr,
    OUT3: tl.constexpr,
    RANKS3: tl.constexpr,
    COLUMNS3: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write all gradients of four groups' adapters, one after the other.

    Of each group A's, [ranks, in], then each B's, [out, rank].
    """
    block = tl.program_id(0)
    begin1 = tl.cdiv(IN0, BLOCK) + tl.cdiv(OUT0, BLOCK)
    begin2 = begin1 + tl.cdiv(IN1, BLOCK) + tl.cdiv(OUT1, BLOCK)
    begin3 = begin2 + tl.cdiv(IN2, BLOCK) + tl.cdiv(OUT2, BLOCK)
    if block < begin1:
        _gradients(
            block,
            x0,
            v0,
            d0,
            u0,
            places0,
            into0,
            tokens,
            IN0,
            OUT0,
            RANKS0,
            COLUMNS0,
            BLOCK,
            ROWS,
            WIDE,
        )
    elif block < begin2:
        _gradients(
            block - begin1,
            x1,
            v1,
            d1,
            u1,
            places1,
            into1,
            tokens,
            IN1,
            OUT1,
            RANKS1,
            COLUMNS1,
            BLOCK,
            ROWS,
            WIDE,
        )
    elif block < begin3:
        _gradients(
            block - begin2,
            x2,
            v2,
            d2,
            u2,
            places2,
            into2,
            tokens,
            IN2,
            OUT2,
            RANKS2,
            COLUMNS2,
            BLOCK,
            ROWS,
            WIDE,
        )
    else:
        _gradients(
            block - begin3,
            x3,
            v3,
            d3,
            u3,
            places3,
            into3,
            tokens,
            IN3,
            OUT3,
            RANKS3,
            COLUMNS3,
            BLOCK,
            ROWS,
            WIDE,
        )
