"""Dropout whose mask depends on the token only, however a step is cut into tasklets.

A unit's fate is a hash of (seed, step, row, token, module, unit), so nothing is kept for backward:
the mask is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from windrow_sidecar.compute.queued import to_device
from windrow_sidecar.finetune.tasklets import PackedLines, TokenWindow

# Odd constants of SplitMix64 (Steele, Lea, Flood 2014) and its finaliser, as signed 64-bit numbers.
_STEP = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
_RESOLUTION = 31


class DropoutKeys:
    """The position of the running tasklet, from which a model's dropouts draw their masks."""

    def __init__(self) -> None:
        self._at: tuple[int, int, tuple[int, ...], TokenWindow, PackedLines | None] | None = None
        self._tokens: Tensor | None = None
        self._chosen: Tensor | None = None

    def at(
        self,
        seed: int,
        step: int,
        rows: Sequence[int],
        window: TokenWindow,
        packed: PackedLines | None = None,
    ) -> None:
        """Say which tokens of which rows run next; `packed`: where they stand in lines.

        Note the tokens: each drops the same units wherever its row is.
        """
        at = (seed, step, tuple(rows), window, packed)
        if at != self._at:
            self._at, self._tokens = at, None

    @contextmanager
    def only(self, chosen: Tensor) -> Iterator[None]:
        """Let some of those tokens run alone: `chosen`, int64 [tokens], count in lines x tokens."""
        self._chosen = chosen
        try:
            yield
        finally:
            self._chosen = None

    @contextmanager
    def known(self, tokens: Tensor) -> Iterator[None]:
        """Have `tokens` return those inside: [lines, tokens], int64."""
        before, self._tokens = self._tokens, tokens
        try:
            yield
        finally:
            self._tokens = before

    def tokens(self, device: torch.device) -> Tensor:
        """Return a key for each token that runs: [lines, tokens], int64; or [tokens chosen]."""
        if self._at is None:
            raise ValueError("dropout runs outside of a tasklet")
        if self._tokens is None:
            seed, step, rows, window, packed = self._at
            base = _mixed(torch.tensor([seed, step], dtype=torch.int64))
            row = torch.tensor(rows, dtype=torch.int64)[:, None]
            position = torch.arange(window.begin, window.end, dtype=torch.int64)[None, :]
            if packed is not None:
                part = (slice(None), slice(window.begin, window.end))
                row_of, position = (tensor[part] for tensor in places(packed))
                row = torch.tensor((*rows, 0), dtype=torch.int64)[row_of]  # the last: padding
            row, position = _mixed(row * _STEP + base[0]), _mixed(position * _STEP + base[1])
            self._tokens = to_device(_mixed(row ^ position), device)
        return self._tokens if self._chosen is None else self._tokens.flatten()[self._chosen]


def places(lines: PackedLines) -> tuple[Tensor, Tensor]:
    """Return of which row each token of packed rows is, and at which position of it.

    Both int64 [lines, width] on the host. Rows count from 0 in the order of the lines; padding has
    the number behind the last row, and position 0.
    """
    rows = sum(map(len, lines.lengths))
    row_of = torch.full((len(lines.lengths), lines.width), rows, dtype=torch.int64)
    positions = torch.zeros_like(row_of)
    row = 0
    for line, lengths in enumerate(lines.lengths):
        end = 0
        for length in lengths:
            begin, end = end, end + length
            row_of[line, begin:end] = row
            positions[line, begin:end] = torch.arange(length)
            row += 1
    return row_of, positions


class TokenDropout(nn.Module):
    """Replaces `nn.Dropout` in an adapter; its mask depends on seed, step, module and token.

    Args:
        p: share of the units that is dropped.
        keys: says which tokens run.
        index: of this module among those of the model.

    Attributes:
        first_unit: of `x` in what is dropped on one device, where ranks have a part of it each.
    """

    first_unit = 0

    def __init__(self, p: float, keys: DropoutKeys, index: int) -> None:
        super().__init__()
        self.p, self._keys = p, keys
        self.index: Tensor
        # A tensor of the layer's own: what it computes is then the same in every layer.
        self.register_buffer("index", torch.tensor(index), persistent=False)

    def prepare(self, device: torch.device) -> None:
        """Work out now whatever `forward` would remember."""
        if self.training:
            self._keys.tokens(device)

    def pretend(self, tokens: int) -> None:
        """Let `forward` run outside of a tasklet, on one row of so many tokens."""
        self.train()
        self._keys.at(0, 0, (0,), TokenWindow(0, tokens))

    def forward(self, x: Tensor) -> Tensor:
        """Drop units of `x`: [rows, tokens, units], or the same with rows and tokens as one.

        Raises:
            ValueError: `x` holds other tokens than those that run (a module of an expert).
        """
        if not self.training:
            return x
        keys = self._keys.tokens(x.device).reshape(*([-1] if x.dim() == 2 else x.shape[:-1]), 1)
        if keys.numel() != x.shape[:-1].numel():
            raise ValueError(f"{tuple(x.shape)} is not an activation of {keys.numel()} tokens")
        dropped: Tensor = _Dropped.apply(x, keys, self.index, self.p, self.first_unit)
        return dropped


def masked(x: Tensor, keys: Tensor, index: int, p: float) -> Tensor:
    """Return x * mask / (1 - p) without a gradient; x: [rows, tokens, units].

    Args:
        x: what is masked.
        keys: of its tokens, [rows, tokens].
        index: of what drops; below 0 it is no adapter's.
        p: share of the units that is dropped.
    """
    return x * _mask(keys[..., None], x.shape[-1], index, p, x.dtype)


class _Dropped(torch.autograd.Function):
    """x * mask / (1 - p)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        keys: Tensor,
        index: Tensor,
        p: float,
        first: int,
    ) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.index, ctx.p, ctx.first = index, p, first
        return x * _mask(keys, x.shape[-1], index, p, x.dtype, first)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (keys,) = ctx.saved_tensors
        mask = _mask(keys, gradient.shape[-1], ctx.index, ctx.p, gradient.dtype, ctx.first)
        return gradient * mask, None, None, None, None


def _mask(
    keys: Tensor, units: int, index: Tensor | int, p: float, dtype: torch.dtype, first: int = 0
) -> Tensor:
    """Return 0 or 1 / (1 - p) for each token and unit, from unit `first` on: [..., units]."""
    unit = torch.arange(first, first + units, dtype=torch.int64, device=keys.device) * _STEP + index
    # One round over the product: both factors are mixed already.
    drawn = (keys ^ _mixed(unit)) * _MIX_1
    drawn ^= drawn >> 32
    drawn = (drawn * _MIX_2) >> (64 - _RESOLUTION)
    kept = drawn >= round((p - 0.5) * (1 << _RESOLUTION))
    return kept.to(dtype) * (1.0 / (1.0 - p))


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of 64-bit counters (SplitMix64's finaliser)."""
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)
