"""Statistics of decode's steps that the agent gets once a second."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windrow.metrics import TPOT_BUCKETS_SECONDS
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.view import View

# A forward and a backward pass cost about four times what a token costs in a decode batch.
_TRAINING_COST = 4.0
_SMOOTHING = 0.2


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
    decode_units: int
    finetune_units: int
    histogram: tuple[int, ...]  # steps by bucket of TPOT_BUCKETS_SECONDS, since the start
    unit_seconds: float  # granted to the worker, since the start
    tokens_done: int


class StepStats:
    """Filled by decode's thread, emptied by another: lists are swapped, never shared."""

    def __init__(self) -> None:
        self.steps, self.over, self.busy_us = 0, 0, 0
        self._latencies_us: list[int] = []
        self._costs_ns: list[int] = []
        self._histogram = [0] * (len(TPOT_BUCKETS_SECONDS) + 1)

    def add(self, latency_us: int, cost_ns: int, *, over: bool) -> None:
        """One finished step and what the hook took of it."""
        self.steps += 1
        self.over += over
        self.busy_us += latency_us
        self._latencies_us.append(latency_us)
        self._costs_ns.append(cost_ns)

    def take(self) -> tuple[list[int], list[int]]:
        """Latencies and costs since the last call, each sorted."""
        latencies, self._latencies_us = self._latencies_us, []
        costs, self._costs_ns = self._costs_ns, []
        for latency_us in latencies:
            self._histogram[bisect_left(TPOT_BUCKETS_SECONDS, latency_us / 1e6)] += 1
        return sorted(latencies), sorted(costs)

    @property
    def histogram(self) -> tuple[int, ...]:
        """Steps by bucket, the last above all bounds; up to the last `take`."""
        return tuple(self._histogram)


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
