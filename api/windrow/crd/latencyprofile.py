"""Fields of a LatencyProfile: how fast a device decodes, alone and beside a worker."""

from __future__ import annotations

from pydantic import Field

from windrow.crd.values import Record, Timestamp

# Below this batch a step costs the same: the piecewise rule of Harli's stage 1.
SMALLEST_BATCH = 4


class SoloModel(Record):
    """Step time of decode alone on `units` compute units.

    t0 = c0_us + b0_us * max(batch, 4) + k0_ns_per_token / 1000 * context_tokens, in microseconds
    (Harli, Eq. 2, with the sum of context tokens in place of batch times length).
    """

    units: int = Field(ge=1, description="Compute units of decode.")
    c0_us: float = Field(alias="c0Us", description="Constant part, microseconds.")
    b0_us: float = Field(alias="b0Us", description="Microseconds per request of the batch.")
    k0_ns_per_token: float = Field(
        alias="k0NsPerToken", description="Nanoseconds per context token."
    )
    median_abs_error_percent: float = Field(
        default=0, description="Median absolute error of the fit on its own samples."
    )

    def predict_us(self, batch: int, context_tokens: int) -> float:
        """Return the step time in microseconds."""
        constant = self.c0_us + self.b0_us * max(batch, SMALLEST_BATCH)
        return constant + self.k0_ns_per_token * context_tokens / 1000


class CoRunModel(Record):
    """Slow-down beside a worker (Harli, Eq. 3).

    t1 = (b1 * decode share + k1 * worker share) * t0, where shares are of all compute units.
    """

    b1: float = Field(description="Weight of decode's share of the compute units.")
    k1: float = Field(description="Weight of the worker's share.")
    samples: int = Field(default=0, ge=0, description="Points that it was fitted on.")
    median_abs_error_percent: float = Field(
        default=0, description="Median absolute error of the fit on its own points."
    )


class ProfileSample(Record):
    """One measured point."""

    units: int = Field(description="Compute units of decode.")
    finetune_units: int = Field(default=0, description="Compute units of the worker; 0: alone.")
    batch: int = Field(description="Requests in the batch.")
    context_tokens: int = Field(description="Context tokens of the batch.")
    step_us: float = Field(description="Median step time, microseconds.")
    finetune_tokens_per_second: float | None = Field(
        default=None, description="What the worker got meanwhile."
    )


class LatencyProfileSpec(Record):
    """A profile of one (device, engine, model, parallelism), shared by all pods of that kind."""

    key: str = Field(
        min_length=1, max_length=256, description="Fingerprint of what the profile belongs to."
    )
    device: str = Field(description="Device.")
    driver: str = Field(default="", description="host or cuda.")
    engine: str = Field(description="Decode engine.")
    engine_version: str = Field(default="", description="Its version.")
    model_fingerprint: str = Field(default="", description="Fingerprint of the model.")
    tensor_parallel: int = Field(default=1, ge=1, description="Ranks of decode.")
    solo: list[SoloModel] = Field(
        default_factory=list, description="Decode alone, one model per number of compute units."
    )
    co_run: CoRunModel | None = Field(
        default=None, description="The slow-down beside a worker; absent: not measured yet."
    )
    noise_percent: float = Field(
        default=0,
        ge=0,
        description="How far steps of one point scatter around their median (half of the "
        "interquartile range). Above 15 the profile is not used again.",
    )
    roofline: bool = Field(
        default=False,
        description="Made of the device's rates and the model's sizes, not of measured steps: "
        "every step counts as beyond it until such steps have been seen.",
    )
    samples: list[ProfileSample] = Field(
        default_factory=list, description="What was measured, for those who want to fit again."
    )
    taken_at: Timestamp = Field(description="When it was taken.")
