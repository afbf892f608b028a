"""One decode step for a batch of requests, however it is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from windrow_sidecar.engines.builtin.scheduler import EngineRequest


class Decoder(Protocol):
    """Appends a token to each request of a batch. One thread, under `torch.inference_mode`."""

    def step(self, batch: Sequence[EngineRequest]) -> list[int]:
        """Return the next token of each request, by its temperature, top_p and seed.

        Each has a page for the slot at its `kv.n_tokens`, which grows by one.
        """
        ...

    def logits(self, batch: Sequence[EngineRequest]) -> torch.Tensor:
        """The same step; returns [b, vocab] of what follows instead of choosing from it."""
        ...
