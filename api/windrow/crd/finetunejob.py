"""Fields of a FinetuneJob, and of its status."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from windrow.crd.adapter import AdapterSpec
from windrow.crd.common import CONDITIONS_BY_TYPE, Condition
from windrow.crd.dataset import DatasetSpec, SecretRef
from windrow.crd.texts import Name, Place, Text
from windrow.crd.tracking import TrackingSpec
from windrow.crd.training import CheckpointSpec, TrainingSpec
from windrow.crd.values import NAME_MAX, NotNegative, Record, Timestamp, cel, invalid
from windrow.outputs import is_bucket


def _revision(text: str) -> str:
    """Refuse what no ref of git is: the Hub's client makes a file of its cache of it."""
    if text.startswith("/") or ".." in text.split("/"):
        raise invalid(f"{text!r} is not a revision", "Write a branch, a tag or a commit.")
    return text


Revision = Annotated[Text, AfterValidator(_revision)]


class ModelSpec(Record):
    """The base model."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.secretRef) || !self.name.matches('^[./]')",
                    "secretRef has a use for a model of the Hub only",
                )
            ]
        }
    )

    name: Text = Field(
        description="Hub name, or path of a transformers model directory. Matched with what the "
        "decode pods serve: on a pod that serves the same model its weights are shared."
    )
    revision: Revision = Field(default="main", description="Revision of a Hub model.")
    quantization: Literal["none", "nf4", "int8"] = Field(
        default="none",
        description="Form of the frozen weights: as they are, or in 4 or 8 bits by "
        "bitsandbytes. A quantised base is the worker's own, it is not shared with decode.",
    )
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Credentials for a model of the Hub that decode does not serve: HF_TOKEN. "
        "Left out: the HF_TOKEN of the dataset's or the output's Secret, or what the sidecar's own "
        "environment gives.",
    )

    @model_validator(mode="after")
    def _secret_has_a_use(self) -> Self:
        if self.secret_ref is not None and self.name.startswith((".", "/")):
            raise invalid(
                f"secretRef has no use: {self.name!r} is a path",
                "Leave it out, or name a model of the Hub (owner/name).",
            )
        return self


class WorkersSpec(Record):
    """Number of slots that a job takes."""

    min: int = Field(default=1, ge=1, le=1, description="Fewest workers. v1alpha1 runs one.")
    max: int = Field(default=1, ge=1, le=1, description="Most workers. v1alpha1 runs one.")


ServedName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=NAME_MAX),
]


class CanarySpec(Record):
    """Check of a version before a served name points to it."""

    prompt: Text = Field(
        default_factory=lambda: "Hello",
        description="Prompt of the request that the servers have to answer by the new version.",
    )
    max_loss_increase: NotNegative | None = Field(
        default=None,
        description="By how much its evaluation loss may be above that of the version served so "
        "far, or above the base model's where there is none. Default: any.",
    )


class DeploySpec(Record):
    """Loading of the finished adapter into the serving pods."""

    enabled: bool = Field(
        default=False,
        description="true: load it, as NAMESPACE.NAME of the job, into every decode and "
        "prefill instance of the model whose HarvestPolicy has `access.adapters`. Deleting the job "
        "unloads it.",
    )
    name: ServedName | None = Field(
        default=None,
        description="Name behind NAMESPACE. in place of the job's. Jobs of a namespace with one "
        "name are versions of one adapter: the name points to the newest that passes its canary, "
        "and back to the one before when that job is deleted.",
    )
    canary: CanarySpec | None = Field(
        default=None,
        description="Check of this version before the name points to it. Left out: a short prompt.",
    )
    pinned: bool = Field(
        default=False, description="true: the server keeps it in memory when others come."
    )


class HubSpec(Record):
    """A repository of the Hub that gets the finished adapter and its model card."""

    repository: Annotated[
        str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$", max_length=NAME_MAX)
    ] = Field(description="Name of the repository, as owner/name. It is made where there is none.")
    private: bool = Field(
        default_factory=lambda: True,
        description="true (the default): one that is made is private.",
    )


class OutputSpec(Record):
    """Destination of the adapter."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    r"!self.destination.matches('(^|/)\\.\\.(/|$)') && "
                    r"!self.destination.matches('^(file:)?[./]*$')",
                    "destination must name a directory below a volume, without ..",
                ),
                cel(
                    r"!self.destination.startsWith('s3://') || "
                    r"self.destination.matches('^s3://[^/?#]+/+[^/?#]')",
                    "destination must name a folder of a bucket: s3://bucket/folder",
                ),
                cel(
                    "!has(self.secretRef) || self.destination.startsWith('s3://') || has(self.hub)",
                    "secretRef has a use for s3:// and hub only",
                ),
                cel(
                    "!has(self.hub) || has(self.secretRef)",
                    "hub needs a secretRef, whose HF_TOKEN may write to the repository",
                ),
            ]
        }
    )

    destination: Place = Field(
        description="Directory that gets the adapter, on a volume of the policy or as "
        "s3://bucket/folder. Checkpoints are below it while the job runs. No two jobs may write "
        "to one."
    )
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Credentials for an s3:// destination and for hub (HF_TOKEN). Default: those "
        "of the sidecar's environment; hub has none.",
    )
    hub: HubSpec | None = Field(
        default=None,
        description="Repository of the Hub to push the adapter to once it is at its destination.",
    )
    deploy: DeploySpec = Field(
        default_factory=DeploySpec, description="Loading of the adapter into serving pods."
    )

    @model_validator(mode="after")
    def _secret_has_a_use(self) -> Self:
        if self.secret_ref is not None and not is_bucket(self.destination) and self.hub is None:
            raise invalid(
                f"secretRef has no use: {self.destination!r} is a path",
                "Leave it out, or write to s3://bucket/folder.",
            )
        if self.hub is not None and self.secret_ref is None:
            raise invalid(
                "hub needs a token",
                "Name a Secret in secretRef whose HF_TOKEN may write to the repository.",
            )
        return self


# One name, or a namespace and a name.
_PART = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
PolicyKey = Annotated[
    str, StringConstraints(pattern=rf"^({_PART}/)?{_PART}$", max_length=2 * NAME_MAX + 1)
]
MANAGED_BY_US: Final = "windrow.dev/operator"
_TAIL = r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?"
ManagedBy = Annotated[str, StringConstraints(pattern=rf"^{_PART}/{_TAIL}$", max_length=63)]


def _not_of_the_system(name: str) -> str:
    if name.startswith("system-"):
        raise invalid(
            f"{name!r} is a PriorityClass of the cluster's own pods",
            "Name one that an administrator has made for jobs, or leave it out.",
        )
    return name


JobPriorityClass = Annotated[
    Name,
    AfterValidator(_not_of_the_system),
    WithJsonSchema(
        {
            "type": "string",
            "minLength": 1,
            "maxLength": NAME_MAX,
            "x-kubernetes-validations": [
                cel(
                    "!self.startsWith('system-')",
                    "system- classes are the cluster's own: name one that was made for jobs",
                )
            ],
        }
    ),
]
_DEPLOYS = (
    "has(self.output.deploy) && has(self.output.deploy.enabled) && self.output.deploy.enabled"
)
# Jobs that were accepted before may go on and be suspended: these hold where a job is created.
_SERVABLE = [
    cel(f"oldSelf.hasValue() || !({_DEPLOYS}) || !has(self.adapter) || {honoured}", message)
    | {"optionalOldSelf": True}
    for honoured, message in (
        (
            "!has(self.adapter.type) || self.adapter.type == 'lora'",
            "output.deploy: servers load LoRA adapters alone",
        ),
        (
            "!has(self.adapter.lora) || !has(self.adapter.lora.useDora) || "
            "!self.adapter.lora.useDora",
            "output.deploy: servers leave out what DoRA learns besides the two matrices",
        ),
        (
            "!has(self.adapter.lora) || !has(self.adapter.lora.bias) || "
            "self.adapter.lora.bias == 'none'",
            "output.deploy: servers leave out biases that were trained",
        ),
    )
]


class FinetuneJobSpec(Record):
    """One finetuning run on harvested compute."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                *_SERVABLE,
                cel(
                    "(has(self.dataset.format) && self.dataset.format == 'preference') == "
                    "(has(self.training.method) && self.training.method == 'dpo')",
                    "training.method dpo and dataset.format preference go together",
                ),
                cel(
                    "!has(self.training.method) || self.training.method != 'dpo' || "
                    "!has(self.adapter) || !has(self.adapter.lora) || "
                    "!has(self.adapter.lora.bias) || self.adapter.lora.bias == 'none'",
                    "training.method dpo: trained biases stay when the adapter is off",
                ),
                cel(
                    "!has(self.checkpoint) || !has(self.checkpoint.resumeFrom) || "
                    "!self.checkpoint.resumeFrom.startsWith('s3://') || "
                    "self.output.destination.startsWith('s3://')",
                    "checkpoint.resumeFrom is read from a bucket by the credentials of the output: "
                    "the destination has to be in a bucket as well",
                ),
            ]
        }
    )

    model: ModelSpec = Field(description="The base model.")
    dataset: DatasetSpec = Field(description="The rows to train on.")
    adapter: AdapterSpec = Field(default_factory=AdapterSpec, description="Adapter to train.")
    training: TrainingSpec = Field(description="Settings of the training.")
    workers: WorkersSpec = Field(
        default_factory=WorkersSpec, description="Slots that the job takes."
    )
    priority_class_name: JobPriorityClass | None = Field(
        default=None,
        description="PriorityClass whose value orders the jobs that wait. A job of a class that "
        "does not exist is not placed; system- classes are the cluster's own.",
    )
    policies: list[PolicyKey] = Field(
        default_factory=list,
        max_length=16,
        description="HarvestPolicies under which the job may be placed, as name (of the job's "
        "namespace) or namespace/name. Empty: every one that admits it.",
    )
    managed_by: ManagedBy | None = Field(
        default=None,
        description="Controller that looks after the job. Where it is another than "
        "windrow.dev/operator, the operator leaves the job alone. Cannot change.",
        json_schema_extra={
            "x-kubernetes-validations": [cel("self == oldSelf", "managedBy cannot change")]
        },
    )
    suspend: bool = Field(
        default=False,
        description="true: the job checkpoints and gives its slot back; false again: it resumes.",
    )
    checkpoint: CheckpointSpec = Field(
        default_factory=CheckpointSpec, description="Limit on the work that may be lost."
    )
    output: OutputSpec = Field(description="Destination of the adapter.")
    tracking: TrackingSpec | None = Field(
        default=None,
        description="Servers that get the job's figures as it runs: MLflow, Weights & Biases. "
        "None of them ends or delays a job.",
    )
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
    def _rows_of_the_method(self) -> Self:
        form, method = self.dataset.format, self.training.method
        if (form == "preference") != (method == "dpo"):
            raise invalid(
                f"training.method {method} does not learn from rows of the format {form}",
                "Write dataset.format: preference with training.method: dpo, or neither.",
            )
        lora = self.adapter.lora
        if method == "dpo" and lora is not None and lora.bias != "none":
            raise invalid(
                "adapter.lora.bias: trained biases stay when the adapter is off, and dpo compares "
                "with the base model",
                "Write none.",
            )
        return self

    @model_validator(mode="after")
    def _rows_to_evaluate_on(self) -> Self:
        if self.training.eval_every_steps is not None and not self.dataset.evaluates:
            raise invalid(
                "training.evalEverySteps has no rows to evaluate on",
                "Set dataset.evalFraction above 0, or name rows in dataset.evalSource.",
            )
        return self

    @model_validator(mode="after")
    def _losses_for_the_canary(self) -> Self:
        canary = self.output.deploy.canary
        by_loss = canary is not None and canary.max_loss_increase is not None
        if by_loss and not self.dataset.evaluates:
            raise invalid(
                "output.deploy.canary.maxLossIncrease has no losses to compare",
                "Set dataset.evalFraction above 0, or name rows in dataset.evalSource.",
            )
        return self

    @model_validator(mode="after")
    def _credentials_for_the_checkpoint(self) -> Self:
        place = self.checkpoint.resume_from
        if place is not None and is_bucket(place) and not is_bucket(self.output.destination):
            raise invalid(
                f"checkpoint.resumeFrom {place!r} is read by the credentials of the output, and "
                f"{self.output.destination!r} is a path",
                "Write the output to s3:// as well, or name a path on a volume.",
            )
        return self


class ProgressStatus(Record):
    """Progress of a job."""

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
    cut_rows: int = Field(
        default=0,
        description="Rows longer than training.maxSequenceLength, which have lost their end.",
    )
    eta_seconds: float | None = Field(default=None, description="Seconds to the end, estimated.")
    joined_with: int | None = Field(
        default=None,
        description="Other jobs whose rows run in the same tasklets. Left out: none, its rows have "
        "turns of their own, or the worker alone.",
    )


class CheckpointStatus(Record):
    """The checkpoint from which the job would resume."""

    step: int = Field(description="Finished steps that it holds.")
    path: str = Field(description="Directory of the checkpoint.")


class AdapterStatus(Record):
    """The finished adapter."""

    path: str = Field(description="Directory that peft loads.")
    digest: str | None = Field(
        default=None,
        description="SHA-256 over its configuration and weights, by which a version is known.",
    )
    served_at: Timestamp | None = Field(
        default=None, description="When servers first answered by it."
    )


class EvaluationStatus(Record):
    """Losses on the held-out rows."""

    base_loss: float = Field(description="Loss of the base model.")
    tuned_loss: float = Field(description="Loss of the base model with the adapter.")


class EvictionCount(Record):
    """Count of evictions of a job for one reason."""

    reason: str = Field(description="Reason in the condition Evicted.")
    count: int = Field(ge=1, description="Count of evictions.")


class UserErrorStatus(Record):
    """Change that a person has to make, where the job is invalid or failed for what it asks."""

    field: str = Field(
        default="",
        description="Path of what is wrong, in the spec or in the dataset: rows.jsonl:17.",
    )
    remedy: str = Field(default="", description="Text to write instead.")


class FinetuneJobStatus(Record):
    """Status of a job, written by the operator."""

    observed_generation: int | None = Field(
        default=None, description="Generation of the spec that this status is about."
    )
    state: str | None = Field(default=None, description="The conditions in one word, for people.")
    conditions: list[Condition] | None = Field(
        default=None,
        description="The lifecycle; docs/conditions.md lists types and reasons.",
        json_schema_extra=CONDITIONS_BY_TYPE,
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
    user_error: UserErrorStatus | None = Field(
        default=None,
        description="What is to be changed, where the spec or what it names is wrong; the message "
        "of the condition says the same in a sentence.",
    )
    attempts: int | None = Field(default=None, description="Failures of workers so far.")
    evictions: list[EvictionCount] | None = Field(
        default=None,
        description="How often a placement ended before the job did, by reason.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["reason"],
        },
    )
    losses: int | None = Field(
        default=None,
        description="Placements in a row that were lost with their sidecar or worker and without a "
        "new checkpoint.",
    )
    rejections: int | None = Field(
        default=None, description="Placements in a row that the sidecar did not take."
    )
    retry_at: Timestamp | None = Field(
        default=None, description="No placement before this time (back-off after a failure)."
    )
    start_time: Timestamp | None = Field(default=None, description="When the job was first placed.")
    completion_time: Timestamp | None = Field(
        default=None, description="When the job succeeded or failed."
    )


# Rules that read spec and status, so they stand at the root of the resource. The five parts decide
# what a checkpoint means: another value would resume another run. What a
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
