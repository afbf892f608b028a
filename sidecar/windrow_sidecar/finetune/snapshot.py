"""What a checkpoint is written from: tensors as they are now, copied only before they change."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor


class Snapshot:
    """Tensors of one moment.

    A thread copies them while training goes on; whoever is about to change them calls `take`
    before, which copies what is left. Between two optimizer steps nothing changes, so that a step
    waits for the copy only where it is shorter than that.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = list(tensors.items())
        self._copied: dict[str, Tensor] = {}
        self._one_at_a_time = threading.Lock()

    def take(self) -> dict[str, Tensor]:
        """Return the copies, on the host; afterwards the tensors may change."""
        while True:
            with self._one_at_a_time:
                if not self._left:
                    return self._copied
                name, tensor = self._left.pop()
                self._copied[name] = tensor.detach().to("cpu", copy=True).contiguous()
