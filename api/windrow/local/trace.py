"""Which requests arrive when: a schedule, and the two published trace formats that give one.

Azure's (`TIMESTAMP,ContextTokens,GeneratedTokens`) and BurstGPT's (`Timestamp,...,Request tokens,
Response tokens,...`) are read; which one a file is, its header says.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from windrow.errors import UserError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a schedule."""

    at_s: float  # since the schedule's begin
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a published trace, in order of arrival and from 0 s on.

    Rows that failed (no response tokens) are left out. Raises UserError, with file and line, for a
    file that cannot be read, a header of neither format, or a line that is not as its header says.
    """
    try:
        with _open(path) as lines:
            requests = list(_rows(path, csv.DictReader(lines)))
    except (OSError, EOFError, UnicodeDecodeError) as e:
        raise UserError(
            f"cannot be read: {e}", field=str(path), remedy="Give --trace a readable CSV file."
        ) from e
    if not requests:
        raise UserError(
            "holds no request", field=str(path), remedy="Give a trace with at least one row."
        )
    requests.sort(key=lambda r: r.at_s)
    first = requests[0].at_s
    return [TraceRequest(r.at_s - first, r.prompt_tokens, r.output_tokens) for r in requests]


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _rows(path: Path, table: csv.DictReader[str]) -> Iterator[TraceRequest]:
    header = table.fieldnames or []
    columns, to_seconds = _format(path, header)
    for row in table:
        where = f"{path}:{table.line_num}"
        at, prompt, output = (row[column] for column in columns)
        try:
            request = TraceRequest(to_seconds(at), int(prompt), int(output))
        except (TypeError, ValueError) as e:
            raise UserError(
                f"not a line of {','.join(columns)}: {e}",
                field=where,
                remedy="Mend or remove the line.",
            ) from e
        if request.prompt_tokens < 0 or request.output_tokens < 0:
            raise UserError("a token count below 0", field=where, remedy="Mend or remove the line.")
        if request.output_tokens > 0 and request.prompt_tokens > 0:
            yield request


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
    # Azure writes seven digits of a second, Python reads six: cut to 26 characters.
    return datetime.fromisoformat(text[:26]).replace(tzinfo=UTC).timestamp()


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
