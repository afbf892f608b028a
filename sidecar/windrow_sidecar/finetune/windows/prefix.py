"""Keys and values that a prefix adapter puts before the first token of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a prefix adapter made for one micro-batch.

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
