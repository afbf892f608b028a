"""Keys and values of one layer for token windows and prefixes, with their gradient sums.

Sums are in fp32, from the last window to the first. A window's own slice is complete when its
backward begins, because only tokens to its right look at it (FlexLLM, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windrow_sidecar.finetune.tasklets import TokenWindow

SUMS = torch.float32


class KeyValues:
    """Keys and values of one layer of one micro-batch, and the sums of their gradients.

    Args:
        width: tokens of a row.
        prefix: keys and values ahead of the first token, [rows, kv_heads, prefix, head];
            they are leaves and collect their gradient. None: nothing does.
    """

    def __init__(self, width: int, prefix: tuple[Tensor, Tensor] | None = None) -> None:
        self.prefix = prefix
        self.before = prefix[0].shape[2] if prefix else 0
        self._width = width
        self._cache: tuple[Tensor, Tensor] | None = None
        self._sums: tuple[Tensor, Tensor] | None = None

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """Bytes a token of the cache, and of the sums once there are any: of the whole width."""
        assert self._cache is not None
        places = self._cache[0].shape[0] * self._cache[0].shape[2]
        elements = sum(cache.numel() for cache in self._cache) // places
        return sum(cache.nbytes for cache in self._cache) // places, elements * SUMS.itemsize

    def append(self, key: Tensor, value: Tensor, window: TokenWindow) -> None:
        """Remember keys and values of a window: [rows, kv_heads, tokens, head] each."""
        if self._cache is None:
            ahead = self.prefix or (None, None)
            self._cache = self._room(key, ahead[0]), self._room(value, ahead[1])
        begin = self.before + window.begin
        for cache, fresh in zip(self._cache, (key, value), strict=True):
            cache.narrow(2, begin, window.tokens).copy_(fresh.detach())

    def upto(self, window: TokenWindow) -> tuple[Tensor, Tensor]:
        """Return keys and values from the prefix to the end of a window.

        [rows, kv_heads, prefix + tokens, head] each: views of the cache, outside of any graph.
        """
        assert self._cache is not None
        length = self.before + window.end
        return self._cache[0].narrow(2, 0, length), self._cache[1].narrow(2, 0, length)

    def settle(
        self, d_key: Tensor, d_value: Tensor, window: TokenWindow
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """Add what one window makes of `upto(window)`; return what is complete with it.

        Args:
            d_key: gradient of `upto(window)`'s keys, [rows, kv_heads, prefix + tokens, head].
            d_value: of its values, in the same shape.
            window: which one; the last one of a row comes first.

        Returns:
            gradients of the window's own keys and values, from it and all windows to its right; and
            this window's share of the prefix's, where there is one.
        """
        if self._sums is None:
            self._sums = _zeros(d_key, self._width), _zeros(d_value, self._width)
        own, before = [], []
        for total, fresh in zip(self._sums, (d_key, d_value), strict=True):
            total.narrow(2, 0, window.end).add_(fresh.narrow(2, self.before, window.end))
            own.append(total.narrow(2, window.begin, window.tokens).to(fresh.dtype))
            before.append(fresh.narrow(2, 0, self.before))
        return (own[0], own[1]), ((before[0], before[1]) if self.prefix else None)

    def _room(self, like: Tensor, prefix: Tensor | None) -> Tensor:
        rows, heads, _, size = like.shape
        room = like.new_empty(rows, heads, self.before + self._width, size)
        if prefix is not None:
            room.narrow(2, 0, self.before).copy_(prefix.detach())
        return room


def _zeros(like: Tensor, width: int) -> Tensor:
    rows, heads, _, size = like.shape
    return torch.zeros(rows, heads, width, size, dtype=SUMS, device=like.device)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The keys and values that a prefix adapter made for one micro-batch.

    Attributes:
        past: the cache of transformers in which it made them.
        made: keys and values of each layer, [rows, kv_heads, prefix, head], with their graph.
        leaves: the same values, cut off: the layers' backwards collect gradients in them.
    """

    past: Any
    made: tuple[tuple[Tensor, Tensor], ...]
    leaves: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, past: Any) -> Prefix:  # noqa: ANN401
        """Take over what peft made, as a cache of transformers."""
        made = tuple((layer.keys, layer.values) for layer in past.layers)
        leaves = tuple((k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in made)
        return cls(past, made, leaves)

    @property
    def tokens(self) -> int:
        """Virtual tokens."""
        return self.made[0][0].shape[2]

    def backward(self) -> None:
        """Hand the gradients that all layers have collected to the adapter."""
        made = [t for layer in self.made for t in layer]
        gradients = [t.grad for layer in self.leaves for t in layer]
        torch.autograd.backward(made, gradients)
