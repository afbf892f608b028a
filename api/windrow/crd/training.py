"""What a user may say about the course of a training, and about its checkpoints."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from windrow.crd.values import Decimal, Record, cel, invalid


class OptimizerSpec(Record):
    """AdamW and what happens to the gradient before it."""

    model_config = ConfigDict(
        json_schema_extra={
            # The object's own default is judged before its fields have theirs, hence the `has`.
            "x-kubernetes-validations": [
                cel("!has(self.beta1) || double(self.beta1) < 1.0", "beta1 must be below 1"),
                cel("!has(self.beta2) || double(self.beta2) < 1.0", "beta2 must be below 1"),
                cel(
                    "!has(self.maxGradientNorm) || double(self.maxGradientNorm) > 0.0",
                    "maxGradientNorm must be above zero",
                ),
            ]
        }
    )

    type: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="adamw: torch's, fused; adamw8bit: moments in 8 bits, by bitsandbytes.",
    )
    weight_decay: Decimal = Field(default=0.0, ge=0, description="Decoupled decay, in quotes.")
    beta1: Decimal = Field(default=0.9, ge=0, lt=1, description="Of the mean, in quotes.")
    beta2: Decimal = Field(default=0.999, ge=0, lt=1, description="Of the square, in quotes.")
    max_gradient_norm: Decimal = Field(
        default=1.0, gt=0, description="Gradients are clipped to this norm, in quotes."
    )


class EarlyStopSpec(Record):
    """When a job ends before its last step; its adapter is the best one then."""

    patience: int = Field(
        ge=1, le=1000, description="So many evaluations in a row without a better loss."
    )
    min_delta: Decimal = Field(
        default=0.0, ge=0, description="By how much a loss has to be lower, in quotes."
    )


class TrainingSpec(Record):
    """How it is trained."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "has(self.epochs) != has(self.maxSteps)",
                    "exactly one of epochs and maxSteps is wanted",
                ),
                cel("double(self.learningRate) > 0.0", "learningRate must be above zero"),
                cel("double(self.warmupRatio) <= 1.0", "warmupRatio must be between 0 and 1"),
                cel(
                    "!has(self.earlyStop) || has(self.evalEverySteps)",
                    "earlyStop needs evalEverySteps",
                ),
                cel(
                    "!has(self.microBatchSize) || self.microBatchSize <= self.batchSize",
                    "microBatchSize may not be above batchSize",
                ),
            ]
        }
    )

    epochs: int | None = Field(
        default=None, ge=1, le=100_000, description="Passes over the rows. Or maxSteps."
    )
    max_steps: int | None = Field(
        default=None, ge=1, le=100_000_000, description="Optimizer steps. Or epochs."
    )
    batch_size: int = Field(
        default=16, ge=1, le=65536, description="Rows of an optimizer step, over all micro-batches."
    )
    micro_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Most rows that pass through the layers together; a step accumulates over "
        "batchSize / microBatchSize of them. Without: as many as time and memory allow.",
    )
    max_sequence_length: int = Field(
        default=2048, ge=8, le=1_048_576, description="Longer rows are cut to so many tokens."
    )
    packing: bool = Field(
        default=False,
        description="true: rows stand one after the other without padding, and none sees another.",
    )
    loss: Literal["completion", "all"] = Field(
        default="completion",
        description="Which tokens count: what is answered, or prompts as well. Rows of the format "
        "text count as a whole.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Of the frozen weights and activations; the adapter is kept in fp32. auto: as "
        "decode has them where weights are shared, else bf16 on a GPU and fp32 elsewhere.",
    )
    learning_rate: Decimal = Field(
        default=2e-4, description="Peak learning rate of AdamW, in quotes."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Course of the learning rate after the warm-up."
    )
    warmup_ratio: Decimal = Field(
        default=0.03,
        description="Share of the steps in which the rate grows from zero, in quotes.",
    )
    optimizer: OptimizerSpec = Field(
        default_factory=OptimizerSpec, description="AdamW and clipping."
    )
    eval_every_steps: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Steps between two evaluations on the held-out rows. Without: before the "
        "first step and after the last.",
    )
    early_stop: EarlyStopSpec | None = Field(
        default=None, description="End before the last step where evaluations get no better."
    )
    tensorboard: bool = Field(
        default=False, description="Write TensorBoard files into the job's folder as well."
    )
    seed: int = Field(
        default=17, ge=0, le=2**32 - 1, description="Seed of the order of rows and of the adapter."
    )

    @field_validator("learning_rate")
    @classmethod
    def _rate_above_zero(cls, rate: float) -> float:
        if not rate > 0 or not math.isfinite(rate):
            raise invalid(f"{rate:g} is not above zero", 'Write a positive decimal, like "2e-4".')
        return rate

    @field_validator("warmup_ratio")
    @classmethod
    def _ratio_in_range(cls, ratio: float) -> float:
        if not 0 <= ratio <= 1:
            raise invalid(f"{ratio:g} is not between 0 and 1", 'Write a share, like "0.03".')
        return ratio

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.max_steps is None):
            found = "both are set" if self.epochs is not None else "neither is set"
            raise invalid(
                f"exactly one of epochs and maxSteps is wanted, {found}",
                "Keep one of the two.",
            )
        return self

    @model_validator(mode="after")
    def _part_of_a_batch(self) -> Self:
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise invalid(
                f"microBatchSize {self.micro_batch_size} is above batchSize {self.batch_size}",
                "Lower microBatchSize: it is a part of a batch.",
            )
        return self

    @model_validator(mode="after")
    def _evaluations_to_stop_by(self) -> Self:
        if self.early_stop is not None and self.eval_every_steps is None:
            raise invalid("earlyStop looks at evaluations", "Set evalEverySteps as well.")
        return self


class CheckpointSpec(Record):
    """How much work may be lost."""

    every_steps: int = Field(
        default=50, ge=1, le=1_000_000, description="Steps between two checkpoints."
    )
    keep: int = Field(default=2, ge=1, le=1000, description="How many checkpoints are kept.")
