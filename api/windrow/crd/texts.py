"""Texts that a user may write: names, words and places."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field

from windrow.crd.values import NAME_MAX, TEXT_MAX, invalid
from windrow.outputs import BUCKET_SCHEMES, is_bucket, path_of
from windrow.redaction import redacted

# Where adapters are written to: a path in the decode pod, as mounted there, or object storage.
WRITABLE_SCHEMES = ("", "file", *BUCKET_SCHEMES)
# Where rows are read from besides: fsspec has a file system for each.
READABLE_SCHEMES = (*WRITABLE_SCHEMES, "hf", "http", "https")
# Of an object of the API server: a name that goes into a path there leads to no other object.
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
# owner/name, of a dataset on the Hub, or a path.
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def _not_blank(text: str) -> str:
    if not text.strip():
        raise invalid("is empty", "Write a value or leave the field out.")
    if text != text.strip() or any(ord(letter) < 32 for letter in text):
        problem = f"{redacted(text)!r} begins or ends with a blank, or holds a control character"
        raise invalid(problem, "Take it out.")
    return text


def _reachable(text: str, schemes: tuple[str, ...], verb: str, remedy: str) -> str:
    scheme = urlsplit(_not_blank(text)).scheme
    if scheme not in schemes:
        problem = f"{redacted(text)!r}: nothing here can {verb.format(f'{scheme}://')}"
        raise invalid(problem, remedy)
    if text.startswith("~"):
        raise invalid(f"{text!r}: only a shell knows whose home ~ is", "Write the whole path.")
    return text


def _place(text: str) -> str:
    remedy = (
        "Write a path on a volume that the decode pods mount (HarvestPolicy spec.sidecar.volumes), "
        "or s3://bucket/folder."
    )
    parts = urlsplit(_reachable(text, WRITABLE_SCHEMES, "write {} yet", remedy))
    if is_bucket(text):
        if not parts.netloc or not parts.path.strip("/") or parts.query or parts.fragment:
            raise invalid(f"{text!r} names no folder of a bucket", remedy)
    elif parts.scheme and parts.netloc not in ("", "localhost"):
        raise invalid(f"{text!r} is on another machine, {parts.netloc}", remedy)
    if ".." in (unquote(parts.path) if parts.scheme else text).split("/"):
        raise invalid(f"{text!r} climbs by ..", "Write the path that is meant.")
    if path_of(text).strip("/") in ("", "."):
        raise invalid(f"{text!r} names no directory for an adapter", remedy)
    return text


def _source(text: str) -> str:
    remedy = (
        "Write a path on a volume that the decode pods mount, s3://bucket/key, http(s)://..., or "
        "the name of a dataset on the Hub."
    )
    return _reachable(text, READABLE_SCHEMES, "read {}", remedy)


def takes_credentials(source: str) -> bool:
    """Return whether a source is one for which a Secret can hold credentials."""
    return urlsplit(source).scheme in ("s3", "hf") or bool(HUB_NAME.fullmatch(source))


Text = Annotated[str, AfterValidator(_not_blank), Field(min_length=1, max_length=TEXT_MAX)]
Place = Annotated[str, AfterValidator(_place), Field(min_length=1, max_length=TEXT_MAX)]
Source = Annotated[str, AfterValidator(_source), Field(min_length=1, max_length=TEXT_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=NAME_MAX)]
