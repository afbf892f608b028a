"""What a user may write in a FinetuneJob, and what its status holds."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator

from windrow.crd.common import Condition
from windrow.crd.values import (
    NAME_MAX,
    TEXT_MAX,
    Decimal,
    Record,
    Timestamp,
    cel,
    invalid,
)

# Where rows are read from and adapters are written to: a path in the decode pod, as mounted there.
SUPPORTED_SCHEMES = ("", "file")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise invalid("is empty", "Write a value or leave the field out.")
    return text


def _place(text: str) -> str:
    scheme = urlsplit(_not_blank(text)).scheme
    if scheme not in SUPPORTED_SCHEMES:
        raise invalid(
            f"{text!r}: nothing here can read or write {scheme}:// yet",
            "Write a path on a volume that the decode pods mount (HarvestPolicy "
            "spec.sidecar.volumes).",
        )
    return text


Text = Annotated[str, AfterValidator(_not_blank), Field(min_length=1, max_length=TEXT_MAX)]
Place = Annotated[str, AfterValidator(_place), Field(min_length=1, max_length=TEXT_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]


class SecretRef(Record):
    """A Secret of the job's namespace."""

    name: Name = Field(description="Name of the Secret.")


class ModelSpec(Record):
    """The base model."""

    name: Text = Field(
        description="Hub name, or path of a transformers model directory. Matched with what the "
        "decode pods serve: on a pod that serves the same model its weights are shared."
    )
    revision: Text = Field(default="main", description="Revision of a Hub model.")


class DatasetSpec(Record):
    """The rows to train on."""

    source: Place = Field(description="Path of a JSON-lines file.")
    format: Literal["chat", "instruction", "text"] = Field(
        default="chat",
        description="chat: rows with `messages`; instruction: rows with `instruction`, optional "
        "`input`, and `output`; text: rows with `text`.",
    )
    eval_fraction: float = Field(
        default=0.02,
        ge=0,
        le=0.5,
        description="Share of the rows that is held out and on which the adapter is compared with "
        "the base model.",
    )
    secret_ref: SecretRef | None = Field(
        default=None, description="Credentials for the source, in the job's namespace."
    )


class LoraSpec(Record):
    """Low-rank adapters, as peft makes them."""

    rank: int = Field(default=16, ge=1, le=1024, description="Rank of the update.")
    alpha: int = Field(
        default=32, ge=1, le=65536, description="Scale: the update is multiplied by alpha / rank."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout in front of the adapter, 0 up to below 1."
    )
    target_modules: Text = Field(
        default="all-linear",
        description="Which modules get an adapter: `all-linear`, or names separated by commas "
        "(`q_proj,v_proj`).",
    )

    def modules(self) -> str | list[str]:
        """Return the target modules as `peft.LoraConfig` takes them."""
        if self.target_modules == "all-linear":
            return self.target_modules
        return [name.strip() for name in self.target_modules.split(",")]


class AdapterSpec(Record):
    """What is trained."""

    type: Literal["lora"] = Field(default="lora", description="Kind of adapter.")
    lora: LoraSpec = Field(default_factory=LoraSpec, description="Settings of a LoRA adapter.")


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
    max_sequence_length: int = Field(
        default=2048, ge=8, le=1_048_576, description="Longer rows are cut to so many tokens."
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


class WorkersSpec(Record):
    """How many slots a job takes."""

    min: int = Field(default=1, ge=1, le=1, description="Fewest workers. v1alpha1 runs one.")
    max: int = Field(default=1, ge=1, le=1, description="Most workers. v1alpha1 runs one.")


class CheckpointSpec(Record):
    """How much work may be lost."""

    every_steps: int = Field(
        default=50, ge=1, le=1_000_000, description="Steps between two checkpoints."
    )
    keep: int = Field(default=2, ge=1, le=1000, description="How many checkpoints are kept.")


class DeploySpec(Record):
    """Loading of the finished adapter into the serving pods."""

    enabled: bool = Field(
        default=False, description="Whether to load it. v1alpha1 leaves that to the user."
    )

    @field_validator("enabled")
    @classmethod
    def _not_yet(cls, enabled: bool) -> bool:
        if enabled:
            raise invalid(
                "loading the adapter into serving pods is not supported yet",
                "Set it to false and load the adapter by the engine's own call.",
            )
        return enabled


class OutputSpec(Record):
    """Where the adapter goes."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.deploy) || !self.deploy.enabled",
                    "deploy.enabled is not supported yet: load the adapter by the engine's call",
                )
            ]
        }
    )

    destination: Place = Field(
        description="Directory that gets the adapter. Checkpoints stand below it while the job "
        "runs. No two jobs may write to one."
    )
    deploy: DeploySpec = Field(
        default_factory=DeploySpec, description="Loading of the adapter into serving pods."
    )


class FinetuneJobSpec(Record):
    """One finetuning run on harvested compute."""

    model: ModelSpec = Field(description="The base model.")
    dataset: DatasetSpec = Field(description="The rows to train on.")
    adapter: AdapterSpec = Field(default_factory=AdapterSpec, description="What is trained.")
    training: TrainingSpec = Field(description="How it is trained.")
    workers: WorkersSpec = Field(
        default_factory=WorkersSpec, description="How many slots the job takes."
    )
    priority_class_name: Name | None = Field(
        default=None,
        description="PriorityClass whose value orders the jobs that wait. A class that does not "
        "exist counts as 0.",
    )
    suspend: bool = Field(
        default=False,
        description="true: the job checkpoints and gives its slot back; false again: it resumes.",
    )
    checkpoint: CheckpointSpec = Field(
        default_factory=CheckpointSpec, description="How much work may be lost."
    )
    output: OutputSpec = Field(description="Where the adapter goes.")
    backoff_limit: int = Field(
        default=6, ge=0, le=1000, description="Failures of a worker until the job has failed."
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Seconds after startTime at which an unfinished job has failed.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="Seconds after which a finished job is deleted. Its adapter stays.",
    )


class ProgressStatus(Record):
    """How far a job is."""

    step: int = Field(default=0, description="Finished optimizer steps.")
    total_steps: int = Field(default=0, description="Steps of the whole job; 0: not known yet.")
    loss: float | None = Field(default=None, description="Training loss of the last step.")
    tokens_per_second: float = Field(
        default=0, description="Real tokens per second over the last heartbeats, pauses included."
    )
    tokens: int = Field(default=0, description="Real tokens of finished steps.")
    eta_seconds: float | None = Field(default=None, description="Seconds to the end, estimated.")


class CheckpointStatus(Record):
    """The checkpoint from which the job would resume."""

    step: int = Field(description="Finished steps that it holds.")
    path: str = Field(description="Directory of the checkpoint.")


class AdapterStatus(Record):
    """The finished adapter."""

    path: str = Field(description="Directory that peft loads.")


class EvaluationStatus(Record):
    """Losses on the held-out rows."""

    base_loss: float = Field(description="Of the base model.")
    tuned_loss: float = Field(description="Of the base model with the adapter.")


class FinetuneJobStatus(Record):
    """What the operator says about a job."""

    observed_generation: int | None = Field(
        default=None, description="Generation of the spec that this status is about."
    )
    state: str | None = Field(default=None, description="The conditions in one word, for people.")
    conditions: list[Condition] | None = Field(
        default=None, description="The lifecycle; docs/conditions.md lists types and reasons."
    )
    epoch: int | None = Field(
        default=None,
        description="Fencing token of the newest placement. A worker with a lower one may not "
        "write any more.",
    )
    slot: str | None = Field(
        default=None, description="HarvestSlot on which the job is placed, as namespace/name."
    )
    progress: ProgressStatus | None = Field(default=None, description="How far the job is.")
    step: str | None = Field(default=None, description="step/totalSteps, for people.")
    loss: str | None = Field(default=None, description="progress.loss, for people.")
    tokens_per_second: str | None = Field(
        default=None, description="progress.tokensPerSecond, for people."
    )
    eta: str | None = Field(default=None, description="progress.etaSeconds, for people.")
    checkpoint: CheckpointStatus | None = Field(default=None, description="Newest checkpoint.")
    adapter: AdapterStatus | None = Field(default=None, description="The finished adapter.")
    evaluation: EvaluationStatus | None = Field(
        default=None, description="Losses on the held-out rows."
    )
    attempts: int | None = Field(default=None, description="Failures of workers so far.")
    retry_at: Timestamp | None = Field(
        default=None, description="No placement before this time (back-off after a failure)."
    )
    start_time: Timestamp | None = Field(default=None, description="When the job was first placed.")
    completion_time: Timestamp | None = Field(
        default=None, description="When the job succeeded or failed."
    )


# Rules that read spec and status, so they stand at the root of the resource. The four parts decide
# what a checkpoint means: another value would resume a run that is no longer the same.
ROOT_RULES = [
    cel(
        "!has(oldSelf.status) || !has(oldSelf.status.epoch) || oldSelf.status.epoch == 0 || "
        f"(has(self.spec.{field}) == has(oldSelf.spec.{field}) && "
        f"(!has(self.spec.{field}) || self.spec.{field} == oldSelf.spec.{field}))",
        f"spec.{field} cannot change once the job has been placed: make a new job",
    )
    for field in ("model", "dataset", "adapter", "output")
]
