"""What a user may write in a FinetuneJob, and what its status holds."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from windrow.crd.adapter import AdapterSpec
from windrow.crd.common import Condition
from windrow.crd.dataset import DatasetSpec
from windrow.crd.texts import Name, Place, Text
from windrow.crd.training import CheckpointSpec, TrainingSpec
from windrow.crd.values import Record, Timestamp, cel, invalid


class ModelSpec(Record):
    """The base model."""

    name: Text = Field(
        description="Hub name, or path of a transformers model directory. Matched with what the "
        "decode pods serve: on a pod that serves the same model its weights are shared."
    )
    revision: Text = Field(default="main", description="Revision of a Hub model.")
    quantization: Literal["none", "nf4", "int8"] = Field(
        default="none",
        description="How the frozen weights are kept: as they are, or in 4 or 8 bits by "
        "bitsandbytes. A quantised base is the worker's own, it is not shared with decode.",
    )


class WorkersSpec(Record):
    """How many slots a job takes."""

    min: int = Field(default=1, ge=1, le=1, description="Fewest workers. v1alpha1 runs one.")
    max: int = Field(default=1, ge=1, le=1, description="Most workers. v1alpha1 runs one.")


class DeploySpec(Record):
    """Loading of the finished adapter into the serving pods."""

    enabled: bool = Field(
        default=False,
        description="Whether to load it, as NAMESPACE.NAME of the job, into every decode and "
        "prefill instance of the model whose HarvestPolicy has `access.adapters`. Deleting the job "
        "unloads it.",
    )
    pinned: bool = Field(
        default=False, description="Whether the server keeps it in memory when others come."
    )


class OutputSpec(Record):
    """Where the adapter goes."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    r"!self.destination.matches('(^|/)\\.\\.(/|$)') && "
                    r"!self.destination.matches('^(file:)?[./]*$')",
                    "destination must name a directory below a volume, without ..",
                ),
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
        description="PriorityClass whose value orders the jobs that wait. A job of a class that "
        "does not exist is not placed.",
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

    @model_validator(mode="after")
    def _rows_to_evaluate_on(self) -> Self:
        if self.training.eval_every_steps is not None and not self.dataset.eval_fraction:
            raise invalid(
                "training.evalEverySteps has no rows to evaluate on",
                "Set dataset.evalFraction above 0.",
            )
        return self


class ProgressStatus(Record):
    """How far a job is."""

    step: int = Field(default=0, description="Finished optimizer steps.")
    total_steps: int = Field(default=0, description="Steps of the whole job; 0: not known yet.")
    loss: float | None = Field(default=None, description="Training loss of the last step.")
    tokens_per_second: float = Field(
        default=0, description="Real tokens per second over the last heartbeats, pauses included."
    )
    tokens: int = Field(default=0, description="Real tokens of finished steps.")
    skipped_rows: int = Field(
        default=0, description="Rows of the dataset that are wrong and were left out."
    )
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


# Rules that read spec and status, so they stand at the root of the resource. The five parts decide
# what a checkpoint means: another value would resume a run that is no longer the same. What a
# worker reads once, when it starts, can change between two workers.
ROOT_RULES = [
    cel(
        "!has(oldSelf.status) || !has(oldSelf.status.epoch) || oldSelf.status.epoch == 0 || "
        f"(has(self.spec.{field}) == has(oldSelf.spec.{field}) && "
        f"(!has(self.spec.{field}) || self.spec.{field} == oldSelf.spec.{field}))",
        f"spec.{field} cannot change once the job has been placed: make a new job",
    )
    for field in ("model", "dataset", "adapter", "training", "output")
] + [
    cel(
        "!has(oldSelf.status) || !has(oldSelf.status.slot) || "
        "self.spec.checkpoint == oldSelf.spec.checkpoint",
        "spec.checkpoint cannot change while the job has a slot: set suspend to true first",
    )
]
