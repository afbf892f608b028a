"""Requests and their arrival times: a schedule, and the two published trace formats for one.

Azure's (`TIMESTAMP,ContextTokens,GeneratedTokens`) and BurstGPT's (`Timestamp,...,Request tokens,
Response tokens,...`) are read; which one a file is, its header says.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import IO

from windrow.errors import UserError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
# A silence so much longer than the mean distance of two arrivals is a hole in the recording and no
# traffic: the longest of the Azure traces are 112 (conversation) and 166 (code) distances long.
HOLE_FACTOR = 1000.0
# Seconds since the epoch, and thousandths, millionths and billionths: of 9 and 10 digits and so on,
# from 1973 to 2286.
_SINCE_EPOCH = re.compile(r"(\d{9,10}|\d{12,13}|\d{15,16}|\d{18,19})(\.\d*)?")
# A date and a time without marks between them, which are as many digits as no number above has.
_RUN_TOGETHER = re.compile(r"((?:19|20)\d{6})(\d{6})(\d{3})?")
_UTC = re.compile(r"\s*(UTC|GMT)$")
_OFFSET_AND_UTC = re.compile(r"\s*([+-]\d\d:?\d\d)\s+UTC$")  # as Go writes a time
_SLASHES = re.compile(r"^(\d{4})/(\d\d)/(\d\d)")
_LEAP = re.compile(r"(:\d\d:)60(?!\d)")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a schedule."""

    at_s: float  # since the schedule's begin
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a published trace, in order of arrival and from 0 s on.

    Rows that failed (no response tokens) are left out. Raises UserError, with file and line, for a
    file that cannot be read, a header of neither format, a line that is not as its header says, or
    times that run backwards: sorting would hide that a recording was pieced together.
    """
    try:
        with _open(path) as lines:
            requests = list(_rows(path, csv.DictReader(lines)))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as e:
        raise UserError(
            f"cannot be read: {e}", field=str(path), remedy="Give --trace a readable CSV file."
        ) from e
    if not requests:
        raise UserError(
            "holds no request", field=str(path), remedy="Give a trace with at least one row."
        )
    first = requests[0].at_s
    return [TraceRequest(r.at_s - first, r.prompt_tokens, r.output_tokens) for r in requests]


def check_trace(requests: Sequence[TraceRequest], where: str) -> None:
    """Refuse a trace with a hole.

    Raises:
        UserError: with where the hole begins.
    """
    if len(requests) < 2:
        raise UserError(
            f"holds {len(requests)} request", field=where, remedy="Give at least two rows."
        )
    span_s = requests[-1].at_s - requests[0].at_s
    if span_s <= 0:
        raise UserError("all rows have one time", field=where, remedy="Give a recording over time.")
    longest, at_s = max((b.at_s - a.at_s, a.at_s) for a, b in pairwise(requests))
    mean_s = span_s / (len(requests) - 1)
    if longest > HOLE_FACTOR * mean_s or (longest > 600 and longest > span_s / 4):
        raise UserError(
            f"has a hole of {longest:.0f} s at {at_s:.0f} s ({longest / mean_s:.0f} times the mean "
            "distance of two requests)",
            field=where,
            remedy="Give a part without a hole; a quiet stretch would count as idle.",
        )


def _open(path: Path) -> IO[str]:
    # Spreadsheets write a mark of the byte order first.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, table: csv.DictReader[str]) -> Iterator[TraceRequest]:
    header = table.fieldnames or []
    columns, to_seconds = _format(path, header)
    before_s = 0.0
    for row in table:
        where = f"{path}:{table.line_num}"
        at, prompt, output = (row[column] for column in columns)
        try:
            request = TraceRequest(_finite(to_seconds(at)), _tokens(prompt), _tokens(output))
        except (TypeError, ValueError, OverflowError) as e:
            raise UserError(
                f"not a line of {','.join(columns)}: {e}",
                field=where,
                remedy="Fix or remove the line.",
            ) from e
        if request.prompt_tokens < 0 or request.output_tokens < 0:
            raise UserError("a token count below 0", field=where, remedy="Fix or remove the line.")
        if request.at_s < 0:
            raise UserError(
                f"its time is {request.at_s:g} s", field=where, remedy="Times are not negative."
            )
        if request.at_s < before_s:
            raise UserError(
                f"its time {at} is before that of the line above",
                field=where,
                remedy="Sort the file by its times; write the offset of local times where summer "
                "time ends.",
            )
        before_s = request.at_s
        if request.output_tokens > 0 and request.prompt_tokens > 0:
            yield request


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds:g} is not a time")
    return seconds


def _tokens(text: str | None) -> int:
    """Return a count; tables with a gap in a column write all of its counts as 374.0."""
    if text is None:
        raise ValueError("it has fewer columns")
    return int(re.sub(r"\.0+$", "", text.strip()))


def _format(
    path: Path, header: Sequence[str]
) -> tuple[tuple[str, str, str], Callable[[str], float]]:
    if set(AZURE_COLUMNS) <= set(header):
        return AZURE_COLUMNS, _azure_seconds
    if set(BURSTGPT_COLUMNS) <= set(header):
        return BURSTGPT_COLUMNS, float
    raise UserError(
        f"the header names neither format: {','.join(header) or '(empty)'}",
        field=f"{path}:1",
        remedy=f"Wanted are {','.join(AZURE_COLUMNS)} or at least {','.join(BURSTGPT_COLUMNS)}.",
    )


def _azure_seconds(text: str) -> float:
    """Return a time in seconds; without an offset it is UTC, a plain number is since the epoch.

    Loggers write ISO 8601 with any number of digits of a second, `Z`, an offset, or the word UTC;
    some a leap second as the sixtieth, slashes in the date, or no marks at all.

    Raises:
        ValueError: it is none of these.
    """
    written, text = text.strip(), text.strip().upper()
    if _SINCE_EPOCH.fullmatch(text):
        # Of ten digits are seconds until the year 2286, and of 13, 16 and 19 their parts.
        return float(text) / 1000.0 ** max(0, (len(text.partition(".")[0]) - 8) // 3)
    if marks := _RUN_TOGETHER.fullmatch(text):
        text = f"{marks[1]}T{marks[2]}.{marks[3] or 0}"
    text = _OFFSET_AND_UTC.sub(r"\1", _SLASHES.sub(r"\1-\2-\3", text))
    text, leap = _LEAP.subn(r"\g<1>59", _UTC.sub("+00:00", text))
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(
            f"{written!r} is not a time as ISO 8601 writes it, nor one since the epoch ({error})"
        ) from error
    if leap:
        # Clocks of computers have no such second: it is all one with the next one's begin.
        at = at.replace(microsecond=0)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() + leap


def paced(requests: list[TraceRequest], *, per_second: float, seconds: float) -> list[TraceRequest]:
    """Play a trace so that its mean rate is `per_second`, from its begin, for `seconds`.

    Time is stretched or pressed as a whole: bursts stay bursts, lengths stay as they are. A trace
    that is over before is played again.
    """
    span_s = max(requests[-1].at_s, 1.0) * len(requests) / max(len(requests) - 1, 1)
    stretch = len(requests) / span_s / per_second
    played: list[TraceRequest] = []
    offset_s = 0.0
    while True:
        for r in requests:
            at_s = offset_s + r.at_s * stretch
            if at_s >= seconds:
                return played
            played.append(TraceRequest(at_s, r.prompt_tokens, r.output_tokens))
        offset_s += span_s * stretch


def busy_stretch(
    requests: Sequence[TraceRequest], *, per_second: float, seconds: float
) -> list[TraceRequest]:
    """Return the first stretch of `seconds` that holds as many requests as the mean rate makes.

    Of stretches one after the other; where none does, the fullest. Seconds out of an hour say
    little of requests that come in bursts, and nothing where none comes.
    """
    stretches: defaultdict[int, list[TraceRequest]] = defaultdict(list)
    for r in requests:
        n = int(r.at_s // seconds)
        stretches[n].append(TraceRequest(r.at_s - n * seconds, r.prompt_tokens, r.output_tokens))
    enough = [of for _, of in sorted(stretches.items()) if len(of) >= per_second * seconds]
    return enough[0] if enough else max(stretches.values(), key=len, default=[])
