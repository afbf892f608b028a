"""Fields about the course of a training, and about its checkpoints."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from windrow.crd.texts import Place
from windrow.crd.values import BelowOne, NotNegative, Positive, Ratio, Record, cel, invalid
from windrow.outputs import is_bucket, path_of


class OptimizerSpec(Record):
    """AdamW and what happens to the gradient before it."""

    type: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="adamw: torch's, fused; adamw8bit: moments in 8 bits, by bitsandbytes.",
    )
    weight_decay: NotNegative = Field(default=0.0, description="Decoupled decay.")
    beta1: BelowOne = Field(default=0.9, description="Of the mean, below 1.")
    beta2: BelowOne = Field(default=0.999, description="Of the square, below 1.")
    max_gradient_norm: Positive = Field(
        default=1.0, description="Gradients are clipped to this norm."
    )


class EarlyStopSpec(Record):
    """Rule that ends a job before its last step; its adapter is then the best one."""

    patience: int = Field(
        ge=1, le=1000, description="So many evaluations in a row without a better loss."
    )
    min_delta: NotNegative = Field(default=0.0, description="By how much a loss has to be lower.")


# Fields that came after the first release have no default in the schema: the API server would
# write it into every job, and a sidecar of that release refuses fields that it does not know.


def _sft() -> Literal["sft", "dpo"]:
    return "sft"


class DpoSpec(Record):
    """Settings of direct preference optimization."""

    beta: Positive = Field(
        default_factory=lambda: 0.1,
        description="Weight of the distance from the base model: higher stays nearer. "
        "Left out: 0.1.",
    )
    label_smoothing: float = Field(
        default_factory=lambda: 0.0,
        ge=0,
        le=0.5,
        description="Share of the pairs whose preference may be the wrong way round. Left out: 0.",
    )


class TrainingSpec(Record):
    """Settings of the training."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "has(self.epochs) != has(self.maxSteps)",
                    "exactly one of epochs and maxSteps is wanted",
                ),
                cel(
                    "!has(self.earlyStop) || has(self.evalEverySteps)",
                    "earlyStop needs evalEverySteps",
                ),
                cel(
                    "!has(self.microBatchSize) || self.microBatchSize <= self.batchSize",
                    "microBatchSize may not be above batchSize",
                ),
                cel(
                    "!has(self.dpo) || (has(self.method) && self.method == 'dpo')",
                    "dpo is of method dpo alone",
                ),
                cel(
                    "!has(self.method) || self.method != 'dpo' || !has(self.loss) || "
                    "self.loss == 'completion'",
                    "method dpo compares answers: loss has to be completion",
                ),
            ]
        }
    )

    method: Literal["sft", "dpo"] = Field(
        default_factory=_sft,
        description="sft (the default): learn the rows; dpo: prefer the chosen answer of each row "
        "to the rejected one, by TRL's sigmoid loss with the base model as the reference.",
    )
    dpo: DpoSpec | None = Field(default=None, description="Settings of method dpo.")
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
    packing: bool | None = Field(
        default=None,
        description="true: rows stand one after the other in lines, and none sees another; false: "
        "one below the other, padded to the longest. Without: packed on a GPU, and where "
        "layers are compiled, if the model keeps rows apart, else padded; a job that resumes keeps "
        "what it began with.",
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
    learning_rate: Positive = Field(
        default=2e-4, description="Peak learning rate of AdamW, like 2e-4."
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="Course of the learning rate after the warm-up."
    )
    warmup_ratio: Ratio = Field(
        default=0.03, description="Share of the steps in which the rate grows from zero."
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

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.max_steps is None):
            found = "both are set" if self.epochs is not None else "neither is set"
            raise invalid(
                f"exactly one of epochs and maxSteps is wanted, {found}",
                "Keep one of the two.",
            )
        return self

    @property
    def preferences(self) -> DpoSpec | None:
        """Settings by which answers are preferred; None: the method is another one."""
        return (self.dpo or DpoSpec()) if self.method == "dpo" else None

    @model_validator(mode="after")
    def _of_the_method(self) -> Self:
        if self.dpo is not None and self.method != "dpo":
            raise invalid(
                f"dpo has settings, and method is {self.method}", "Write method: dpo, or drop dpo."
            )
        if self.method == "dpo" and self.loss != "completion":
            raise invalid("method dpo compares answers", "Write loss: completion.")
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
    """Limit on the work that may be lost, and another job's checkpoint to go on from."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.resumeFrom) || self.resumeFrom.matches('^(/|file:/|s3://)')",
                    "resumeFrom must be an absolute path or s3://bucket/folder",
                ),
                cel(
                    r"!has(self.resumeFrom) || !self.resumeFrom.matches('(^|/)\\.\\.(/|$)')",
                    "resumeFrom must name a directory without ..",
                ),
            ]
        }
    )

    every_steps: int = Field(
        default=50, ge=1, le=1_000_000, description="Steps between two checkpoints."
    )
    keep: int = Field(default=2, ge=1, le=1000, description="How many checkpoints are kept.")
    resume_from: Place | None = Field(
        default=None,
        description="Checkpoint of another job to go on from, while this one has none of its own: "
        "its directory, or the job's folder DESTINATION/.windrow/UID, whose newest one is taken. "
        "On a volume that this job may read, or s3:// with the credentials of the output. Base "
        "model, rows, adapter and settings have to be the same.",
    )

    @model_validator(mode="after")
    def _checkpoint_by_its_whole_path(self) -> Self:
        place = self.resume_from
        if place is not None and not is_bucket(place) and not path_of(place).startswith("/"):
            raise invalid(
                f"resumeFrom {place!r} is not an absolute path",
                "Write it from the root, or as s3://bucket/folder.",
            )
        return self
