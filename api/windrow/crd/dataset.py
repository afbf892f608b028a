"""What a user may say about the rows to train on."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from windrow.crd.texts import Name, Source, Text
from windrow.crd.values import Record, cel, invalid


class SecretRef(Record):
    """A Secret of the job's namespace."""

    name: Name = Field(description="Name of the Secret.")


class DatasetSpec(Record):
    """The rows to train on."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel(
                    "!has(self.secretRef)",
                    "secretRef is not supported yet: give the sidecar the credentials (AWS_*, "
                    "HF_TOKEN) in its environment",
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
        description="Credentials for the source, in the job's namespace. v1alpha1 does not hand "
        "them to workers.",
    )

    @field_validator("secret_ref")
    @classmethod
    def _not_yet(cls, secret: SecretRef | None) -> SecretRef | None:
        if secret is not None:
            raise invalid(
                f"Secret {secret.name!r} cannot be handed to workers yet",
                "Leave it out and give the sidecar the credentials (AWS_*, HF_TOKEN) in its "
                "environment.",
            )
        return secret
