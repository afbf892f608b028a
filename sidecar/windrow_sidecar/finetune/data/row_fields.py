"""Fields of a chat row, as its template reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from windrow.errors import UserError
from windrow.rows import DatasetRow, Fields, bad_row

# Fields in which servers give, and templates take, what was thought before an answer.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def nothing_of(row: DatasetRow, place: int) -> UserError:
    """Return the error for an answer of which the chat template writes nothing."""
    return bad_row(
        row.where,
        f"the model's chat template writes nothing of messages[{place}], which the assistant says",
        "Use a template that takes `content` as text, or render the rows yourself and set "
        "spec.dataset.format to completion.",
    )


def fields_of(row: DatasetRow) -> set[str]:
    """Return what a row gives the template besides roles and contents; nothing of what is empty."""
    known = ("role", "content", "weight")
    found = {
        key
        for turn in row.turns
        for key, value in turn.items()
        if key not in known and value not in ("", [], {})
    }
    return found | row.template_settings.keys() | ({"tools"} if row.tools else set())


def without(row: DatasetRow, name: str) -> DatasetRow:
    """Return a row without a field, of its turns or of its own."""

    def left(fields: Fields) -> Fields:
        return {key: value for key, value in fields.items() if key != name}

    return replace(
        row,
        turns=tuple(left(turn) for turn in row.turns),
        tools=None if name == "tools" else row.tools,
        template_settings=left(row.template_settings),
    )


def said_in(turn: Fields, known: Mapping[str, bool]) -> list[str]:
    """Return what an answer says: its content, and thoughts in a field that the template knows.

    Args:
        turn: the answer.
        known: by a field, whether the template writes it.
    """
    thoughts = (turn.get(name) for name in _THOUGHTS if known.get(name))
    return [turn["content"], *(thought for thought in thoughts if isinstance(thought, str))]


def reference(turns: Sequence[Fields], answer: Fields) -> tuple[Fields, ...]:
    """Return turns that end with an answer to a user: the first of a row's, or one made for it.

    Args:
        turns: the row's.
        answer: a turn that may answer somebody else.
    """
    roles = [turn["role"] for turn in turns]
    pairs = enumerate(pairwise(roles))
    at = next((i for i, pair in pairs if pair == ("user", "assistant")), None)
    return ({"role": "user", "content": "?"}, answer) if at is None else tuple(turns[: at + 2])
