"""Model how much a worker stretches a decode step: stage 2 of the predictor (Harli, Eq. 3).

t1 = (b1 * s_inf + k1 * s_ft) * t0(s_inf), with shares of the units s_inf and s_ft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from windrow_sidecar.qos.solo import SoloSample, SoloStepModel

# The prior counts as much as one point: with a single level only b1 * s_inf + k1 * s_ft can be
# seen, and the prior decides about the rest.
_PRIOR_WEIGHT = 1.0


@dataclass(frozen=True, slots=True)
class CoRunFactors:
    """Stage 2. The prior: complementary halves cost 5%, overlapping ones what they take."""

    b1: float = 1.05
    k1: float = 1.05

    def factor(self, s_inf: float, s_ft: float) -> float:
        """Return by how much the worker stretches a step; never below 1."""
        return max(1.0, self.b1 * s_inf + self.k1 * s_ft)


@dataclass(frozen=True, slots=True)
class CoRunSample:
    """One measured decode step with a load beside it."""

    step: SoloSample
    finetune_units: int
    tokens_per_second: float  # that the load computed meanwhile


def fit_co_run(
    samples: Sequence[CoRunSample], solo: Mapping[int, SoloStepModel], units: int
) -> tuple[CoRunFactors, float]:
    """Least squares of the stretch; returns the factors and their median error in percent.

    `solo`: stage 1 by decode's units. `units`: of the device.
    """
    rows = []
    for sample in samples:
        step = sample.step
        alone_us = solo[step.units].predict_us(step.batch, step.context_tokens)
        rows.append((step.units / units, sample.finetune_units / units, step.step_us / alone_us))
    prior = CoRunFactors()
    a00 = a11 = _PRIOR_WEIGHT
    a01 = y0 = y1 = 0.0
    for s_inf, s_ft, stretch in rows:
        beyond = stretch - (prior.b1 * s_inf + prior.k1 * s_ft)
        a00 += s_inf * s_inf
        a01 += s_inf * s_ft
        a11 += s_ft * s_ft
        y0 += s_inf * beyond
        y1 += s_ft * beyond
    det = a00 * a11 - a01 * a01
    b1 = prior.b1 + (a11 * y0 - a01 * y1) / det
    k1 = prior.k1 + (a00 * y1 - a01 * y0) / det
    factors = CoRunFactors(b1, k1)
    errors = [abs(factors.factor(s, f) - stretch) / stretch for s, f, stretch in rows]
    return factors, 100 * median(errors)


def co_run_model(profile: Mapping[str, Any]) -> CoRunFactors:
    """Stage 2 of a latency profile; the prior where none was measured."""
    co_run = profile.get("coRun")
    if not co_run or not co_run.get("samples"):
        return CoRunFactors()
    return CoRunFactors(float(co_run["b1"]), float(co_run["k1"]))
