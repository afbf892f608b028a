"""Triton kernels of a packed layer: what is between its products, and the adapter's gradients.

Each adds the adapter's share of the product before it, so that share takes no launch of its own.
`TRITON_INTERPRET=1`, set before this module is imported, runs them on the host, slowly: there they
are compared with torch's operators in float64. Sums are in WIDE: float32, or float64 where the
tensors are.

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

from windrow_sidecar.finetune.adapter.share_kernels import (
    onto_ranks,
    share_of_u,
    share_of_v,
    store_ranks,
)


@triton.jit
def rotate(
    qkv,  # [tokens, (HEADS + VALUE_HEADS) * 2 * HALF], changed in place
    u,
    b,
    cosines,  # [positions, 2 * HALF]; tokens count through them, again and again
    sines,
    tokens,
    positions,
    HEADS: tl.constexpr,  # of queries and keys, which are turned
    VALUE_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the adapter's share to queries, keys and values, and turn the first two."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    head = tl.program_id(1)
    columns = tl.arange(0, HALF_COLUMNS)
    real = columns < HALF
    inside = here[:, None] & real[None, :]
    first_columns = head * 2 * HALF + columns
    second_columns = first_columns + HALF
    row = qkv + at[:, None] * ((HEADS + VALUE_HEADS) * 2 * HALF)
    first = tl.load(row + first_columns[None, :], mask=inside, other=0.0).to(WIDE)
    second = tl.load(row + second_columns[None, :], mask=inside, other=0.0).to(WIDE)
    first += share_of_u(u, b, at, here, first_columns, real, RANKS, RANK_COLUMNS)
    second += share_of_u(u, b, at, here, second_columns, real, RANKS, RANK_COLUMNS)
    if head < HEADS:
        place = (at % positions)[:, None] * (2 * HALF) + columns[None, :]
        cos_first = tl.load(cosines + place, mask=inside, other=0.0).to(WIDE)
        cos_second = tl.load(cosines + place + HALF, mask=inside, other=0.0).to(WIDE)
        sin_first = tl.load(sines + place, mask=inside, other=0.0).to(WIDE)
        sin_second = tl.load(sines + place + HALF, mask=inside, other=0.0).to(WIDE)
        turned = first * cos_first - second * sin_first
        second = second * cos_second + first * sin_second
        first = turned
    tl.store(row + first_columns[None, :], first.to(qkv.dtype.element_ty), mask=inside)
    tl.store(row + second_columns[None, :], second.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def rotate_back(
    d_query,  # [rows, heads, tokens of a row, 2 * HALF] each, by strides
    d_key,
    d_value,
    cosines,
    sines,
    d_qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * 2 * HALF], written
    tokens,
    row_tokens,
    positions,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Undo the turn in gradients of queries and keys, and lay out all three as the product did."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    head = tl.program_id(1)
    columns = tl.arange(0, HALF_COLUMNS)
    inside = here[:, None] & (columns < HALF)[None, :]
    row, token = at // row_tokens, at % row_tokens
    if head < HEADS:
        read = d_query + head * query_head + (row * query_row + token * query_token)[:, None]
    else:
        if head < HEADS + KV_HEADS:
            read = d_key + (head - HEADS) * key_head + (row * key_row + token * key_token)[:, None]
        else:
            of_value = head - HEADS - KV_HEADS
            read = d_value + of_value * value_head
            read = read + (row * value_row + token * value_token)[:, None]
    first = tl.load(read + columns[None, :], mask=inside, other=0.0).to(WIDE)
    second = tl.load(read + HALF + columns[None, :], mask=inside, other=0.0).to(WIDE)
    if head < HEADS + KV_HEADS:
        place = (at % positions)[:, None] * (2 * HALF) + columns[None, :]
        cos_first = tl.load(cosines + place, mask=inside, other=0.0).to(WIDE)
        cos_second = tl.load(cosines + place + HALF, mask=inside, other=0.0).to(WIDE)
        sin_first = tl.load(sines + place, mask=inside, other=0.0).to(WIDE)
        sin_second = tl.load(sines + place + HALF, mask=inside, other=0.0).to(WIDE)
        turned = first * cos_first + second * sin_second
        second = second * cos_second - first * sin_first
        first = turned
    write = d_qkv + at[:, None] * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head * 2 * HALF
    tl.store(write + columns[None, :], first.to(d_qkv.dtype.element_ty), mask=inside)
    tl.store(write + HALF + columns[None, :], second.to(d_qkv.dtype.element_ty), mask=inside)


@triton.jit
def norm_onto_ranks(
    x,  # [tokens, UNITS]
    weight,  # of the norm, [UNITS]
    a,
    normed,  # [tokens, UNITS], written
    rstd,  # [tokens] in WIDE, written
    u,  # [tokens, RANKS], written
    tokens,
    epsilon,
    scale,
    UNITS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Take the RMSNorm, and multiply it by all A matrices."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    squares = tl.zeros([ROWS], WIDE)
    for begin in range(0, UNITS, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = here[:, None] & (columns < UNITS)[None, :]
        place = at[:, None] * UNITS + columns[None, :]
        read = tl.load(x + place, mask=inside, other=0.0).to(WIDE)
        squares += tl.sum(read * read, 1)
    root = 1.0 / tl.sqrt(squares / UNITS + epsilon)
    tl.store(rstd + at, root, mask=here)
    onto = tl.zeros([ROWS, RANK_COLUMNS], WIDE)
    for begin in range(0, UNITS, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        real = columns < UNITS
        inside = here[:, None] & real[None, :]
        place = at[:, None] * UNITS + columns[None, :]
        read = tl.load(x + place, mask=inside, other=0.0).to(WIDE)
        of_unit = tl.load(weight + columns, mask=real, other=0.0).to(WIDE)
        made = (read * root[:, None] * of_unit[None, :]).to(normed.dtype.element_ty)
        tl.store(normed + place, made, mask=inside)
        onto += onto_ranks(made, a, columns, real, UNITS, RANKS, RANK_COLUMNS)
    store_ranks(u, onto, scale, at, here, RANKS, RANK_COLUMNS)


@triton.jit
def add_and_norm(
    product,  # [tokens, UNITS]; the sum of everything is written to it
    residual,  # [tokens, UNITS]
    u,
    b,
    weight,  # of the norm, [UNITS]
    next_a,  # of the group that reads the norm's result
    normed,  # [tokens, UNITS], written
    rstd,  # [tokens] in WIDE, written
    next_u,  # [tokens, NEXT_RANKS], written
    tokens,
    epsilon,
    scale,
    UNITS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    NEXT_RANKS: tl.constexpr,
    NEXT_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum a product, its adapter's share and the residual; norm the sum; multiply that by A."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    squares = tl.zeros([ROWS], WIDE)
    for begin in range(0, UNITS, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        real = columns < UNITS
        inside = here[:, None] & real[None, :]
        place = at[:, None] * UNITS + columns[None, :]
        total = tl.load(product + place, mask=inside, other=0.0).to(WIDE)
        total += tl.load(residual + place, mask=inside, other=0.0).to(WIDE)
        total += share_of_u(u, b, at, here, columns, real, RANKS, RANK_COLUMNS)
        rounded = total.to(product.dtype.element_ty)
        tl.store(product + place, rounded, mask=inside)
        total = tl.where(inside, rounded.to(WIDE), 0.0)
        squares += tl.sum(total * total, 1)
    root = 1.0 / tl.sqrt(squares / UNITS + epsilon)
    tl.store(rstd + at, root, mask=here)
    tl.debug_barrier()  # what other threads of this program have written is read next
    onto = tl.zeros([ROWS, NEXT_COLUMNS], WIDE)
    for begin in range(0, UNITS, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        real = columns < UNITS
        inside = here[:, None] & real[None, :]
        place = at[:, None] * UNITS + columns[None, :]
        total = tl.load(product + place, mask=inside, other=0.0).to(WIDE)
        of_unit = tl.load(weight + columns, mask=real, other=0.0).to(WIDE)
        made = (total * root[:, None] * of_unit[None, :]).to(normed.dtype.element_ty)
        tl.store(normed + place, made, mask=inside)
        onto += onto_ranks(made, next_a, columns, real, UNITS, NEXT_RANKS, NEXT_COLUMNS)
    store_ranks(next_u, onto, scale, at, here, NEXT_RANKS, NEXT_COLUMNS)


@triton.jit
def norm_back(
    d_normed,  # [tokens, UNITS], without the adapter's share
    v,
    a,
    x,  # what the norm read, [tokens, UNITS]
    rstd,  # [tokens]
    weight,  # [UNITS]
    residual,  # [tokens, UNITS], added
    next_b,  # of the group whose output goes into x, [UNITS, NEXT_RANKS]; not read without ranks
    d_x,  # [tokens, UNITS], written
    normed,  # [tokens, UNITS], written: what the norm had made
    next_v,  # [tokens, NEXT_RANKS], written
    tokens,
    scale,
    UNITS: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    NEXT_RANKS: tl.constexpr,
    NEXT_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Go back through an RMSNorm, make again what it made; multiply the gradient by a B."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    root = tl.load(rstd + at, mask=here, other=0.0).to(WIDE)
    along = tl.zeros([ROWS], WIDE)
    for begin in range(0, UNITS, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        real = columns < UNITS
        inside = here[:, None] & real[None, :]
        place = at[:, None] * UNITS + columns[None, :]
        of_unit = tl.load(weight + columns, mask=real, other=0.0).to(WIDE)
        g = tl.load(d_normed + place, mask=inside, other=0.0).to(WIDE)
        g += share_of_v(v, a, at, here, columns, real, UNITS, RANKS, RANK_COLUMNS)
        g *= of_unit[None, :]
        of_root = tl.load(x + place, mask=inside, other=0.0).to(WIDE) * root[:, None]
        along += tl.sum(g * of_root, 1)
        made = of_root * of_unit[None, :]
        tl.store(normed + place, made.to(normed.dtype.element_ty), mask=inside)
    mean = along / UNITS
    onto = tl.zeros([ROWS, NEXT_COLUMNS], WIDE)
    for begin in range(0, UNITS, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        real = columns < UNITS
        inside = here[:, None] & real[None, :]
        place = at[:, None] * UNITS + columns[None, :]
        of_unit = tl.load(weight + columns, mask=real, other=0.0).to(WIDE)
        g = tl.load(d_normed + place, mask=inside, other=0.0).to(WIDE)
        g += share_of_v(v, a, at, here, columns, real, UNITS, RANKS, RANK_COLUMNS)
        g *= of_unit[None, :]
        of_root = tl.load(x + place, mask=inside, other=0.0).to(WIDE) * root[:, None]
        back = root[:, None] * (g - of_root * mean[:, None])
        back += tl.load(residual + place, mask=inside, other=0.0).to(WIDE)
        rounded = back.to(d_x.dtype.element_ty)
        tl.store(d_x + place, rounded, mask=inside)
        if NEXT_RANKS:
            ranks = tl.arange(0, NEXT_COLUMNS)
            right = tl.load(
                next_b + columns[:, None] * NEXT_RANKS + ranks[None, :],
                mask=real[:, None] & (ranks < NEXT_RANKS)[None, :],
                other=0.0,
            )
            onto += tl.dot(rounded, right, input_precision="ieee")
    if NEXT_RANKS:
        store_ranks(next_v, onto, scale, at, here, NEXT_RANKS, NEXT_COLUMNS)


@triton.jit
def swiglu(
    gate_up,  # [tokens, 2 * INNER]; the adapter's share is added to it
    u,
    b,
    acted,  # [tokens, INNER], written
    tokens,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add the adapter's share to gate and up, and take silu(gate) * up."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < INNER
    inside = here[:, None] & real[None, :]
    place = at[:, None] * (2 * INNER) + columns[None, :]
    gate = tl.load(gate_up + place, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up + place + INNER, mask=inside, other=0.0).to(WIDE)
    gate += share_of_u(u, b, at, here, columns, real, RANKS, RANK_COLUMNS)
    up += share_of_u(u, b, at, here, columns + INNER, real, RANKS, RANK_COLUMNS)
    gate_here, up_here = gate.to(gate_up.dtype.element_ty), up.to(gate_up.dtype.element_ty)
    tl.store(gate_up + place, gate_here, mask=inside)
    tl.store(gate_up + place + INNER, up_here, mask=inside)
    # From the rounded ones, as backward will read them.
    gate, up = gate_here.to(WIDE), up_here.to(WIDE)
    made = gate / (1.0 + tl.exp(-gate)) * up
    into = acted + at[:, None] * INNER + columns[None, :]
    tl.store(into, made.to(acted.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_back(
    d_acted,  # [tokens, INNER], without the adapter's share; what was acted is written to it
    v,
    a,
    gate_up,  # [tokens, 2 * INNER]
    d_gate_up,  # [tokens, 2 * INNER], written
    tokens,
    INNER: tl.constexpr,
    RANKS: tl.constexpr,
    RANK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Go back through silu(gate) * up, and make that again, in the memory of its gradient."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < tokens
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < INNER
    inside = here[:, None] & real[None, :]
    of_acted = d_acted + at[:, None] * INNER + columns[None, :]
    d = tl.load(of_acted, mask=inside, other=0.0).to(WIDE)
    d += share_of_v(v, a, at, here, columns, real, INNER, RANKS, RANK_COLUMNS)
    place = at[:, None] * (2 * INNER) + columns[None, :]
    gate = tl.load(gate_up + place, mask=inside, other=0.0).to(WIDE)
    up = tl.load(gate_up + place + INNER, mask=inside, other=0.0).to(WIDE)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    swished = gate * sigmoid
    tl.store(of_acted, (swished * up).to(d_acted.dtype.element_ty), mask=inside)
    d_gate = d * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(d_gate_up + place, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    d_up = d * swished
    tl.store(d_gate_up + place + INNER, d_up.to(d_gate_up.dtype.element_ty), mask=inside)
