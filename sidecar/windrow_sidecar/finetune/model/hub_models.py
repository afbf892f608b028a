"""Bring a model of the Hub here, for a reader to which the Hub shows it.

The Hub's client answers from its cache whatever the Hub says of a token. The cache is decode's, or
this pod's, and holds private and gated models of others. So a job that may not act as the pod asks
the Hub first with a token of its own, and gets the commit that the Hub has shown to it.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from windrow.conditions import Reason
from windrow.errors import Transient, UserError
from windrow.redaction import redacted
from windrow_sidecar.engines.weight_files import MODEL_FIELD
from windrow_sidecar.finetune.data.outside import spare_of_proxy
from windrow_sidecar.finetune.data.remote import Credentials, answers_later, is_of_client

# Its weights, and what its tokenizer may be made of.
_WANTED: Final = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_REMEDY: Final = "Name a transformers model directory on a mounted volume, or a Hub model."
_REMEDY_OF_JOB: Final = (
    "Name the model that decode serves, a directory on a mounted volume, or a Secret with an "
    "HF_TOKEN that may read the model (spec.model.secretRef). Who keeps the HarvestPolicy can set "
    "spec.access.podCredentials."
)


class ModelSilent(Transient):
    """The place where the model is does not answer."""


@dataclass(frozen=True, slots=True)
class HubReader:
    """Identity by which the Hub is asked for a model.

    Attributes:
        is_process: whether it is this process: with its own token, if it has one, and with what
            its cache holds where the Hub does not answer.
        token: of a job, where it is not this process; "": it has none.
    """

    is_process: bool = True
    token: str = field(default="", repr=False)

    @property
    def asks_with(self) -> str | bool | None:
        """Token for the Hub's client; None: that of this process; False: none."""
        return None if self.is_process else self.token or False

    @classmethod
    def of_job(cls, *secrets: Credentials) -> HubReader:
        """Return a job's own, by the first of its Secrets that has a token of the Hub."""
        tokens = (secret.values.get("HF_TOKEN", "") for secret in secrets)
        return cls(is_process=False, token=next(filter(None, tokens), ""))


THIS_PROCESS: Final = HubReader()


def from_hub(name: str, revision: str, reader: HubReader) -> Path:
    """Return the directory of a model's files in a cache of the Hub.

    Args:
        name: owner/name.
        revision: a branch, tag or commit.
        reader: who asks.

    Raises:
        UserError: the Hub has no such model, or does not show it to the reader.
        ModelSilent: the Hub does not answer, and this process may not answer in its place.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download

    spare_of_proxy(os.environ.get("HF_ENDPOINT", ""))
    with _told_of_hub(name, revision, reader):
        if not reader.is_process:
            url = hf_hub_url(name, "config.json", revision=revision)
            shown = get_hf_file_metadata(url, token=reader.asks_with).commit_hash
            if not shown:
                raise OSError("an answer without the commit that it is of")
            revision = shown
        bring = partial(
            snapshot_download,
            name,
            revision=revision,
            allow_patterns=_WANTED,
            token=reader.asks_with,
        )
        try:
            return Path(bring())
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
        # The cache is decode's, which may only be read here, and lacks something of the model.
        own = Path(tempfile.gettempdir()) / "windrow-hub"
        return Path(bring(cache_dir=own))


@contextmanager
def _told_of_hub(name: str, revision: str, reader: HubReader) -> Iterator[None]:
    """Raise what the Hub's client raises as an error of the job, or as one that may pass."""
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    remedy = _REMEDY if reader.is_process else _REMEDY_OF_JOB
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        problem = (
            f"{name!r} is not a directory, and the Hub has no {name!r} at {revision}, or hides it"
        )
        raise not_found(problem, remedy) from error
    except Exception as error:
        if not (isinstance(error, HFValidationError | OSError) or is_of_client(error)):
            raise
        if isinstance(error, OfflineModeIsEnabled) and not reader.is_process:
            problem = (
                f"whether this job may read {name!r} cannot be asked: the pod may not reach the "
                "Hub (HF_HUB_OFFLINE)"
            )
            raise not_found(problem, remedy) from error
        said = redacted(" ".join(str(error).split()).rstrip("."))
        if answers_later(error):
            raise ModelSilent(f"{name!r} is not a directory, and the Hub gave: {said}") from error
        raise not_found(f"{name!r} is not a directory, and the Hub gave: {said}", remedy) from error


def not_found(problem: str, remedy: str = _REMEDY) -> UserError:
    """Return the error for a model that is not there, or not for this job."""
    return UserError(problem, field=MODEL_FIELD, remedy=remedy, reason=Reason.MODEL_NOT_FOUND)
