"""Check the rows of a file while it comes: line by line, never more than one line in memory."""

from __future__ import annotations

from windrow.errors import UserError
from windrow.rows import MARKS, DatasetRecord, bad_row, is_preference, row_of

# Longer rows are refused: no model takes so many tokens.
MOST_LINE_BYTES = 8 << 20


class RowsCheck:
    """The rows of one file of JSON lines, which all have one format.

    Args:
        name: of the file; errors name it with the line.

    Attributes:
        rows: how many there are.
        form: their format, a name of `spec.dataset.format`; empty before the first row.
    """

    def __init__(self, name: str) -> None:
        self._name, self._rest, self._line = name, bytearray(), 0
        self.rows, self.form = 0, ""

    def feed(self, content: bytes) -> None:
        """Check the lines that `content` ends.

        Raises:
            UserError: one is not a row; `field` is file and line.
        """
        *lines, rest = content.split(b"\n")
        for line in lines:
            self._check(bytes(self._rest) + line if self._rest else line)
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > MOST_LINE_BYTES:
            self._line += 1
            raise self._too_long()

    def finish(self) -> None:
        """Check the last line, which may have no end.

        Raises:
            UserError: it is not a row, or the file has none.
        """
        if self._rest:
            self._check(bytes(self._rest))
            self._rest.clear()
        if not self.rows:
            raise bad_row(self._name, "holds no row", "Write a JSON object a line (.jsonl).")

    def _check(self, line: bytes) -> None:
        self._line += 1
        if len(line) > MOST_LINE_BYTES:
            raise self._too_long()
        if not line.strip():
            return
        where = f"{self._name}:{self._line}"
        record = DatasetRecord(where, line)
        fields = record.fields()
        form = form_of(fields)
        if not form:
            raise bad_row(
                where,
                "has no `messages`, `conversations`, `prompt`, `instruction`, `text` or "
                "`preferred_output`",
                'Write rows like {"messages": [{"role": "user", "content": "..."}, '
                '{"role": "assistant", "content": "..."}]}.',
            )
        if self.form and form != self.form:
            raise bad_row(
                where,
                f"is a row of the format {form}, and the rows before are {self.form}",
                "Keep rows of one format in a file.",
            )
        self.form = form
        row_of(record, form)
        self.rows += 1

    def _too_long(self) -> UserError:
        return bad_row(
            f"{self._name}:{self._line}",
            f"a row is longer than {MOST_LINE_BYTES >> 20} MiB",
            "Cut the row: no model takes so many tokens.",
        )


def form_of(fields: dict[str, object]) -> str:
    """Return the format of a row by the fields that it has; empty: none that is known."""
    if is_preference(fields):
        return "preference"  # its prompt is the mark of another one
    return next((form for form, mark in MARKS.items() if mark in fields), "")
