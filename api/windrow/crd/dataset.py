"""Fields about the rows to train on."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from windrow.crd.texts import Name, Source, Text, takes_credentials
from windrow.crd.values import Record, cel, invalid
from windrow.redaction import redacted


class SecretRef(Record):
    """A Secret of the job's namespace, which the label `windrow.dev/credentials: "true"` opens."""

    name: Name = Field(
        description="Name of the Secret. Of its keys, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
        "AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL count for s3://, HF_TOKEN for the Hub."
    )


class DatasetSpec(Record):
    """The rows to train on."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.secretRef) || self.source.matches('^(s3|hf)://') || "
                    "self.source.matches('^[a-zA-Z0-9_.-]+/[a-zA-Z0-9_.-]+$')",
                    "secretRef has a use for s3:// and the Hub only",
                )
            ]
        }
    )

    source: Source = Field(
        description="A file, or a directory of files: JSON lines, JSON, Parquet, told apart by "
        "their suffix. A path, s3://bucket/key, http(s)://..., or the name of a dataset on the Hub "
        "(owner/name, hf://datasets/owner/name@revision/folder)."
    )
    format: Literal["chat", "instruction", "completion", "text"] = Field(
        default="chat",
        description="chat: rows with `messages`; instruction: rows with `instruction`, optional "
        "`input`, and `output` (alpaca); completion: rows with `prompt` and `completion`; text: "
        "rows with `text`.",
    )
    split: Text = Field(
        default="train",
        description="Where files of a directory name splits (train-00000-of-00002.parquet, "
        "train/part.jsonl): which of them to read.",
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
        "the base model.",
    )
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Credentials for the source: s3://, or the Hub. Default: what the sidecar's "
        "own environment gives.",
    )

    @model_validator(mode="after")
    def _secret_has_a_use(self) -> Self:
        if self.secret_ref is not None and not takes_credentials(self.source):
            raise invalid(
                f"secretRef has no use: {redacted(self.source)!r} takes no credentials",
                "Leave it out, or read from s3:// or the Hub.",
            )
        return self
