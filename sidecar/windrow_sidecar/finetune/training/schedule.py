"""Which learning rate a step has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up from zero, then constant, linear to zero, or half a cosine to zero.

    Step for step the values of transformers' `get_scheduler`: its first step has rate 0 where there
    is a warm-up.
    """

    kind: Literal["cosine", "linear", "constant"]
    peak: float
    total_steps: int
    warmup_ratio: float

    @property
    def warmup_steps(self) -> int:
        """Steps before the peak."""
        return math.ceil(self.total_steps * self.warmup_ratio)

    def rate(self, step: int) -> float:
        """Return the rate of step `step` (the first is 0)."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.kind == "linear":
            return self.peak * max(0.0, 1.0 - done)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * done))
