"""The engine's kernels for a GPU: paged decode attention, rotation with storing, the gated product.

Written for few launches and for one pass over K and V. `TRITON_INTERPRET=1`, set before this module
is imported, runs them on the host, slowly: so they are tested where there is no GPU.
"""

# Triton compiles these functions: annotations are types of its own, and no checker knows them.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_split(
    q,  # [b, heads, head_dim], scaled
    keys,  # first slot of the layer's K
    values,
    lengths,  # [b]
    table,  # [b, columns]: rows of pages
    partial,  # [b, heads, splits, head_dim] fp32: attention over the split alone
    weight,  # [b, heads, splits] fp32: log2 of the sum of its exponentials
    q_batch_stride,
    q_head_stride,
    slot_stride,
    length_stride,
    table_stride,
    splits,
    GROUP: tl.constexpr,  # query heads that share a KV head
    GROUP_ROWS: tl.constexpr,  # the same, padded to what a matrix product needs
    HEAD: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens at a time
):
    """One part of one request's context, for the query heads of one KV head.

    A context is cut into `splits` parts of whole blocks, so that a small batch fills the device; a
    part without tokens weighs nothing.
    """
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request * length_stride).to(tl.int32)
    part = tl.cdiv(tl.cdiv(length, BLOCK), splits) * BLOCK
    begin = split * part
    end = tl.minimum(begin + part, length)

    rows, columns = tl.arange(0, GROUP_ROWS), tl.arange(0, HEAD_COLUMNS)
    real_rows, real_columns = rows < GROUP, columns < HEAD
    inside = real_rows[:, None] & real_columns[None, :]
    heads = head * GROUP + rows
    query = tl.load(
        q + request * q_batch_stride + heads[:, None] * q_head_stride + columns[None, :],
        mask=inside,
        other=0.0,
    )
    most = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    attended = tl.zeros([GROUP_ROWS, HEAD_COLUMNS], tl.float32)
    for first in range(begin, end, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        here = tokens < end
        row = tl.load(table + request * table_stride + tokens // PAGE, mask=here, other=0)
        # 64 bits: an arena has more elements than 32 can count.
        at = (row.to(tl.int64) * PAGE + tokens % PAGE) * slot_stride + head * HEAD
        key = tl.load(
            keys + at[None, :] + columns[:, None],
            mask=here[None, :] & real_columns[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * _LOG2E
        scores = tl.where(here[None, :], scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp2(most - new_most)
        odds = tl.exp2(scores - new_most[:, None])
        value = tl.load(
            values + at[:, None] + columns[None, :],
            mask=here[:, None] & real_columns[None, :],
            other=0.0,
        )
        attended = attended * shrink[:, None]
        attended += tl.dot(odds.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(odds, 1)
        most = new_most
    nothing = begin >= end
    divisor = tl.where(nothing, 1.0, total)
    place = (request * tl.num_programs(1) * GROUP + heads) * splits + split
    tl.store(
        partial + place[:, None] * HEAD + columns[None, :],
        attended / divisor[:, None],
        mask=inside,
    )
    tl.store(
        weight + place, tl.where(nothing, float("-inf"), most + tl.log2(divisor)), mask=real_rows
    )


@triton.jit
def join_splits(
    partial,  # as attend_split leaves it
    weight,
    out,  # [b, heads, head_dim]
    splits,
    SPLITS: tl.constexpr,  # padded to a power of two
    HEAD: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
):
    """Weigh the parts of one query head against each other."""
    head = tl.program_id(0)
    parts, columns = tl.arange(0, SPLITS), tl.arange(0, HEAD_COLUMNS)
    weights = tl.load(weight + head * splits + parts, mask=parts < splits, other=float("-inf"))
    odds = tl.exp2(weights - tl.max(weights, 0))
    found = tl.load(
        partial + (head * splits + parts)[:, None] * HEAD + columns[None, :],
        mask=(parts < splits)[:, None] & (columns < HEAD)[None, :],
        other=0.0,
    )
    joined = tl.sum(found * odds[:, None], 0) / tl.sum(odds, 0)
    tl.store(out + head * HEAD + columns, joined.to(out.dtype.element_ty), mask=columns < HEAD)


@triton.jit
def rotate_and_store(
    qkv,  # [n, heads + 2 kv_heads, head_dim]
    cosines,  # [max_positions, head_dim / 2] fp32
    sines,
    positions,  # [n]
    slots,  # [n]
    q,  # [n, heads, head_dim]: rotated and scaled
    keys,  # first slot of the layer's K: rotated
    values,  # as they are
    qkv_stride,
    position_stride,
    slot_of_stride,
    slot_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_COLUMNS: tl.constexpr,
):
    """One head of one token: q to its buffer, K and V to their slot."""
    token, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, HALF_COLUMNS)
    real = columns < HALF
    source = qkv + token * qkv_stride + head * 2 * HALF + columns
    low = tl.load(source, mask=real, other=0.0)
    high = tl.load(source + HALF, mask=real, other=0.0)
    position = tl.load(positions + token * position_stride)
    cos = tl.load(cosines + position * HALF + columns, mask=real, other=0.0)
    sin = tl.load(sines + position * HALF + columns, mask=real, other=0.0)
    turned_low = low.to(tl.float32) * cos - high.to(tl.float32) * sin
    turned_high = high.to(tl.float32) * cos + low.to(tl.float32) * sin
    slot = tl.load(slots + token * slot_of_stride).to(tl.int64) * slot_stride
    if head < HEADS:
        to = q + (token * HEADS + head) * 2 * HALF + columns
        tl.store(to, (turned_low * scale).to(q.dtype.element_ty), mask=real)
        tl.store(to + HALF, (turned_high * scale).to(q.dtype.element_ty), mask=real)
    elif head < HEADS + KV_HEADS:
        to = keys + slot + (head - HEADS) * 2 * HALF + columns
        tl.store(to, turned_low.to(keys.dtype.element_ty), mask=real)
        tl.store(to + HALF, turned_high.to(keys.dtype.element_ty), mask=real)
    else:
        to = values + slot + (head - HEADS - KV_HEADS) * 2 * HALF + columns
        tl.store(to, low, mask=real)
        tl.store(to + HALF, high, mask=real)


@triton.jit
def gate(gate_up, out, inner, BLOCK: tl.constexpr):
    """silu(gate) * up of one row: [2 * inner] to [inner]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < inner
    source = gate_up + row * 2 * inner + columns
    opened = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=real, other=0.0).to(tl.float32)
    product = opened * tl.sigmoid(opened) * up
    tl.store(out + row * inner + columns, product.to(out.dtype.element_ty), mask=real)
