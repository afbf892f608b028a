"""Predict a decode step without a worker, by units: stage 1 of the predictor.

t0 = c0 + b0 * max(b, 4) + k0 * X, with batch b and context tokens X of the batch (Harli, Eq. 2,
with X for b * seqlen, so that batches of mixed lengths fit too).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from windrow.errors import UserError
from windrow_sidecar.qos.policies import FIGURES

# Below four requests a step costs as much as with four: reading the weights dominates.
BATCH_FLOOR = int(FIGURES["batch_floor"])
# Relative error from which a sample counts less: five times what a quiet machine shows.
_HUBER_AT = 0.10
_REWEIGHTINGS = 8


@dataclass(frozen=True, slots=True)
class SoloSample:
    """One measured decode step without a worker beside it."""

    units: int
    batch: int
    context_tokens: int
    step_us: float


@dataclass(frozen=True, slots=True)
class SoloStepModel:
    """Coefficients for one number of units; none is negative."""

    c0_us: float
    b0_us: float
    k0_us: float  # per context token

    def predict_us(self, batch: int, context_tokens: int) -> float:
        """The step's latency, alone."""
        return self.c0_us + self.b0_us * max(batch, BATCH_FLOOR) + self.k0_us * context_tokens


@dataclass(frozen=True, slots=True)
class SoloFit:
    """A model and how well it fits what it was made from."""

    model: SoloStepModel
    median_abs_error_percent: float
    samples: int


def fit_solo(samples: Iterable[SoloSample]) -> dict[int, SoloFit]:
    """Fit one model for each number of units that occurs.

    Least squares of the relative error (a step of 2 ms counts as much as one of 20), reweighted
    after Huber so that a step which the machine disturbed does not bend the line, with the best of
    all subsets of coefficients that are not negative.

    Raises:
        UserError: no sample at all, or a latency that is not positive.
    """
    by_units: dict[int, list[SoloSample]] = defaultdict(list)
    for sample in samples:
        if not sample.step_us > 0:
            raise UserError(
                f"a step of {sample.step_us} us", field="samples", remedy="Latencies are positive."
            )
        by_units[sample.units].append(sample)
    if not by_units:
        raise UserError(
            "no samples to fit", field="samples", remedy="Profile at least one level of units."
        )
    return {units: _fit_level(level) for units, level in sorted(by_units.items())}


def solo_models(profile: Mapping[str, Any]) -> dict[int, SoloStepModel]:
    """The models of a latency profile (`LatencyProfileSpec` as a mapping, camelCase), by units."""
    return {
        int(row["units"]): SoloStepModel(
            float(row["c0Us"]), float(row["b0Us"]), float(row["k0NsPerToken"]) / 1e3
        )
        for row in profile["solo"]
    }


def profiled_range(profile: Mapping[str, Any]) -> tuple[int, int] | None:
    """The largest batch and the most context tokens that were measured; None: it does not say."""
    if profile.get("roofline"):
        return 0, 0
    rows = profile.get("samples") or []
    if not rows:
        return None
    return max(int(r["batch"]) for r in rows), max(int(r["contextTokens"]) for r in rows)


def _fit_level(level: Sequence[SoloSample]) -> SoloFit:
    rows = [(1.0, float(max(s.batch, BATCH_FLOOR)), float(s.context_tokens)) for s in level]
    target = [s.step_us for s in level]
    weights = [1.0] * len(level)
    best = (0.0, 0.0, 0.0)
    for _ in range(_REWEIGHTINGS):
        best = _best_non_negative(rows, target, weights)
        errors = _relative_errors(rows, target, best)
        weights = [1.0 if e <= _HUBER_AT else _HUBER_AT / e for e in errors]
    error = median(_relative_errors(rows, target, best))
    return SoloFit(SoloStepModel(*best), 100 * error, len(level))


_Row = tuple[float, float, float]


def _relative_errors(
    rows: Sequence[_Row], target: Sequence[float], coefficients: _Row
) -> list[float]:
    c, b, k = coefficients
    return [abs(c * r[0] + b * r[1] + k * r[2] - y) / y for r, y in zip(rows, target, strict=True)]


def _best_non_negative(
    rows: Sequence[_Row], target: Sequence[float], weights: Sequence[float]
) -> _Row:
    """Weighted least squares over every subset of columns; the best one without a negative."""
    gram, moment, energy = _normal_equations(rows, target, weights)
    best, best_loss = (0.0, 0.0, 0.0), energy
    for size in (1, 2, 3):
        for columns in combinations(range(3), size):
            part = _solve([[gram[i][j] for j in columns] for i in columns], moment, columns)
            if part is None or min(part) < 0:
                continue
            full = [0.0, 0.0, 0.0]
            for column, value in zip(columns, part, strict=True):
                full[column] = value
            # For a least-squares solution the loss is the energy less what the fit explains.
            loss = energy - sum(moment[i] * full[i] for i in columns)
            if loss < best_loss - 1e-12 * energy:
                best, best_loss = (full[0], full[1], full[2]), loss
    return best


def _normal_equations(
    rows: Sequence[_Row], target: Sequence[float], weights: Sequence[float]
) -> tuple[list[list[float]], list[float], float]:
    gram = [[0.0] * 3 for _ in range(3)]
    moment, energy = [0.0] * 3, 0.0
    for row, y, weight in zip(rows, target, weights, strict=True):
        scale = weight / (y * y)
        energy += weight
        for i in range(3):
            moment[i] += scale * row[i] * y
            for j in range(3):
                gram[i][j] += scale * row[i] * row[j]
    return gram, moment, energy


def _solve(
    gram: list[list[float]], moment: Sequence[float], columns: Sequence[int]
) -> list[float] | None:
    """Gauss with pivoting, on columns scaled to a unit diagonal; None where they are dependent."""
    if any(gram[i][i] <= 0 for i in range(len(columns))):
        return None
    scale = [gram[i][i] ** -0.5 for i in range(len(columns))]
    n = len(columns)
    a = [
        [gram[i][j] * scale[i] * scale[j] for j in range(n)] + [moment[columns[i]] * scale[i]]
        for i in range(n)
    ]
    for step in range(n):
        pivot = max(range(step, n), key=lambda r: abs(a[r][step]))
        if abs(a[pivot][step]) < 1e-9:
            return None
        a[step], a[pivot] = a[pivot], a[step]
        for below in range(step + 1, n):
            ratio = a[below][step] / a[step][step]
            a[below] = [x - ratio * y for x, y in zip(a[below], a[step], strict=True)]
    solution = [0.0] * n
    for i in reversed(range(n)):
        known = sum(a[i][j] * solution[j] for j in range(i + 1, n))
        solution[i] = (a[i][n] - known) / a[i][i]
    return [x * s for x, s in zip(solution, scale, strict=True)]
