"""Predict the next decode step on each level: Harli's two stages, refined online.

Stage 1 (`solo.py`) is fitted from a profile. Stage 2 (`co_run.py`) multiplies it by what a worker
costs, with one (b1, k1) for all batches and phases, which recursive least squares follows online.
Records of steps of the same kind come before both. The papers' own forms stay as options: `harli`
keeps the factors that were profiled, `llmstation` moves the records only.
`csrc/src/predictor.cpp` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.qos.co_run import CoRunFactors, co_run_model
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.policies import FIGURES
from windrow_sidecar.qos.solo import SoloStepModel, profiled_range, solo_models

# What steps teach: both stages' factors and the records; nothing (Harli); the records (LLMStation).
PredictorForm = Literal["windrow", "harli", "llmstation"]
START_MARGIN = FIGURES["start_margin"]


class Predictor(_core.Predictor):
    """Latency of the next step for every split of a device.

    `predict` is three multiplications a split; `observe` belongs after the step. One thread.

    Args:
        levels: the splits.
        solo: stage 1 by decode's units.
        co_run: stage 2 to start from; None: the prior.
        profiled: the largest batch and context tokens that were measured; None: no end.
        form: what steps teach.
        blind: it expects every step to take no time, and learns nothing.
    """

    def __init__(
        self,
        levels: Partitioning,
        solo: Mapping[int, SoloStepModel],
        co_run: CoRunFactors | None = None,
        *,
        profiled: tuple[int, int] | None = None,
        form: PredictorForm = "windrow",
        blind: bool = False,
    ) -> None:
        missing = [s.decode_units for s in levels.splits if s.decode_units not in solo]
        if missing:
            raise UserError(
                f"the latency profile has no solo model for {missing} units",
                field="profile.solo",
                remedy="Take the profile again on this device.",
            )
        models = [solo[s.decode_units] for s in levels.splits]
        start = co_run or CoRunFactors()
        super().__init__(
            figures=FIGURES,
            units=levels.units,
            splits=levels.pairs,
            models=[(m.c0_us, m.b0_us, m.k0_us) for m in models],
            start=(start.b1, start.k1),
            # A profile that was taken beside a worker counts as that worker's experience.
            measured=start != CoRunFactors(),
            profiled=profiled or (1 << 62, 1 << 62),
            form=form,
            blind=blind,
        )

    @property
    def co_run(self) -> CoRunFactors:
        """Stage 2 with its factors of now."""
        return CoRunFactors(*self.factors)

    def predict_us(self, batch: int, context_tokens: int) -> list[float]:
        """Return the latency under each split, without a margin. The first is decode alone."""
        return self.predict(batch, context_tokens)[0]


def predictor_of(
    levels: Partitioning,
    profile: Mapping[str, Any],
    form: PredictorForm = "windrow",
    *,
    blind: bool = False,
) -> Predictor:
    """Return the predictor that a latency profile makes.

    Raises:
        UserError: it lacks a share that decode would have beside a worker.
    """
    solo, range_ = solo_models(profile), profiled_range(profile)
    return Predictor(levels, solo, co_run_model(profile), profiled=range_, form=form, blind=blind)
