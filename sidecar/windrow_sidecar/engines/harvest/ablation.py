"""Harvesting without one of its protections: for tests and benchmarks, which show what each is for.

Nobody harvests a device that serves with one of them off.
"""

from __future__ import annotations

from typing import Literal

from windrow_sidecar.qos.guard import Guard, GuardSettings
from windrow_sidecar.qos.handover import Handover
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.view import Offer

Protection = Literal["guard", "predictor", "handover", "reserve"]


class NoGuard(Guard):
    """Lets the worker run whatever was measured."""

    def __init__(self, settings: GuardSettings | None = None) -> None:
        super().__init__(settings)

    def may_run(self, now_ns: int) -> bool:
        """Always."""
        del now_ns
        return True

    def observe(
        self, now_ns: int, *, latency_us: float, objective_us: int, harvested: bool
    ) -> None:
        """Take note of nothing."""


class NoPredictor(Predictor):
    """Expects every step to take no time at all, and learns nothing."""

    def predict(
        self, batch: int, context_tokens: int, phase: int = 0
    ) -> tuple[list[float], list[float]]:
        """Return a microsecond for every split, with a worker and without."""
        none = [1.0] * len(super().predict(batch, context_tokens, phase)[0])
        return none, none

    def observe(
        self,
        split: int,
        *,
        batch: int,
        context_tokens: int,
        latency_us: float,
        objective_us: float = 0.0,
        phase: int = 0,
    ) -> float:
        """Return no residual; nothing moves."""
        return 0.0

    @property
    def least_step_us(self) -> float:
        """No time at all."""
        return 0.0


class NoHandover(Handover):
    """Gives decode its units back at once, whatever the worker still runs on them."""

    def _is_quiet(self, action: int, offer: Offer) -> bool:
        return True
