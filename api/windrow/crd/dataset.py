"""Fields about the rows to train on."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from windrow.crd.texts import OBJECT_NAME, Source, Text, takes_credentials
from windrow.crd.values import NAME_MAX, Record, cel, invalid
from windrow.redaction import redacted
from windrow.rows import READ
from windrow.served_chats import Server


class SecretRef(Record):
    """A Secret of the job's namespace, which the label `windrow.dev/credentials: "true"` opens."""

    name: str = Field(
        min_length=1,
        max_length=NAME_MAX,
        pattern=OBJECT_NAME,
        description="Name of the Secret. Of its keys, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
        "AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL count for s3://, HF_TOKEN for the Hub.",
    )


Column = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]


_WEIGHT = "How often each of its rows comes in an epoch: 2 is twice, 0.25 a fourth of the rows, "
Weight = Annotated[float, Field(ge=0.001, le=100)]


class MixedSource(Record):
    """Further rows to train on, and their weight."""

    source: Source = Field(
        description="A place as in dataset.source, with rows of the same format."
    )
    weight: Weight = Field(
        default_factory=lambda: 1.0, description=f"{_WEIGHT}which the seed draws. Left out: 1."
    )


class DatasetSpec(Record):
    """The rows to train on."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.secretRef) || self.source.matches('^(s3|hf)://') || "
                    "self.source.matches('^[a-zA-Z0-9_.-]+/[a-zA-Z0-9_.-]+$') || "
                    "(has(self.mixture) && self.mixture.exists(m, "
                    "m.source.matches('^(s3|hf)://|^[a-zA-Z0-9_.-]+/[a-zA-Z0-9_.-]+$'))) || "
                    "(has(self.evalSource) && (self.evalSource.matches('^(s3|hf)://') || "
                    "self.evalSource.matches('^[a-zA-Z0-9_.-]+/[a-zA-Z0-9_.-]+$')))",
                    "secretRef has a use for s3:// and the Hub only",
                )
            ]
        }
    )

    source: Source = Field(
        description="A file, or a directory of files: JSON lines, JSON, Parquet, by "
        "their suffix. A path, s3://bucket/key, http(s)://..., or the name of a dataset on the Hub "
        "(owner/name, hf://datasets/owner/name@revision/folder)."
    )
    format: Literal["chat", "sharegpt", "instruction", "completion", "text", "preference"] = Field(
        default="chat",
        description="chat: rows with `messages`; sharegpt: rows with `conversations` of turns with "
        "`from` and `value`; instruction: rows with `instruction`, optional "
        "`input`, and `output` (alpaca); completion: rows with `prompt` and `completion`; text: "
        "rows with `text`; preference: rows with `prompt`, `chosen` and `rejected`, as text or as "
        "turns (for training.method dpo).",
    )
    weight: Weight = Field(
        default_factory=lambda: 1.0,
        description=f"{_WEIGHT}which the seed draws. Of the rows of source. Left out: 1.",
    )
    mixture: list[MixedSource] = Field(
        default_factory=list,
        max_length=16,
        description="Further places of rows, which are trained on together with those of source.",
    )
    columns: dict[str, Column] = Field(
        default_factory=dict,
        max_length=8,
        description="Rows with other names: by a field of the format, the rows' own field that "
        "takes its place, like `{prompt: question, completion: answer}`.",
    )
    split: Text = Field(
        default="train",
        description="Where files of a directory name splits (train-00000-of-00002.parquet, "
        "train/part.jsonl): which of them to read.",
    )
    served_by: Server | None = Field(
        default=None,
        description="The server that will serve the adapter. Chat rows get the form in which it "
        "gives requests to its chat template, with the fields that it adds to tools and without "
        "those that it leaves out. transformers: rows as they are. Left out: the engine of the "
        "slot where the job begins; without a slot, transformers.",
    )
    bad_rows: Literal["fail", "skip"] = Field(
        default="fail",
        description="What wrong rows mean: the job fails and names them, or they are left out and "
        "counted.",
    )
    eval_fraction: float = Field(
        default=0.02,
        ge=0,
        le=0.5,
        description="Share of the rows that is held out and on which the adapter is compared with "
        "the base model. Of no effect where evalSource is set.",
    )
    eval_source: Source | None = Field(
        default=None,
        description="Rows to compare the adapter with the base model on, in place of held-out "
        "ones: a place as in source, rows of the same format. All rows of source are trained on.",
    )
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Credentials for the sources: s3://, or the Hub. Default: what the sidecar's "
        "own environment gives.",
    )

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """Return the places of rows, each after the name of its field below `spec`."""
        named = (
            ("dataset.source", self.source),
            *((f"dataset.mixture[{i}].source", m.source) for i, m in enumerate(self.mixture)),
            ("dataset.evalSource", self.eval_source),
        )
        return tuple((field, place) for field, place in named if place is not None)

    @property
    def evaluates(self) -> bool:
        """True where there are rows to evaluate on."""
        return self.eval_source is not None or self.eval_fraction > 0

    @model_validator(mode="after")
    def _columns_of_the_format(self) -> Self:
        unknown = sorted(self.columns.keys() - READ[self.format])
        if unknown:
            raise invalid(
                f"columns: {unknown[0]!r} is not a field of the format {self.format}",
                f"Write one of {', '.join(sorted(READ[self.format]))}, then your own field.",
            )
        own = list(self.columns.values())
        if twice := [column for column in own if own.count(column) > 1]:
            raise invalid(f"columns: {twice[0]!r} is named for two fields", "Keep one of the two.")
        return self

    @model_validator(mode="after")
    def _secret_has_a_use(self) -> Self:
        used = any(takes_credentials(place) for _, place in self.sources)
        if self.secret_ref is not None and not used:
            raise invalid(
                f"secretRef has no use: {redacted(self.source)!r} takes no credentials",
                "Leave it out, or read from s3:// or the Hub.",
            )
        return self
