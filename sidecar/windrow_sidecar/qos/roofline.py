"""Predict decode's steps on a device that was never profiled: its rates and the model's sizes.

A step reads all weights and its batch's KV once, and multiplies each request's row by all weights;
it takes no less than the longer of both. The prior takes their sum, since how much of the one is
hidden behind the other is not known before steps have been measured: it errs towards decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from windrow_sidecar.qos.solo import SoloStepModel


@dataclass(frozen=True, slots=True)
class Rates:
    """What a number of compute units reaches.

    Attributes:
        bytes_per_us: read from memory.
        flops_per_us: of a matrix product.
        launch_us: of one operation that computes hardly anything.
    """

    bytes_per_us: float
    flops_per_us: float
    launch_us: float = 0.0


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a decode step of a model reads and computes."""

    weight_bytes: int
    parameters: int  # that each request's row is multiplied by
    kv_token_bytes: int
    operations: int  # launched one after the other


def roofline_models(rates: Mapping[int, Rates], size: StepSize) -> dict[int, SoloStepModel]:
    """Stage 1 of the predictor, by units."""
    return {
        units: SoloStepModel(
            c0_us=size.operations * rate.launch_us + size.weight_bytes / rate.bytes_per_us,
            b0_us=2 * size.parameters / rate.flops_per_us,
            k0_us=size.kv_token_bytes / rate.bytes_per_us,
        )
        for units, rate in rates.items()
    }
