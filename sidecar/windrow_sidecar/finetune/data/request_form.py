"""Give chat rows the form of requests to a server, and tell where that is another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from windrow.errors import UserError
from windrow.rows import DatasetRow
from windrow.served_chats import PLAIN, as_served, bare_tools, is_sglang, left_out, named

_NAMED = 10  # fields in one sentence


def rows_are(count: int) -> str:
    """Begin a sentence about so many rows."""
    return "1 row is" if count == 1 else f"{count} rows are"


class RequestsOf:
    """Rows as the template of one server gets them.

    Args:
        server: of `windrow.served_chats`.
        engine: that serves now; "": it takes no chats, or is not known.
    """

    def __init__(self, server: str, engine: str) -> None:
        self._server, self._engine = server, engine
        self._left_out: Counter[str] = Counter()  # rows, by field
        # Rows with other tools than they have themselves, and the first of them.
        self._written, self._first_written = 0, ""
        self._plain, self._first_plain = 0, ""  # rows whose tools stay, though no server takes them
        self._bare, self._first_bare = 0, ""  # rows whose tools the template gets without a wrapper
        # Rows that the engine that serves now would give its template otherwise.
        self._otherwise, self._first_otherwise = 0, ""

    def of(self, row: DatasetRow) -> DatasetRow:
        """Return a row as the server's template gets it."""
        served = as_served(row, self._server)
        if served.tools != row.tools:
            self._written += 1
            self._first_written = self._first_written or row.where
        elif row.tools and self._server == PLAIN and not self._engine:
            self._plain += 1
            self._first_plain = self._first_plain or row.where
        self._left_out.update(left_out(row, self._server))
        if self._engine and _written_otherwise(as_served(row, self._engine), served):
            self._otherwise += 1
            self._first_otherwise = self._first_otherwise or row.where
        return served

    def tried_again(self, row: DatasetRow, refused: UserError) -> DatasetRow | None:
        """Return what the server gives a template that failed over a row; None: nothing else."""
        # Errors of the template have a cause; others would come again.
        if not row.tools or not is_sglang(self._server) or refused.__cause__ is None:
            return None
        return bare_tools(row)

    def note_bare(self, row: DatasetRow) -> None:
        """Count a row that the template has taken so."""
        self._bare += 1
        self._first_bare = self._first_bare or row.where

    def notes(self) -> Iterator[str]:
        """Yield what rows have otherwise than their files say, in sentences."""
        name = named(self._server)
        if self._written:
            yield (
                f"tools of {self._written} rows are written as {name} gives them to its chat "
                f"template, with fields of its own (first {self._first_written})"
            )
        if self._plain:
            yield (
                f"tools of {self._plain} rows are given to the chat template as rows have them "
                f"(first {self._first_plain}): servers add fields of their own, and which server "
                "it will be is for spec.dataset.servedBy to say"
            )
        if self._left_out:
            fields = ", ".join(f"{f} ({n})" for f, n in self._left_out.most_common(_NAMED))
            yield f"fields of turns and tools that {name} leaves out of requests: {fields}"
        if self._bare:
            yield (
                f"tools of {self._bare} rows are given to the chat template as functions alone, as "
                f"{name} does where it fails over the others (first {self._first_bare})"
            )
        if self._otherwise:
            yield (
                f"{rows_are(self._otherwise)} rendered as the requests of {name}, with which the "
                f"job began; {named(self._engine)}, which serves now, gives its template others "
                f"(first {self._first_otherwise})"
            )


def _written_otherwise(one: DatasetRow, other: DatasetRow) -> bool:
    """Return whether two rows are others to a template, which sees the order of keys."""
    return repr((one.turns, one.tools)) != repr((other.turns, other.tools))
