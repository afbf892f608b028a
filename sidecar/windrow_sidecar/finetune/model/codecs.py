"""The weights that codes stand for: each codec in plain torch, on any device.

A codec takes its parts, codes and scales, and writes the weight's numbers into memory of the
caller. It multiplies in fp32 or wider and rounds once, to the type of that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Numbers that are made at a time on a host, where mixed types take copies of what they multiply.
_PIECE = 1 << 20
# The values of E2M1 by their four bits: sign, two of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Columns whose codes AWQ keeps in the eight places of a word, lowest bits first.
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
# Numbers whose scales are gathered at a time, where columns of a group do not lie together.
_GATHERED = 1 << 24

Decode = Callable[[Sequence[Tensor], Tensor, tuple[int, int]], None]
"""Of parts, into [rows, columns], with the rows and columns that share a scale."""


@dataclass(frozen=True, slots=True)
class WeightCodec:
    """Codec by which a weight's numbers are made of its parts.

    Attributes:
        name: of the codec.
        parts: the names of its parts, in the order of `decode`'s.
        decode: writes a matrix.
    """

    name: str
    parts: tuple[str, ...]
    decode: Decode


def _fp8(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    codes, scales = parts
    numbers = codes.view(torch.float8_e4m3fn)
    grid = _numbers(scales)
    for rows in _bands(out, group[0]):
        out[rows].copy_(numbers[rows])
    _scale(out, grid, group)


def _mxfp4(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    codes, scales = parts
    _unpack(codes, out)
    _scale(out, _numbers(scales), group)


def _nvfp4_factor(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    codes, scales, factor = parts
    _unpack(codes, out)
    _scale(out, _wide(scales, out) * _by_row(_wide(factor, out)), group)


def _nvfp4_divisor(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    codes, scales, divisor = parts
    _unpack(codes, out)
    _scale(out, _wide(scales, out) / _by_row(_wide(divisor, out)), group)


def _int8(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    codes, scales = parts
    numbers = codes.view(torch.int8)
    for rows in _bands(out, group[0]):
        out[rows].copy_(numbers[rows])
    _scale(out, _wide(_numbers(scales), out), group)


def _int4(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    """Read compressed-tensors' codes: eight columns a word, the lowest bits first, 8 for zero."""
    codes, scales = parts
    words = codes.view(torch.int32)
    for rows in _bands(out, 1):
        for place in range(8):
            out[rows, place::8] = ((words[rows] >> 4 * place & 0xF) - 8).to(out.dtype)
    _scale(out, _wide(scales, out), group)


def _gptq(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    """Read GPTQ's codes, of a transposed weight; its zeros are stored less one."""
    codes, zeros, scales = parts
    _unpack_gptq(codes, out)
    _each(out, _gptq_zeros(zeros, out), group, Tensor.sub_)
    _scale(out, _wide(scales.t(), out), group)


def _gptq_ordered(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    """Read GPTQ's codes where each column says of which group it is (`desc_act`)."""
    del group
    codes, zeros, scales, order = parts
    _unpack_gptq(codes, out)
    less, grid = _gptq_zeros(zeros, out), _wide(scales.t(), out)
    step = max(1, _GATHERED // out.shape[1])
    for begin in range(0, out.shape[0], step):
        rows = slice(begin, begin + step)
        out[rows].sub_(less[rows][:, order]).mul_(grid[rows][:, order])


def _awq(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    """Read AWQ's codes (GEMM), of a transposed weight: a word has eight rows."""
    codes, zeros, scales = parts
    words = codes.view(torch.int32)
    for rows in _bands(out, 8):
        of = words[:, rows.start // 8 : rows.stop // 8]
        for place, row in enumerate(_AWQ_PLACES):
            out[rows][row::8] = (of >> 4 * place & 0xF).t().to(out.dtype)
    less = torch.empty(out.shape[0], zeros.shape[0], dtype=out.dtype, device=out.device)
    for place, row in enumerate(_AWQ_PLACES):
        less[row::8] = (zeros >> 4 * place & 0xF).t().to(out.dtype)
    _each(out, less, group, Tensor.sub_)
    _scale(out, _wide(scales.t(), out), group)


CODECS = {
    codec.name: codec
    for codec in (
        WeightCodec("fp8", ("codes", "scales"), _fp8),
        WeightCodec("mxfp4", ("codes", "scales"), _mxfp4),
        WeightCodec("nvfp4-factor", ("codes", "scales", "factor"), _nvfp4_factor),
        WeightCodec("nvfp4-divisor", ("codes", "scales", "divisor"), _nvfp4_divisor),
        WeightCodec("int8", ("codes", "scales"), _int8),
        WeightCodec("int4", ("codes", "scales"), _int4),
        WeightCodec("gptq", ("codes", "zeros", "scales"), _gptq),
        WeightCodec("gptq-ordered", ("codes", "zeros", "scales", "order"), _gptq_ordered),
        WeightCodec("awq", ("codes", "zeros", "scales"), _awq),
    )
}


def _numbers(scales: Tensor) -> Tensor:
    """Return scales as fp32: of two dimensions, or of none where there is one for all.

    Bytes are exponents of two (E8M0).
    """
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    wide = scales.to(torch.float32)
    if wide.numel() == 1:
        return wide.reshape(())
    return wide.unsqueeze(1) if wide.dim() == 1 else wide


def _wide(scales: Tensor, out: Tensor) -> Tensor:
    """Return scales in fp32, or in the type of `out` where that is wider."""
    return scales.to(torch.promote_types(torch.float32, out.dtype))


def _by_row(factor: Tensor) -> Tensor:
    """Return a number for the whole weight, or one for each of its rows, to multiply scales by."""
    return factor.reshape(()) if factor.numel() == 1 else factor.reshape(-1, 1)


def _unpack_gptq(codes: Tensor, out: Tensor) -> None:
    """Write codes of four bits, of which a word has eight columns of a row of `out`."""
    words = codes.view(torch.int32)
    for rows in _bands(out, 1):
        for place in range(8):
            out[rows, place::8] = (words[:, rows] >> 4 * place & 0xF).t().to(out.dtype)


def _gptq_zeros(zeros: Tensor, out: Tensor) -> Tensor:
    """Return what is taken off each group's codes, [rows of `out`, groups]."""
    found = torch.empty(out.shape[0], zeros.shape[0], dtype=out.dtype, device=out.device)
    for place in range(8):
        found[place::8] = ((zeros >> 4 * place) + 1 & 0xF).t().to(out.dtype)
    return found


def _unpack(codes: Tensor, out: Tensor) -> None:
    """Write the numbers of E2M1 codes, two a byte, the lower four bits first."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=out.dtype).to(out.device)
    flat = codes.reshape(out.shape[0], out.shape[1] // 2)
    for rows in _bands(out, 1):
        of = flat[rows]
        out[rows, 0::2] = values[(of & 0xF).int()]
        out[rows, 1::2] = values[(of >> 4).int()]


def _scale(out: Tensor, grid: Tensor, group: tuple[int, int]) -> None:
    """Multiply `out` [rows, columns] by a scale for each group, the last of which may be short."""
    _each(out, grid, group, Tensor.mul_)


def _each(
    out: Tensor, grid: Tensor, group: tuple[int, int], change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Change `out` [rows, columns] in place by a number for each group."""
    if grid.dim() == 0:
        for rows in _bands(out, 1):
            change(out[rows], grid.expand(1, 1))  # a bare number would be cast first
        return
    high, wide = group
    whole = out.shape[1] // wide * wide
    for rows in _bands(out, high):
        band = grid[rows.start // high : -(-rows.stop // high)]
        each = band.repeat_interleave(high, 0)[: rows.stop - rows.start] if high > 1 else band
        if whole:
            blocks = out[rows, :whole].view(-1, whole // wide, wide)
            change(blocks, each[:, : whole // wide, None])
        if whole < out.shape[1]:
            change(out[rows, whole:], each[:, whole // wide :])


def _bands(out: Tensor, high: int) -> list[slice]:
    """Return slices of rows, in whole groups of `high`, that are worked on at a time."""
    rows, columns = out.shape
    if out.device.type != "cpu":
        return [slice(0, rows)]
    each = max(1, _PIECE // max(1, columns * high)) * high
    return [slice(begin, min(rows, begin + each)) for begin in range(0, rows, each)]
