"""What a dataset file says: one JSON object a line, checked, with the place of every mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from windrow.conditions import Reason
from windrow.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a row; `learn` says whether the loss counts its tokens."""

    text: str
    learn: bool


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row: either turns of a conversation or plain segments. `where` is `file:line`."""

    where: str
    messages: tuple[Message, ...] = ()
    segments: tuple[Segment, ...] = ()


def local_path(place: str, *, field: str) -> Path:
    """Return the path that a plain path or a `file://` URL names.

    Raises:
        UserError: another scheme.
    """
    parts = urlsplit(place)
    if parts.scheme == "":
        return Path(place)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    raise UserError(
        f"{place!r} cannot be reached from a worker",
        field=field,
        remedy="Write a path, or file:///path, on a volume that the decode pods mount.",
    )


def read_rows(source: str, form: str) -> list[Row]:
    """Read all rows of a JSON-lines file in one of the formats `chat`, `instruction`, `text`.

    Blank lines are skipped.

    Raises:
        UserError: the file cannot be read, a line is no JSON object of the format (the message
            names file and line), or there is no row.
    """
    path = local_path(source, field="spec.dataset.source")
    parse = _PARSERS[form]
    rows = [parse(fields, where) for fields, where in _objects(path)]
    if not rows:
        raise UserError(
            f"{path} holds no row",
            field="spec.dataset.source",
            remedy="Write one JSON object a line.",
            reason=Reason.DATASET_EMPTY,
        )
    return rows


def _objects(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}",
            field="spec.dataset.source",
            remedy="Name a JSON-lines file on a volume that the decode pods mount.",
            reason=Reason.DATASET_UNREADABLE,
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except UnicodeDecodeError as error:
            raise _bad(where, "is not UTF-8", "Save the file as UTF-8.") from error
        except json.JSONDecodeError as error:
            raise _bad(
                where, f"is not JSON ({error.msg}, column {error.colno})", "Mend the line."
            ) from error
        if not isinstance(fields, dict):
            raise _bad(where, "is not a JSON object", 'Write an object: {"...": ...}.')
        yield fields, where


def _chat(fields: dict[str, Any], where: str) -> Row:
    turns = fields.get("messages")
    if not isinstance(turns, list) or not turns:
        raise _bad(
            where,
            "has no `messages` (a list of turns)",
            "Write {'messages': [{'role': 'user', 'content': ...}, ...]}, or set "
            "spec.dataset.format.",
        )
    messages = tuple(_message(turn, f"messages[{i}]", where) for i, turn in enumerate(turns))
    if not any(m.role == "assistant" for m in messages):
        raise _bad(where, "has no turn of the assistant to learn from", "Add one.")
    return Row(where, messages=messages)


def _message(turn: Any, name: str, where: str) -> Message:  # noqa: ANN401 - it came from JSON
    if not isinstance(turn, dict) or turn.get("role") not in ROLES:
        raise _bad(where, f"{name} has no known `role`", f"Write one of {', '.join(ROLES)}.")
    if not isinstance(turn.get("content"), str):
        raise _bad(where, f"{name} has no `content` that is text", "Write the turn's text.")
    return Message(turn["role"], turn["content"])


def _instruction(fields: dict[str, Any], where: str) -> Row:
    task, answer = _text(fields, "instruction", where), _text(fields, "output", where)
    given = fields.get("input") or ""
    if not isinstance(given, str):
        raise _bad(where, "`input` is not text", "Write text or leave it out.")
    material = f"### Input:\n{given}\n\n" if given else ""
    prompt = f"### Instruction:\n{task}\n\n{material}### Response:\n"
    return Row(where, segments=(Segment(prompt, learn=False), Segment(answer, learn=True)))


def _plain(fields: dict[str, Any], where: str) -> Row:
    return Row(where, segments=(Segment(_text(fields, "text", where), learn=True),))


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        found = "is missing" if name not in fields else "is empty or not text"
        raise _bad(
            where, f"`{name}` {found}", f"Write text in `{name}`, or set spec.dataset.format."
        )
    return value


def _bad(where: str, problem: str, remedy: str) -> UserError:
    return UserError(problem, field=where, remedy=remedy, reason=Reason.DATASET_INVALID)


_PARSERS = {"chat": _chat, "instruction": _instruction, "text": _plain}
