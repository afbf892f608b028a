"""Predict decode's steps on a device that was never profiled: its rates and the model's sizes.

A step reads all weights and its batch's KV once, and multiplies each request's row by all weights;
it takes no less than the longer of both, and the prior takes their sum. What an engine spends
beside (launches, its own code) no rate tells: a measured step of one request anchors the prior.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from windrow_sidecar.qos.solo import SoloSample, SoloStepModel


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates that a number of compute units reaches.

    Attributes:
        bytes_per_us: read from memory.
        flops_per_us: of a matrix product.
    """

    bytes_per_us: float
    flops_per_us: float


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a model's decode step: what it reads and computes."""

    weight_bytes: int
    parameters: int  # that each request's row is multiplied by
    kv_token_bytes: int


def roofline_models(
    rates: Mapping[int, Rates], size: StepSize, anchors: Iterable[SoloSample] = ()
) -> dict[int, SoloStepModel]:
    """Stage 1 of the predictor, by units; `anchors`: measured steps, one for each."""
    models = {
        units: SoloStepModel(
            c0_us=size.weight_bytes / rate.bytes_per_us,
            b0_us=2 * size.parameters / rate.flops_per_us,
            k0_us=size.kv_token_bytes / rate.bytes_per_us,
        )
        for units, rate in rates.items()
    }
    for step in anchors:
        model = models[step.units]
        beyond_us = step.step_us - model.predict_us(step.batch, step.context_tokens)
        c0_us = max(0.0, model.c0_us + beyond_us)
        models[step.units] = SoloStepModel(c0_us, model.b0_us, model.k0_us)
    return models
