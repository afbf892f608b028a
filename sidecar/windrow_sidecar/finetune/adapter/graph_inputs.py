"""The arguments of layers that graphs read: which tensors they are, and where they stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from windrow_sidecar.finetune.model.layer_calls import LayerCall


def numbered(calls: Sequence[LayerCall]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return each layer's arguments with numbers for tensors, and the tensors, [...], each once."""
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []

    def number(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in numbers:
            numbers[id(leaf)] = len(tensors)
            tensors.append(leaf)
        return Static(numbers[id(leaf)], tuple(leaf.shape), leaf.dtype)

    like = tuple(pytree.tree_map(number, (call.args, call.kwargs)) for call in calls)
    return like, tensors


@dataclass(frozen=True, slots=True)
class Static:
    """The place of a tensor among those that graphs read."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def call_of(like: Any, statics: Sequence[Tensor]) -> LayerCall:  # noqa: ANN401
    """Return a layer's arguments with these tensors, [...] each, in place of their numbers."""

    def found(leaf: Any) -> Any:  # noqa: ANN401
        return statics[leaf.number] if isinstance(leaf, Static) else leaf

    args, kwargs = pytree.tree_map(found, like)
    return LayerCall(args, kwargs)
