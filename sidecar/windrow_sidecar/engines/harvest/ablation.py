"""Harvesting without one of its protections: for tests and benchmarks, which show what each is for.

Nobody harvests a device that serves with one of them off.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Literal

from windrow_sidecar.qos.control import Controller, EngineTraits
from windrow_sidecar.qos.guard import Guard
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.predictor import Predictor, PredictorForm, predictor_of

Protection = Literal["guard", "predictor", "handover", "reserve"]


def controller_without(
    without: Set[Protection],
    levels: Partitioning,
    predictor: Predictor | None,
    *,
    pause_epoch: int,
    engine: EngineTraits,
) -> Controller:
    """Return what decides, without a guard or a handover where they are off."""
    return Controller(
        levels,
        predictor,
        Guard(watches="guard" not in without),
        pause_epoch=pause_epoch,
        handover="handover" not in without,
        engine=engine,
    )


def predictor_without(
    without: Set[Protection],
    levels: Partitioning,
    profile: Mapping[str, Any],
    form: PredictorForm,
) -> Predictor:
    """Return the predictor that a latency profile makes; where it is off, a blind one.

    Raises:
        UserError: the profile lacks a share that decode would have beside a worker.
    """
    return predictor_of(levels, profile, form, blind="predictor" in without)
