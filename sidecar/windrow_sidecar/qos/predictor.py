"""Predict the next decode step on each level: Harli's two stages, refined online.

Stage 1 (`solo.py`) is fitted from a profile. Stage 2 (`co_run.py`) multiplies it by what a worker
costs, with one (b1, k1) for all batches and phases, which recursive least squares follows online.
Records of  steps of the same kind come before both (`records.py`). The papers' own forms stay
as options: `harli` keeps the factors that were profiled, `llmstation` moves the records only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from windrow.errors import UserError
from windrow_sidecar.qos.co_run import CoRunFactors, co_run_model
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.records import RecordCache
from windrow_sidecar.qos.solo import BATCH_FLOOR, SoloStepModel, profiled_range, solo_models

# What steps teach: both stages' factors and the records; nothing (Harli); the records (LLMStation).
PredictorForm = Literal["windrow", "harli", "llmstation"]
# Beyond the profile the margin is wider by this: what a line that fits within 8% may be off by when
# it is followed to twice as far, with both coefficients wrong in the same direction.
BEYOND_MARGIN = 0.08
# Steps beyond the profile after which it reaches as far as they do.
_SEEN_OFTEN = 64
# A step beside which the worker ran for a part teaches stage 2 nothing: when it stopped is not
# known to the microsecond. So many steps beside a share first, and each pays for so many parts.
LESSONS, PARTS_A_LESSON = 32, 20
FORGETTING = 0.99
START_MARGIN = 0.08
MARGIN_QUANTILE = 0.95
# A tracker of a quantile moves by this much a step, up by 0.95 and down by 0.05 of it: from 8% to
# 4% in some 800 steps, from 4% to 8% in 40 steps that all exceed.
_MARGIN_PACE = 1e-3
MARGIN_MIN, MARGIN_MAX = 0.02, 0.5
# One step of which the machine made several must not move the model by more than this.
_MAX_INNOVATION = 0.5
# With one level both regressors are proportional for ever, and plain forgetting would let the
# information about the other direction fade to nothing: the first step in it would then throw the
# estimate far off. So much information (a tenth of one step's) never fades.
_LEAST_INFORMATION = 0.1


class Predictor:
    """Latency of the next step for every split of a device.

    `predict` is three multiplications a split; `observe` belongs after the step. One thread.
    `profiled`: the largest batch and context tokens that were measured; None: no end.
    """

    def __init__(
        self,
        levels: Partitioning,
        solo: Mapping[int, SoloStepModel],
        co_run: CoRunFactors | None = None,
        *,
        profiled: tuple[int, int] | None = None,
        form: PredictorForm = "windrow",
    ) -> None:
        missing = [s.decode_units for s in levels.splits if s.decode_units not in solo]
        if missing:
            raise UserError(
                f"the latency profile has no solo model for {missing} units",
                field="profile.solo",
                remedy="Take the profile again on this device.",
            )
        self._solo = [solo[s.decode_units] for s in levels.splits]
        self._alone = [(m.c0_us, m.b0_us, m.k0_us) for m in self._solo]
        self._most_batch, self._most_context = profiled or (1 << 62, 1 << 62)
        self._records = RecordCache(len(levels.splits))
        self._form = form
        self._beyond = 0  # steps that lay outside of that
        self._shares = [
            (s.decode_units / levels.units, s.finetune_units / levels.units) for s in levels.splits
        ]
        start = co_run or CoRunFactors()
        # What was profiled beside a worker has taught it; the prior is nobody's experience.
        self._credit = 0 if start == CoRunFactors() else LESSONS * PARTS_A_LESSON
        self._b1, self._k1 = start.b1, start.k1
        # Information about (b1, k1), symmetric; the prior counts as much as one step.
        self._i00, self._i01, self._i11 = 1.0, 0.0, 1.0
        self.margin = START_MARGIN
        self._folded = (0.0, 0.0)  # (b1, k1) that the stretches are of
        self._stretches: list[float] = []

    @property
    def co_run(self) -> CoRunFactors:
        """Stage 2 in its present state."""
        return CoRunFactors(self._b1, self._k1)

    def predict_us(self, batch: int, context_tokens: int) -> list[float]:
        """Predicted latency under each split, without a margin. The first is decode alone."""
        return self.predict(batch, context_tokens)[0]

    def predict(
        self, batch: int, context_tokens: int, phase: int = 0
    ) -> tuple[list[float], list[float]]:
        """Predicted latency under each split with a worker beside it, and without one.

        Without: on decode's units under that split. Neither has a margin. `phase`: of the worker's
        next tasklet.
        """
        b = batch if batch > BATCH_FLOOR else BATCH_FLOOR
        alone = [c0 + b0 * b + k0 * context_tokens for c0, b0, k0 in self._alone]
        beside = [us * by for us, by in zip(alone, self._stretch, strict=True)]
        if known := self._records.corrections(batch, context_tokens, phase):
            # Whatever was measured, a worker never makes decode faster.
            beside = [
                max(us * ratio, solo) for us, ratio, solo in zip(beside, known, alone, strict=True)
            ]
        return beside, alone

    def extrapolates(self, batch: int, context_tokens: int) -> bool:
        """Return whether batch or context are beyond what was profiled or seen often enough."""
        return batch > self._most_batch or context_tokens > self._most_context

    @property
    def models(self) -> list[tuple[float, float, float]]:
        """Stage 1 by split: c0, b0 and k0 in microseconds."""
        return self._alone

    @property
    def taught(self) -> bool:
        """True where enough steps beside a share have moved stage 2, of late too."""
        return self._credit >= LESSONS * PARTS_A_LESSON

    @property
    def learned(self) -> tuple[float, float, float, int, int, bool]:
        """Lessons of steps: b1, k1, the margin, the batch and context it reaches to.

        And whether they are `taught` enough.
        """
        reach = self._most_batch, self._most_context
        return self._b1, self._k1, self.margin, *reach, self.taught

    @property
    def records(self) -> RecordCache:
        """Records of what steps of each kind took, over what the linear model says."""
        return self._records

    @property
    def least_step_us(self) -> float:
        """Time of the smallest batch on all units, alone and with hardly any context."""
        return self._solo[0].predict_us(1, 0)

    def follow(self, residual: float, weight: float = 1.0) -> None:
        """Let the margin follow a step beside which a worker ran for a part of it."""
        self._credit = max(0, self._credit - 1)
        self._move_margin(residual, weight)

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
        """Learn from a step that ran beside a worker under `split`; returns the relative residual.

        A step alone (split 0) says nothing of stage 2: its residual is returned and nothing moves.
        A step counts by the square of how near it was to `objective_us` (0: in full). Only those
        near it can break it, and short ones mislead: a millisecond that the machine takes away is
        half of a 2 ms step and a tenth of a 10 ms one. On two cores a margin over all steps alike
        grew to 15 to 26%, where steps of half the objective and more needed 7 to 10%.
        """
        self._widen_range(batch, context_tokens)
        alone_us = self._solo[split].predict_us(batch, context_tokens)
        linear_us = expected = alone_us * self._stretch_of(split)
        if split and (known := self._records.corrections(batch, context_tokens, phase)):
            expected = max(alone_us, expected * known[split])
        residual = (latency_us - expected) / expected
        if split:
            self._credit = min(2 * LESSONS * PARTS_A_LESSON, self._credit + PARTS_A_LESSON)
            weight = min(1.0, expected / objective_us) ** 2 if objective_us else 1.0
            if self._form != "harli":
                ratio = latency_us / linear_us
                self._records.add(split, batch, context_tokens, phase, ratio=ratio)
            if self._form == "windrow":
                self._learn(split, latency_us / alone_us, weight)
            self._move_margin(residual, weight)
        return residual

    def _learn(self, split: int, ratio: float, weight: float) -> None:
        """One step of recursive least squares on ratio = b1 * s_inf + k1 * s_ft."""
        x0, x1 = self._shares[split]
        fading = weight * (1 - FORGETTING)
        leak = fading * _LEAST_INFORMATION
        i00 = (1 - fading) * self._i00 + weight * x0 * x0 + leak
        i01 = (1 - fading) * self._i01 + weight * x0 * x1
        i11 = (1 - fading) * self._i11 + weight * x1 * x1 + leak
        self._i00, self._i01, self._i11 = i00, i01, i11
        error = ratio - (self._b1 * x0 + self._k1 * x1)
        error = max(-_MAX_INNOVATION, min(_MAX_INNOVATION, error))
        pull = weight * error / (i00 * i11 - i01 * i01)
        self._b1 += pull * (i11 * x0 - i01 * x1)
        self._k1 += pull * (i00 * x1 - i01 * x0)

    def _move_margin(self, residual: float, weight: float) -> None:
        """Follow the 95th percentile of the relative residual."""
        pace = weight * _MARGIN_PACE
        if residual > self.margin:
            self.margin = min(MARGIN_MAX, self.margin + pace * MARGIN_QUANTILE)
        else:
            self.margin = max(MARGIN_MIN, self.margin - pace * (1 - MARGIN_QUANTILE))

    def _stretch_of(self, split: int) -> float:
        return self.co_run.factor(*self._shares[split]) if split else 1.0

    @property
    def _stretch(self) -> list[float]:
        """Stage 2 by split; folded when a prediction asks and it has moved since."""
        if self._folded != (self._b1, self._k1):
            self._folded = (self._b1, self._k1)
            co_run = self.co_run
            self._stretches = [co_run.factor(*shares) for shares in self._shares]
            self._stretches[0] = 1.0  # decode alone, whatever stage 2 says of s_ft = 0
        return self._stretches

    def _widen_range(self, batch: int, context_tokens: int) -> None:
        """A batch or context that has been seen often is no extrapolation any more."""
        if not self.extrapolates(batch, context_tokens):
            return
        self._beyond += 1
        if self._beyond >= _SEEN_OFTEN:
            self._beyond = 0
            self._most_batch = max(self._most_batch, batch)
            self._most_context = max(self._most_context, context_tokens)


def predictor_of(
    levels: Partitioning,
    profile: Mapping[str, Any],
    kind: type[Predictor] = Predictor,
    form: PredictorForm = "windrow",
) -> Predictor:
    """The predictor, of that class, that a latency profile makes.

    Raises:
        UserError: it lacks a share that decode would have beside a worker.
    """
    solo, range_ = solo_models(profile), profiled_range(profile)
    return kind(levels, solo, co_run_model(profile), profiled=range_, form=form)
