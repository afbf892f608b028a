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
    granted_s: float  # for which any were granted, since the start
    tokens_done: int
    first_tokens: int = 0  # since the start, under a policy with an objective for them
    first_tokens_over_objective: int = 0


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
    """Tokens a second that a worker gets by its units: measured where one ran, else a prior.

    A worker's host bounds it too, so that what it made on a few units tells little of many: each
    number of units has a rate of its own, with a line between two of them.
    """

    def __init__(
        self, profile: Mapping[str, Any] | None, solo: Mapping[int, SoloStepModel], units: int
    ) -> None:
        self._per_unit, self._prior_basis = _prior(profile, solo, units)
        self._rates: dict[int, float] = {}
        self._seen: tuple[float, float, int] | None = None
        self._smoothed_units = 0.0

    def update(
        self, unit_seconds: float, granted_s: float, tokens_done: int, would_units: float
    ) -> float:
        """Take one second's counters; returns what a worker would get here, tokens a second."""
        now = (unit_seconds, granted_s, tokens_done)
        if self._seen is None:
            self._seen = now
        spent, passed_s, made = (new - old for new, old in zip(now, self._seen, strict=True))
        # Tokens are counted at optimizer steps: wait until some have been.
        if made > 0 and spent > 0 and passed_s > 0:
            units = max(1, round(spent / passed_s))
            known = self.at(units)
            self._rates[units] = known + _SMOOTHING * (made / spent * units - known)
            self._seen = now
        elif made < 0:
            self._seen = now
        self._smoothed_units += _SMOOTHING * (would_units - self._smoothed_units)
        return self.at(self._smoothed_units)

    @property
    def basis(self) -> str:
        """Source of the rate, the surest first; "": there is none.

        `measured`: a worker that ran here; `profiled`: one that ran in the latency profile;
        `derived`: decode's own steps, and what training costs beside them.
        """
        return "measured" if self._rates else self._prior_basis

    def at(self, units: float) -> float:
        """Return the rate on so many units, between those on which a worker ran, else by units."""
        if not self._rates:
            return self._per_unit * units
        below = max((n for n in self._rates if n <= units), default=0)
        above = min((n for n in self._rates if n >= units), default=0)
        if not below or not above or below == above:
            nearest = below or above
            return self._rates[nearest] * units / nearest
        part = (units - below) / (above - below)
        return self._rates[below] + part * (self._rates[above] - self._rates[below])


def _prior(
    profile: Mapping[str, Any] | None, solo: Mapping[int, SoloStepModel], units: int
) -> tuple[float, str]:
    """Return tokens a second by unit before any worker ran here, and their basis."""
    measured = [
        row["finetuneTokensPerSecond"] / row["finetuneUnits"]
        for row in (profile or {}).get("samples", [])
        if row.get("finetuneTokensPerSecond") and row.get("finetuneUnits")
    ]
    if measured:
        return float(sum(measured) / len(measured)), "profiled"
    model = solo.get(units)
    if model is None or model.b0_us <= 0:
        return 0.0, ""
    return 1e6 / (_TRAINING_COST * model.b0_us * units), "derived"
