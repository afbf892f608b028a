"""Redaction of texts: signatures in URLs, and passwords before their hosts."""

from __future__ import annotations

import logging
import re

from windrow.plain_text import RecordFormatter

_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>|]+")
_USER = re.compile(r"//[^/?#@]*@")
# Whatever a query says may be a signature: S3 and GCS have theirs in five parts, Azure in ten.
_VALUE = re.compile(r"=[^&;\s)]*")
# As messages of clients name them apart from a URL.
_NAMED = re.compile(
    r"(?i)\b(x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|"
    r"x-goog-credential|awsaccesskeyid|signature|sig|access_token|token)=[^&\s'\"<>)]+"
)
HIDDEN = "..."


def redacted(text: str) -> str:
    """Return a text in which URLs have no user, and their queries and fragments no values."""
    return _NAMED.sub(rf"\1={HIDDEN}", _URL.sub(lambda found: _without(found[0]), text))


def _without(url: str) -> str:
    place, *about = re.split(r"([?#])", url, maxsplit=1)
    shown = _USER.sub(f"//{HIDDEN}@", place, count=1)
    return shown + "".join(_VALUE.sub(f"={HIDDEN}", part) for part in about)


class RedactingFormatter(RecordFormatter):
    """Formats records without what nobody may see, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        return redacted(super().format(record))
