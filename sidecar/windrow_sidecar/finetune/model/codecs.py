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
_E8M0_BIAS = 127

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
    _scale(out, _wide(scales, out) * _wide(factor, out).reshape(()), group)


def _nvfp4_divisor(parts: Sequence[Tensor], out: Tensor, group: tuple[int, int]) -> None:
    codes, scales, divisor = parts
    _unpack(codes, out)
    _scale(out, _wide(scales, out) / _wide(divisor, out).reshape(()), group)


CODECS = {
    codec.name: codec
    for codec in (
        WeightCodec("fp8", ("codes", "scales"), _fp8),
        WeightCodec("mxfp4", ("codes", "scales"), _mxfp4),
        WeightCodec("nvfp4-factor", ("codes", "scales", "factor"), _nvfp4_factor),
        WeightCodec("nvfp4-divisor", ("codes", "scales", "divisor"), _nvfp4_divisor),
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
    if grid.dim() == 0:
        for rows in _bands(out, 1):
            out[rows].mul_(grid.expand(1, 1))  # of a dimension: a bare number would be cast first
        return
    high, wide = group
    whole = out.shape[1] // wide * wide
    for rows in _bands(out, high):
        band = grid[rows.start // high : -(-rows.stop // high)]
        each = band.repeat_interleave(high, 0)[: rows.stop - rows.start] if high > 1 else band
        if whole:
            blocks = out[rows, :whole].view(-1, whole // wide, wide)
            blocks.mul_(each[:, : whole // wide, None])
        if whole < out.shape[1]:
            out[rows, whole:].mul_(each[:, whole // wide :])


def _bands(out: Tensor, high: int) -> list[slice]:
    """Return slices of rows, in whole groups of `high`, that are worked on at a time."""
    rows, columns = out.shape
    if out.device.type != "cpu":
        return [slice(0, rows)]
    each = max(1, _PIECE // max(1, columns * high)) * high
    return [slice(begin, min(rows, begin + each)) for begin in range(0, rows, each)]
