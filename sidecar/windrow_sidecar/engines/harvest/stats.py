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


class StepStats:
    """Filled by decode's thread, emptied by another: lists are swapped, never shared."""

    def __init__(self) -> None:
        self.steps, self.over, self.busy_us = 0, 0, 0
        self._latencies_us: list[int] = []
        self._costs_ns: list[int] = []
        self._objectives: list[float] = []  # latency over objective
        self._residuals: list[float] = []
        self.tpot = BucketCounts(TPOT_BUCKETS_SECONDS)
        self.objective_ratio = BucketCounts(OBJECTIVE_RATIO_BUCKETS)
        self.decision = BucketCounts(DECISION_BUCKETS_SECONDS)
        self.predictor_ratio = BucketCounts(PREDICTOR_RATIO_BUCKETS)

    def add(self, latency_us: int, cost_ns: int, objective_us: int, tokens: float = 1.0) -> None:
        """Count a finished step.

        Args:
            latency_us: how long it took.
            cost_ns: what the hook took of that.
            objective_us: of a step, in force; 0: none.
            tokens: that it yielded a request, on average: the time for each of them is kept.
        """
        self.steps += 1
        self.busy_us += latency_us
        self._latencies_us.append(latency_us if tokens == 1 else round(latency_us / tokens))
        self._costs_ns.append(cost_ns)
        if objective_us > 0:
            self.over += latency_us > objective_us
            self._objectives.append(latency_us / objective_us)

    def predicted(self, residual: float) -> None:
        """Count how far a step beside the worker was from its prediction, relative to that."""
        self._residuals.append(residual)

    def take(self) -> tuple[list[int], list[int]]:
        """Times per output token and costs since the last call, sorted; fills the histograms."""
        latencies, self._latencies_us = self._latencies_us, []
        costs, self._costs_ns = self._costs_ns, []
        ratios, self._objectives = self._objectives, []
        residuals, self._residuals = self._residuals, []
        for latency_us in latencies:
            self.tpot.add(latency_us / 1e6)
        for cost_ns in costs:
            self.decision.add(cost_ns / 1e9)
        for ratio in ratios:
            self.objective_ratio.add(ratio)
        for residual in residuals:
            self.predictor_ratio.add(1.0 + residual)
        return sorted(latencies), sorted(costs)


class GrantedUnits:
    """Compute units of the worker, summed over the time for which it was granted them."""

    def __init__(self, now_ns: int) -> None:
        self._units, self._since_ns = 0.0, now_ns
        self._unit_ns = 0.0
        self._granted_ns = 0

    def set(self, now_ns: int, units: float) -> None:
        """Note that the worker has so many units from now on."""
        self._unit_ns += self._units * (now_ns - self._since_ns)
        self._granted_ns += (now_ns - self._since_ns) * (self._units > 0)
        self._units, self._since_ns = units, now_ns

    @property
    def seconds(self) -> float:
        """Unit-seconds until the last change."""
        return self._unit_ns / 1e9

    @property
    def granted_s(self) -> float:
        """Seconds until the last change for which the worker had any."""
        return self._granted_ns / 1e9


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
        self._per_unit = _prior(profile, solo, units)
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
