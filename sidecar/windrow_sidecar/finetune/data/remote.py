"""Whether a place that could not be reached may answer later, or the job names it wrongly.

As the clients of the field have it (urllib3's and the Hub's own lists of what is tried again): no
connection, 408, 425, 429 and 5xx pass; any other answer, 401, 403 and 404 first of all, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Of http(s)://, of the Hub, of s3://.
CLIENTS = ("aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "botocore")
_PASSES = (408, 425, 429)


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
