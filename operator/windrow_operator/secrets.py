"""Read the Secrets that a job names, to hand what they hold to that job's worker alone.

A Secret is used only if its owner has labelled it for that: the right to create jobs in a namespace
is no right to read its Secrets. They are read again for each placement and kept nowhere.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field

from windrow.conditions import Reason
from windrow.crd import FinetuneJobSpec
from windrow.crd.dataset import SecretRef
from windrow.errors import UserError
from windrow_operator.kube import ApiError, Kube, ObjectNotFound

LABEL = "windrow.dev/credentials"
# What workers understand; nothing else of a Secret leaves the API server's answer.
KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "HF_TOKEN",
)
# Of the Secret of spec.model: models come from the Hub.
MODEL_KEYS = ("HF_TOKEN",)
# Of the Secret of spec.tracking, which reaches other servers.
TRACKING_KEYS = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "WANDB_BASE_URL",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    "WANDB_API_KEY",
)
_FORBIDDEN = 403


@dataclass(frozen=True, slots=True)
class JobSecrets:
    """Secrets of a job, by key; never shown."""

    dataset: Mapping[str, str] = field(default_factory=dict, repr=False)
    output: Mapping[str, str] = field(default_factory=dict, repr=False)
    tracking: Mapping[str, str] = field(default_factory=dict, repr=False)
    model: Mapping[str, str] = field(default_factory=dict, repr=False)


def names_secrets(spec: FinetuneJobSpec) -> bool:
    """Return whether a job names any Secret."""
    named = (spec.model, spec.dataset, spec.output)
    return any(part.secret_ref for part in named) or _of_tracking(spec) is not None


def _of_tracking(spec: FinetuneJobSpec) -> SecretRef | None:
    return spec.tracking.secret_ref if spec.tracking else None


async def read_secrets(kube: Kube, namespace: str, spec: FinetuneJobSpec) -> JobSecrets:
    """Return what the Secrets that `spec` names hold.

    Raises:
        UserError: one is not there, is not labelled, or may not be read; who must do what.
        ApiError: the API server does not answer.
    """
    rows, adapter, figures = spec.dataset.secret_ref, spec.output.secret_ref, _of_tracking(spec)
    place, base = "spec.tracking.secretRef", spec.model.secret_ref
    return JobSecrets(
        await _read(kube, namespace, rows.name, "spec.dataset.secretRef") if rows else {},
        await _read(kube, namespace, adapter.name, "spec.output.secretRef") if adapter else {},
        await _read(kube, namespace, figures.name, place, TRACKING_KEYS) if figures else {},
        await _read(kube, namespace, base.name, "spec.model.secretRef", MODEL_KEYS) if base else {},
    )


async def read_server_key(kube: Kube, namespace: str, name: str, key: str) -> str:
    """Return the key that the servers of a namespace ask for.

    Raises:
        UserError: the Secret is not there, is not labelled, may not be read, or lacks the key.
        ApiError: the API server does not answer.
    """
    where = "spec.access.serverKeySecret"
    return (await _read(kube, namespace, name, where, (key,)))[key]


async def _read(
    kube: Kube, namespace: str, name: str, where: str, keys: tuple[str, ...] = KEYS
) -> dict[str, str]:
    def refused(problem: str, remedy: str) -> UserError:
        return UserError(problem, field=where, remedy=remedy, reason=Reason.SECRET_UNREADABLE)

    try:
        body = await kube.get(f"/api/v1/namespaces/{namespace}/secrets/{name}")
    except ObjectNotFound:
        raise refused(
            f"there is no Secret {name!r} in namespace {namespace}", "Create it there."
        ) from None
    except ApiError as error:
        if error.status != _FORBIDDEN:
            raise
        raise refused(
            f"the operator may not read Secrets of namespace {namespace}",
            "An administrator of Windrow adds it to secrets.namespaces of the chart.",
        ) from error
    if (body["metadata"].get("labels") or {}).get(LABEL) != "true":
        raise refused(
            f"Secret {name!r} is not meant for jobs",
            f"Its owner labels it: kubectl label secret -n {namespace} {name} {LABEL}=true",
        )
    values = {key: _decoded(text) for key, text in (body.get("data") or {}).items() if key in keys}
    if not values:
        raise refused(f"Secret {name!r} holds no credentials", f"Its keys are {', '.join(keys)}.")
    return values


def _decoded(text: str) -> str:
    try:
        return base64.b64decode(text).decode().strip()
    except (binascii.Error, UnicodeDecodeError):
        return ""
