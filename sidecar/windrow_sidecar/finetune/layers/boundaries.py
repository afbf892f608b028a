"""Where the activations between two layers live until backward has used them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Boundaries(Protocol):
    """Memory for boundary activations."""

    def expect(self, micro_batches: int, tokens: int) -> None:
        """The next group begins: so many micro-batches, of at most so many padded tokens each."""

    def place(self, hidden: Tensor) -> Tensor:
        """Return a tensor outside of any graph with the values of `hidden`."""

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return memory of `like`'s type that is filled window by window."""

    def clear(self) -> None:
        """Forget everything that was placed."""


class TorchBoundaries:
    """Boundaries in torch's own memory; what is whole is not copied."""

    def expect(self, micro_batches: int, tokens: int) -> None:
        """Nothing is laid out ahead."""
        del micro_batches, tokens

    def place(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, detached."""
        return hidden.detach()

    def room(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return new memory."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def clear(self) -> None:
        """Nothing is kept here."""
