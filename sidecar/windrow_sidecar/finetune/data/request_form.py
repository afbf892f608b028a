"""Give chat rows the form of requests to a server, and tell where that is another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from windrow.errors import UserError
from windrow.rows import DatasetRow
from windrow.served_chats import PLAIN, as_served, bare_tools, is_sglang, left_out, named
from windrow_sidecar.finetune.data.tally import Tally

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
        self._written = Tally()  # rows with other tools than they have themselves
        self._plain = Tally()  # rows whose tools stay, though no server takes them
        self._bare = Tally()  # rows whose tools the template gets without a wrapper
        self._otherwise = Tally()  # rows that the engine of now would give its template otherwise

    def of(self, row: DatasetRow) -> DatasetRow:
        """Return a row as the server's template gets it."""
        served = as_served(row, self._server)
        if served.tools != row.tools:
            self._written.add(row.where)
        elif row.tools and self._server == PLAIN and not self._engine:
            self._plain.add(row.where)
        self._left_out.update(left_out(row, self._server))
        if self._engine and _written_otherwise(as_served(row, self._engine), served):
            self._otherwise.add(row.where)
        return served

    def tried_again(self, row: DatasetRow, refused: UserError) -> DatasetRow | None:
        """Return what the server gives a template that failed over a row; None: nothing else."""
        # Errors of the template have a cause; others would come again.
        if not row.tools or not is_sglang(self._server) or refused.__cause__ is None:
            return None
        return bare_tools(row)

    def note_bare(self, row: DatasetRow) -> None:
        """Count a row that the template has taken so."""
        self._bare.add(row.where)

    def notes(self) -> Iterator[str]:
        """Yield what rows have otherwise than their files say, in sentences."""
        name = named(self._server)
        if self._written:
            yield (
                f"tools of {self._written.count} rows are written as {name} gives them to its chat "
                f"template, with fields of its own (first {self._written.first})"
            )
        if self._plain:
            yield (
                f"tools of {self._plain.count} rows are given to the chat template as rows have "
                f"them (first {self._plain.first}): servers add fields of their own, and which "
                "server it will be is for spec.dataset.servedBy to say"
            )
        if self._left_out:
            fields = ", ".join(f"{f} ({n})" for f, n in self._left_out.most_common(_NAMED))
            yield f"fields of turns and tools that {name} leaves out of requests: {fields}"
        if self._bare:
            yield (
                f"tools of {self._bare.count} rows are given to the chat template as functions "
                f"alone, as {name} does where it fails over the others (first {self._bare.first})"
            )
        if self._otherwise:
            yield (
                f"{rows_are(self._otherwise.count)} rendered as the requests of {name}, with which "
                f"the job began; {named(self._engine)}, which serves now, gives its template "
                f"others (first {self._otherwise.first})"
            )


def _written_otherwise(one: DatasetRow, other: DatasetRow) -> bool:
    """Return whether two rows are others to a template, which sees the order of keys."""
    return repr((one.turns, one.tools)) != repr((other.turns, other.tools))
