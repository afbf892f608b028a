"""Reach places on other machines: with which credentials, and what it means that one cannot be.

A place that could not be reached may answer later, or the job names it wrongly. As the clients of
the field have it (urllib3's and the Hub's own lists of what is tried again): no connection, 408,
425, 429 and 5xx pass; any other answer, 401, 403 and 404 first of all, stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from windrow.conditions import Reason
from windrow.errors import UserError

# Of http(s)://, of the Hub, of s3://.
CLIENTS = ("aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "botocore")
_PASSES = (408, 425, 429)


# What a Secret may hold for each scheme, by the names that the field's own clients read from an
# environment.
_NEEDED = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "hf": ("HF_TOKEN",),
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a Secret of the job's namespace holds; empty: the worker's own environment counts.

    Attributes:
        secret: its name.
        values: by key; never shown.
    """

    secret: str = ""
    values: Mapping[str, str] = field(default_factory=dict, repr=False)


NO_CREDENTIALS = Credentials()


def storage_options(url: str, credentials: Credentials) -> dict[str, Any]:
    """Return what fsspec's file system of a URL is opened with.

    Args:
        url: a name without a scheme is one of the Hub.
        credentials: for it.

    Raises:
        UserError: the Secret lacks a key.
    """
    if not credentials.secret:
        return {}
    scheme, values = urlsplit(url).scheme or "hf", credentials.values
    missing = [key for key in _NEEDED.get(scheme, ()) if not values.get(key)]
    if missing:
        raise UserError(
            f"Secret {credentials.secret!r} has no {' and no '.join(missing)}",
            field="secretRef",
            remedy=f"Add {', '.join(missing)} to the Secret, as {scheme}:// needs them.",
            reason=Reason.CREDENTIALS_MISSING,
        )
    if scheme == "hf":
        return {"token": values["HF_TOKEN"]}
    if scheme != "s3":
        return {}
    region = values.get("AWS_REGION") or values.get("AWS_DEFAULT_REGION")
    endpoint = values.get("AWS_ENDPOINT_URL_S3") or values.get("AWS_ENDPOINT_URL")
    options: dict[str, Any] = {
        "key": values["AWS_ACCESS_KEY_ID"],
        "secret": values["AWS_SECRET_ACCESS_KEY"],
        "token": values.get("AWS_SESSION_TOKEN"),
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": region} if region else {},
    }
    return {name: value for name, value in options.items() if value}


def is_of_client(error: BaseException) -> bool:
    """Whether a client has raised it: what they raise of a connection is not always an OSError."""
    return type(error).__module__.partition(".")[0] in CLIENTS


def lacks_credentials(error: BaseException) -> bool:
    """Whether nobody has been asked, since the worker has nothing to show (botocore's)."""
    return type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError")


def answers_later(error: BaseException) -> bool | None:
    """Tell from an error and its causes; None: they say nothing of a network."""
    for cause in _causes(error):
        if type(cause).__name__ == "OfflineModeIsEnabled" or lacks_credentials(cause):
            return False  # settings of whoever runs the worker; the former is a ConnectionError
        if (status := _status_of(cause)) is not None:
            return status >= 500 or status in _PASSES
        if is_of_client(cause) or isinstance(cause, ConnectionError | TimeoutError):
            return True
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an error is about."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None) or getattr(error, "status", None)
    return found if isinstance(found, int) else None
