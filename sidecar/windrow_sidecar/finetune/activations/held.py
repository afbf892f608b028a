"""What autograd keeps of forwards that really run, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Held:
    """Counts the memory of saved tensors, that of a module's parameters left out.

    Args:
        module: what runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self._n_bytes = self._tokens = 0

    @contextmanager
    def watching(self, tokens: int) -> Iterator[None]:
        """Count what is saved inside, each tensor once; `tokens`: times layers that run there."""
        known = set(self._parameters)

        def note(tensor: Tensor) -> Tensor:
            at = tensor.untyped_storage().data_ptr()
            if at not in known:
                known.add(at)
                self._n_bytes += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            yield
        self._tokens += tokens

    @property
    def per_token(self) -> float:
        """Bytes for each token of each layer."""
        return self._n_bytes / max(1, self._tokens)
