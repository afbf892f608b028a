"""Statistics of decode's steps that the agent gets once a second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windrow.metrics import (
    DECISION_BUCKETS_SECONDS,
    OBJECTIVE_RATIO_BUCKETS,
    PREDICTOR_RATIO_BUCKETS,
    TPOT_BUCKETS_SECONDS,
)
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.view import View

# A forward and a backward pass cost about four times what a token costs in a decode batch.
_TRAINING_COST = 4.0
_SMOOTHING = 0.2


class BucketCounts:
    """Values counted by bucket, as a Prometheus histogram has them; one thread adds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last above all bounds
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value; one that equals a bound counts as below it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True, slots=True)
class LendingCounts:
    """Chunks that moved since the start, and how long the worker took to give them back."""

    lent: int
    revoked: int
    reclaimed: int
    return_seconds: BucketCounts


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """Figures since the last one (quantiles) or since the start (counters)."""

    steps: int
    steps_over_objective: int
    tpot_p50_s: float
    tpot_p99_s: float
    busy_s: float
    decision_p50_s: float
    decision_p99_s: float
    view: View
    objective_us: int  # of the policy in force, for a token; 0: none
    decode_units: int
    finetune_units: int
    tpot: BucketCounts  # seconds, since the start
    objective_ratio: BucketCounts  # latency over the objective in force, since the start
    decision: BucketCounts  # seconds, since the start
    predictor_ratio: BucketCounts  # measured over predicted, beside the worker, since the start
    unit_seconds: float  # granted to the worker, since the start
    tokens_done: int


class StepStats:
    """The histograms of one engine; one thread fills them."""

    def __init__(self) -> None:
        self.tpot = BucketCounts(TPOT_BUCKETS_SECONDS)
        self.objective_ratio = BucketCounts(OBJECTIVE_RATIO_BUCKETS)
        self.decision = BucketCounts(DECISION_BUCKETS_SECONDS)
        self.predictor_ratio = BucketCounts(PREDICTOR_RATIO_BUCKETS)

    def take(
        self, measured: Sequence[tuple[int, int, int, float]], residuals: Sequence[float]
    ) -> tuple[list[int], list[int]]:
        """Count steps; return their times per output token (us) and the hook's costs (ns), sorted.

        Args:
            measured: of each step its latency in us, the cost in ns, the objective in us that was
                in force (of a step; 0: none), and the tokens that it yielded a request on average.
            residuals: how far steps beside the worker were from their prediction, relative to it.
        """
        per_token_us: list[int] = []
        for latency_us, cost_ns, objective_us, tokens in measured:
            per_token_us.append(latency_us if tokens == 1 else round(latency_us / tokens))
            self.tpot.add(per_token_us[-1] / 1e6)
            self.decision.add(cost_ns / 1e9)
            if objective_us > 0:
                self.objective_ratio.add(latency_us / objective_us)
        for residual in residuals:
            self.predictor_ratio.add(1.0 + residual)
        return sorted(per_token_us), sorted(ns for _, ns, _, _ in measured)


def quantile(ordered: list[int], q: float) -> float:
    """Nearest rank of a sorted list; 0 of an empty one."""
    return float(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) if ordered else 0.0


class HarvestRate:
    """Tokens a second that one compute unit yields: measured when a worker ran, else a prior."""

    def __init__(
        self, profile: Mapping[str, Any] | None, solo: Mapping[int, SoloStepModel], units: int
    ) -> None:
        self._per_unit = _prior(profile, solo, units)
        self._seen: tuple[float, int] | None = None
        self._smoothed_units = 0.0

    def update(self, unit_seconds: float, tokens_done: int, would_units: float) -> float:
        """Take one second's counters; returns what a worker would get here, tokens a second."""
        if self._seen is not None:
            spent, made = unit_seconds - self._seen[0], tokens_done - self._seen[1]
            # Tokens are counted at optimizer steps: wait until some have been.
            if made > 0 and spent > 0:
                self._per_unit += _SMOOTHING * (made / spent - self._per_unit)
                self._seen = (unit_seconds, tokens_done)
            elif made < 0:
                self._seen = (unit_seconds, tokens_done)
        else:
            self._seen = (unit_seconds, tokens_done)
        self._smoothed_units += _SMOOTHING * (would_units - self._smoothed_units)
        return self._per_unit * self._smoothed_units


def _prior(
    profile: Mapping[str, Any] | None, solo: Mapping[int, SoloStepModel], units: int
) -> float:
    measured = [
        row["finetuneTokensPerSecond"] / row["finetuneUnits"]
        for row in (profile or {}).get("samples", [])
        if row.get("finetuneTokensPerSecond") and row.get("finetuneUnits")
    ]
    if measured:
        return float(sum(measured) / len(measured))
    model = solo.get(units)
    if model is None or model.b0_us <= 0:
        return 0.0
    return 1e6 / (_TRAINING_COST * model.b0_us * units)
