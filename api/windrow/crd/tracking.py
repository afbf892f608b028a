"""Fields that say where the figures of a job are reported: MLflow, Weights & Biases."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from windrow.crd.dataset import SecretRef
from windrow.crd.values import NAME_MAX, TEXT_MAX, Record, cel, invalid
from windrow.redaction import redacted

_SERVER = r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$"


def _server(text: str) -> str:
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise invalid(f"{redacted(text)!r} is not the address of a server", "Write https://host.")
    return text


ServerUrl = Annotated[
    str, StringConstraints(pattern=_SERVER, max_length=TEXT_MAX), AfterValidator(_server)
]
# Of experiments, projects and runs: what both servers take.
TrackingName = Annotated[
    str, StringConstraints(pattern=r"^[^\s/][^/\n\r\t]*$", max_length=NAME_MAX)
]


class MlflowSpec(Record):
    """A server of MLflow that gets the figures of a job."""

    uri: ServerUrl | None = Field(
        default=None,
        description="Address of the tracking server, as https://host. Left out: "
        "MLFLOW_TRACKING_URI of the Secret, else of the sidecar's environment.",
    )
    experiment: TrackingName | None = Field(
        default=None,
        description="Name of the experiment, which is made where there is none. Left out: "
        "MLFLOW_EXPERIMENT_NAME of the Secret or the environment, else Default.",
    )
    run_name: TrackingName | None = Field(
        default=None, description="Name of the run. Left out: that of the job."
    )


class WandbSpec(Record):
    """A project of Weights & Biases that gets the figures of a job."""

    project: TrackingName | None = Field(
        default=None,
        description="Name of the project. Left out: WANDB_PROJECT of the Secret or the "
        "environment, else windrow.",
    )
    entity: TrackingName | None = Field(
        default=None,
        description="User or team of the project. Left out: WANDB_ENTITY of the Secret or the "
        "environment, else that of the key.",
    )
    run_name: TrackingName | None = Field(
        default=None, description="Name of the run. Left out: that of the job."
    )
    tags: list[TrackingName] = Field(
        default_factory=list, max_length=32, description="Tags of the run."
    )
    base_url: ServerUrl | None = Field(
        default=None,
        description="Address of a server of one's own. Left out: WANDB_BASE_URL of the Secret or "
        "the environment, else https://api.wandb.ai.",
    )
    mode: Literal["online", "offline"] = Field(
        default_factory=lambda: "online",
        description="online (the default): report to the server; offline: write files below "
        "wandb/ in the job's folder, for `wandb sync`.",
    )


class TrackingSpec(Record):
    """Servers that get the figures of a job: losses, rates, memory."""

    model_config = ConfigDict(
        json_schema_extra={
            "x-kubernetes-validations": [
                cel("has(self.mlflow) || has(self.wandb)", "tracking names mlflow, wandb or both")
            ]
        }
    )

    mlflow: MlflowSpec | None = Field(default=None, description="Report to a server of MLflow.")
    wandb: WandbSpec | None = Field(default=None, description="Report to Weights & Biases.")
    secret_ref: SecretRef | None = Field(
        default=None,
        description="Credentials, by the names of the clients' variables: MLFLOW_TRACKING_TOKEN, "
        "or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; WANDB_API_KEY. Left out: none.",
    )

    @model_validator(mode="after")
    def _names_a_server(self) -> Self:
        if self.mlflow is None and self.wandb is None:
            raise invalid("tracking names no server", "Write mlflow: {}, wandb: {} or both.")
        return self
