"""The place of a layer's gradients: one memory that graphs write, of which each is a view."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount

import torch
from torch import Tensor


class GradientRoom:
    """Memory for the gradients of all parameters of a layer, one after the other.

    Args:
        learns: the parameters, of one type on one device.

    Attributes:
        flat: all of it, [elements].
    """

    def __init__(self, learns: Sequence[Tensor]) -> None:
        self._learns = tuple(learns)
        total = sum(parameter.numel() for parameter in learns)
        self.flat = torch.zeros(total, dtype=learns[0].dtype, device=learns[0].device)
        # Made once: fourteen views take longer than the launches of a layer.
        self._views: list[Tensor] = list(
            torch._C._nn.unflatten_dense_tensors(self.flat, list(learns))
        )
        self._at = self.flat.untyped_storage()._cdata
        self._unused = self._counts()

    @property
    def is_free(self) -> bool:
        """False while anything else holds a gradient or other views of the memory."""
        return self._counts() == self._unused

    def hand_over(self) -> None:
        """Set `.grad` of each parameter to its part."""
        for parameter, gradient in zip(self._learns, self._views, strict=True):
            parameter.grad = gradient

    def _counts(self) -> tuple[int, int]:
        """Return how many tensors share the memory, and how often the views are held."""
        return torch._C._storage_Use_Count(self._at), sum(map(getrefcount, self._views))
