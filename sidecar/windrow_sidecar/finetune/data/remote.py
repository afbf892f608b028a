"""Reach places on other machines: with which credentials, and what it means that one cannot be.

A place that could not be reached may answer later, or the job names it wrongly. As the clients of
the field have it (urllib3's and the Hub's own lists of what is tried again): no connection, 408,
425, 429 and 5xx but for 501 and 505 pass; any other answer, 401, 403 and 404 first of all, stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.wheel import install_client
from windrow_sidecar.finetune.data.outside import spare_of_proxy

# Of http(s)://, of the Hub, of s3://.
CLIENTS = ("aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "botocore")
_PASSES = (408, 425, 429)


# What a Secret may hold for each scheme, by the names that the field's own clients read from an
# environment.
_NEEDED = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "hf": ("HF_TOKEN",),
}


_AMAZON = ("amazonaws.com", "amazonaws.com.cn")
# OSS, COS and TOS, which refuse the bucket in the path; the second names of the latter two.
_BY_HOST_ALONE = (
    *("aliyuncs.com", "myqcloud.com", "tencentcos.cn"),
    *("volces.com", "ivolces.com", "bytepluses.com"),
)
# As clients written in Rust read it (object_store): whether a store wants the bucket in its host.
_BY_HOST = "AWS_VIRTUAL_HOSTED_STYLE_REQUEST"
_REGION = (
    "Give the bucket's region by AWS_REGION in the Secret, and with an endpoint that of the region."
)
_KEYS = "Correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: they have to be of this store."
_TOKEN = "Write fresh credentials into the Secret, with their AWS_SESSION_TOKEN, or give a role."
# What to do about a store's answer, by its code; to a HEAD it is the status.
_REMEDIES = {
    **dict.fromkeys(("PermanentRedirect", "TemporaryRedirect", "301", "307"), _REGION),
    **dict.fromkeys(
        ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"), _REGION
    ),
    **dict.fromkeys(("ExpiredToken", "InvalidToken", "TokenRefreshRequired"), _TOKEN),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch"), _KEYS),
    "400": f"Check credentials and region. {_TOKEN} {_REGION}",
    **dict.fromkeys(
        ("SecondLevelDomainForbidden", "PathStyleDomainForbidden", "InvalidPathAccess"),
        f"Write {_BY_HOST}: true into the Secret: this store wants the bucket in its host's name.",
    ),
    "RequestTimeTooSkewed": "Set the clock of the node, which differs from that of the store.",
    "InvalidObjectState": "Restore the object from its archive, or name a copy of it.",
    **dict.fromkeys(
        ("AccessDenied", "403"),
        "Let these credentials list, read and, for output, write and delete there; a store answers "
        "so too where an object does not exist.",
    ),
}
# Answers of a server that has understood and will not do it, whenever it is asked.
_STAYS = (501, 505)


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials in a Secret of the job's namespace; empty: the worker's own environment counts.

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
    scheme, values = urlsplit(url).scheme or "hf", credentials.values
    if scheme in ("http", "https"):
        spare_of_proxy(url)
        # Else this client passes by the proxy that all others take.
        return {"client_kwargs": {"trust_env": True}}
    if scheme == "hf":
        spare_of_proxy(os.environ.get("HF_ENDPOINT", ""))
    if not credentials.secret:
        return {"config_kwargs": found} if scheme == "s3" and (found := _of_store("")) else {}
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
        "config_kwargs": _of_store(endpoint or "", values.get(_BY_HOST)),
    }
    return {name: value for name, value in options.items() if value}


def open_file_system(url: str, credentials: Credentials, *, anonymous: bool = False) -> Any:  # noqa: ANN401 - fsspec's
    """Return the file system of a destination, by fsspec, without a cache of listings.

    Args:
        url: of the destination.
        credentials: for it.
        anonymous: whether the Hub is asked without the token of this process.

    Raises:
        UserError: the Secret lacks a key, or there is no client for the scheme.
    """
    import fsspec

    scheme = urlsplit(url).scheme
    options = storage_options(url, credentials)
    if anonymous and scheme == "hf":
        options["token"] = False
    try:
        return fsspec.filesystem(
            scheme,
            # Fences and checkpoints of other workers must be seen at once; secrets are not kept.
            use_listings_cache=False,
            skip_instance_cache=True,
            **options,
        )
    except ImportError as error:
        raise UserError(
            f"{url}: this worker has no client for {scheme}:// ({error})",
            field="spec.output.destination",
            remedy="Where the worker runs (on a cluster the sidecar's image): "
            f"{install_client(scheme)}, or name a path.",
            reason=Reason.OUTPUT_NOT_WRITABLE,
        ) from error


def _of_store(endpoint: str, by_host: str | None = None) -> dict[str, Any]:
    """Return what a client of another store than Amazon's is configured with.

    Such stores refuse, or store as they come, bodies in chunks with a checksum behind them
    (aws-chunked), which clients of Amazon's send unasked. Some know a bucket by its host alone.
    What the worker's own environment sets counts.

    Args:
        endpoint: as a Secret names it; "": that of the worker's own settings counts.
        by_host: what the Secret says of it, `true` or `false`; None: nothing.
    """
    try:
        from botocore.session import Session
    except ImportError:
        return {}  # opening the store says what to install
    own = Session()
    endpoint = endpoint or _own_endpoint(own)
    spare_of_proxy(endpoint)
    host = urlsplit(endpoint).hostname or ""
    if not host or _is_below(host, _AMAZON):
        return {}
    found: dict[str, Any] = {
        option: "when_required"
        for option in ("request_checksum_calculation", "response_checksum_validation")
        if not _is_set(own, option)
    }
    by_host = by_host or os.environ.get(_BY_HOST)
    if by_host:
        style = "virtual" if by_host.strip().lower() in ("true", "1") else "path"
        found["s3"] = {"addressing_style": style}
    elif _is_below(host, _BY_HOST_ALONE) and not _is_set(own, "s3"):
        found["s3"] = {"addressing_style": "virtual"}
    return found


def _own_endpoint(own: Any) -> str:  # noqa: ANN401 - botocore's
    """Return the endpoint of S3 that the environment or a profile names; "": Amazon's."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            return os.environ[name]
    profile = _profile(own)
    services = (own.full_config.get("services") or {}).get(profile.get("services"), {})
    of_s3 = services.get("s3") or {}
    return str(of_s3.get("endpoint_url") or profile.get("endpoint_url") or "")


def _is_set(own: Any, option: str) -> bool:  # noqa: ANN401 - botocore's
    return bool(os.environ.get(f"AWS_{option.upper()}")) or option in _profile(own)


def _profile(own: Any) -> Mapping[str, Any]:  # noqa: ANN401 - botocore's
    from botocore.exceptions import BotoCoreError

    try:
        found: Mapping[str, Any] = own.get_scoped_config()
    except BotoCoreError:  # of a profile that is not there; the client says so
        return {}
    return found


def _is_below(host: str, domains: tuple[str, ...]) -> bool:
    return any(host == domain or host.endswith(f".{domain}") for domain in domains)


def is_of_client(error: BaseException) -> bool:
    """Return whether a client raised it: their connection errors are not always an OSError."""
    return type(error).__module__.partition(".")[0] in CLIENTS


def lacks_credentials(error: BaseException) -> bool:
    """Return whether nothing was sent because the worker has no credentials (botocore's)."""
    return type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError")


def remedy_of(error: BaseException) -> str:
    """Return what to do about a store's answer; empty: it is none, or says so itself."""
    for cause in _causes(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore's
            return _REMEDIES.get(str((response.get("Error") or {}).get("Code")), "")
    return ""


def answers_later(error: BaseException) -> bool | None:
    """Tell from an error and its causes; None: they say nothing of a network."""
    for cause in _causes(error):
        if type(cause).__name__ == "OfflineModeIsEnabled" or lacks_credentials(cause):
            return False  # settings of the worker's user; the former is a ConnectionError
        if (status := _status_of(cause)) is not None:
            return (status >= 500 and status not in _STAYS) or status in _PASSES
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
