"""Keep what others wrote from acting on a terminal or passing for a line of a log.

Messages hold words of jobs, rows and sidecars. An escape sequence among them moves a terminal's
cursor or sets its title, and a line break begins what looks like another record.
"""

from __future__ import annotations

import logging
import re
from typing import Final

# Controls but for line break and tab, and marks that turn the direction of what follows.
_ACTS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
_INSTEAD: Final = "\ufffd"


def printable(text: str) -> str:
    """Return a text in which nothing acts on a terminal; its lines stay."""
    return _ACTS.sub(_INSTEAD, text)


def as_record(text: str) -> str:
    """Return a text as one record of a log: lines after the first are indented."""
    return printable(text).replace("\n", "\n  ")


class RecordFormatter(logging.Formatter):
    """Formats records so that none passes for several, whatever its message holds."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        return as_record(super().format(record))
