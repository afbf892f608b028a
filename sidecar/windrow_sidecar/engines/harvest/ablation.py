"""Harvesting without one of its protections: for tests and benchmarks, which show what each is for.

Nobody harvests a device that serves with one of them off.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Literal

from windrow_sidecar.engines.harvest.compiled import CompiledController
from windrow_sidecar.qos.control import Controller, EngineTraits
from windrow_sidecar.qos.guard import Guard, GuardSettings
from windrow_sidecar.qos.handover import Handover
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.predictor import Predictor, PredictorForm, predictor_of
from windrow_sidecar.qos.view import Offer

Protection = Literal["guard", "predictor", "handover", "reserve"]


class NoGuard(Guard):
    """Lets the worker run whatever was measured."""

    def __init__(self, settings: GuardSettings | None = None) -> None:
        super().__init__(settings)

    def may_run(self, now_ns: int) -> bool:
        """Return True always."""
        del now_ns
        return True

    def observe(
        self, now_ns: int, *, latency_us: float, objective_us: int, harvested: bool
    ) -> None:
        """Take note of nothing."""

    def queued(self, now_ns: int, waited_us: int) -> None:
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


def controller_without(
    without: Set[Protection],
    levels: Partitioning,
    predictor: Predictor | None,
    *,
    pause_epoch: int,
    engine: EngineTraits,
) -> Controller:
    """Return what decides: compiled, or in Python where it decides without a protection."""
    if not without & {"guard", "predictor", "handover"}:
        return CompiledController(levels, predictor, pause_epoch=pause_epoch, engine=engine)
    return Controller(
        levels,
        predictor,
        NoGuard() if "guard" in without else None,
        pause_epoch=pause_epoch,
        handover=NoHandover(levels.units, pause_epoch) if "handover" in without else None,
        engine=engine,
    )


def predictor_without(
    without: Set[Protection],
    levels: Partitioning,
    profile: Mapping[str, Any],
    form: PredictorForm,
) -> Predictor:
    """Return the predictor that a latency profile makes.

    Raises:
        UserError: the profile lacks a share that decode would have beside a worker.
    """
    kind = NoPredictor if "predictor" in without else Predictor
    return predictor_of(levels, profile, kind, form)
