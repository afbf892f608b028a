"""Decide how many finetune tokens share a decode step's products (FlexLLM), and when (LLMStation).

FlexLLM's hybrid token scheduler takes s = argmax { f(c, s) <= S }: decode's c rows come first, then
as many finetune tokens s as keep the iteration within S. f is profiled: `JoinedCost`. LLMStation's
planner shares products in forward passes only, since a backward has none in common with decode.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from windrow_sidecar.qos.view import Phase

# Fewer tokens cost as much as these: a layer's fixed cost rules (see `flexllm` in `policies.cpp`).
GRAIN_TOKENS, MOST_TOKENS = 16, 512
# A gap that is shorter is not worth a hand-over.
LEAST_GAP_US = 500.0
_SMOOTHING = 0.1
# What finetune rows take besides the products (attention, adapters) is at most this factor.
_MOST_FACTOR = 8.0


class JoinedSample(NamedTuple):
    """One profiled point of f: an iteration of `batch` decode rows and `tokens` finetune tokens."""

    batch: int
    tokens: int
    us: float


class JoinedCost:
    """Predicts how long an iteration takes by its rows: f(c, s), in microseconds.

    Between profiled points it is linear in both; beyond the last it goes on as between the last
    two. It never falls with more rows, whatever a noisy profile says.

    Args:
        samples: a grid: every batch with the same tokens, 0 among them.

    Raises:
        ValueError: they are not a grid, or one has no duration.
    """

    def __init__(self, samples: Iterable[JoinedSample]) -> None:
        by_place = {(sample.batch, sample.tokens): sample.us for sample in samples}
        self._batches = sorted({batch for batch, _ in by_place})
        self._tokens = sorted({tokens for _, tokens in by_place})
        if len(by_place) != len(self._batches) * len(self._tokens) or 0 not in self._tokens:
            raise ValueError("every batch wants the same finetune tokens, and 0 of them")
        if min(by_place.values()) <= 0:
            raise ValueError("an iteration takes longer than nothing")
        self._us: list[list[float]] = []
        for i, batch in enumerate(self._batches):
            row: list[float] = []
            for j, tokens in enumerate(self._tokens):
                least = max(row[j - 1] if j else 0.0, self._us[i - 1][j] if i else 0.0)
                row.append(max(by_place[batch, tokens], least))
            self._us.append(row)
        self._factor = 1.0

    @property
    def factor(self) -> float:
        """Factor by which finetune rows take longer than was profiled, as measured since."""
        return self._factor

    def us(self, batch: int, tokens: int) -> float:
        """Return f(batch, tokens)."""
        alone = self._profiled(batch, 0)
        if not tokens:
            return alone
        return alone + self._factor * (self._profiled(batch, tokens) - alone)

    def learn(self, batch: int, tokens: int, us: float) -> None:
        """Take in how long an iteration took; what it teaches is the cost of finetune rows."""
        alone = self._profiled(batch, 0)
        profiled = self._profiled(batch, tokens) - alone
        if tokens <= 0 or profiled <= 0:
            return
        seen = min(_MOST_FACTOR, max(1 / _MOST_FACTOR, (us - alone) / profiled))
        self._factor += _SMOOTHING * (seen - self._factor)

    def _profiled(self, batch: int, tokens: int) -> float:
        along = [_at(self._tokens, row, tokens) for row in self._us]
        return _at(self._batches, along, batch)


def _at(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """Return a value between known places, or beyond them; never below the first."""
    if len(places) == 1:
        return values[0]
    right = min(max(1, bisect_right(places, place)), len(places) - 1)
    low, high = places[right - 1], places[right]
    slope = (values[right] - values[right - 1]) / (high - low)
    return max(values[0], values[right - 1] + slope * (place - low))


def hybrid_tokens(
    cost: JoinedCost,
    batch: int,
    bound_us: float,
    *,
    grain: int = GRAIN_TOKENS,
    most: int = MOST_TOKENS,
) -> int:
    """Return the largest s with f(batch, s) <= bound, in whole grains; 0: not even one fits.

    Args:
        cost: f.
        batch: c, decode's rows.
        bound_us: S, less margins.
        grain: tokens come in multiples of it.
        most: tokens at most.
    """
    low, high = 0, most // grain
    while low < high:
        middle = (low + high + 1) // 2
        if cost.us(batch, middle * grain) <= bound_us:
            low = middle
        else:
            high = middle - 1
    return low * grain


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Part of finetuning in one iteration of decode.

    Attributes:
        form: forward in decode's own products; before the step, alone on the device; nothing.
        tokens: of the forward.
        gap_us: how long it has the device before the step.
    """

    form: Literal["joined", "before", "none"]
    tokens: int = 0
    gap_us: float = 0.0


def plan_iteration(phase: Phase, batch: int, bound_us: float, cost: JoinedCost) -> IterationPlan:
    """Choose between a joined forward, a turn before the step, and nothing.

    Args:
        phase: of the next tasklet.
        batch: decode's rows; 0: decode has no step, and finetuning the device.
        bound_us: by when the iteration must be over.
        cost: of iterations.
    """
    alone_us = cost.us(batch, 0) if batch else 0.0
    gap_us = bound_us - alone_us
    if phase is Phase.NONE or gap_us < LEAST_GAP_US:
        return IterationPlan("none")
    if phase is Phase.FORWARD and batch:
        tokens = hybrid_tokens(cost, batch, bound_us)
        return IterationPlan("joined", tokens) if tokens else IterationPlan("none")
    return IterationPlan("before", gap_us=gap_us)
