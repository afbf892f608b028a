"""What a row of each format holds, checked, with what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windrow_sidecar.finetune.dataset.records import Fields, Record, bad_row

ROLES = ("system", "user", "assistant", "tool")
# By which field a row of each format is told.
MARKS = {"chat": "messages", "instruction": "instruction", "completion": "prompt", "text": "text"}


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
    """One row: either turns of a conversation or plain segments. `where` is its place."""

    where: str
    messages: tuple[Message, ...] = ()
    segments: tuple[Segment, ...] = ()


def row_of(record: Record, form: str) -> Row:
    """Return a record as a row of the format `chat`, `instruction`, `completion` or `text`.

    Raises:
        UserError: it is none; `field` is its place.
    """
    fields = record.fields()
    if MARKS[form] not in fields:
        _refuse_other_format(fields, record.where, form)
    return _PARSERS[form](fields, record.where)


def _refuse_other_format(fields: Fields, where: str, form: str) -> None:
    for other, mark in MARKS.items():
        if mark in fields:
            raise bad_row(
                where,
                f"has no `{MARKS[form]}`: it looks like a row of the format {other}, "
                f"spec.dataset.format is {form}",
                "Keep rows of one format in a dataset, and name it in spec.dataset.format.",
            )


def _chat(fields: Fields, where: str) -> Row:
    turns = fields.get("messages")
    if not isinstance(turns, list) or not turns:
        raise bad_row(
            where,
            "has no `messages` (a list of turns)",
            "Write {'messages': [{'role': 'user', 'content': ...}, ...]}, or set "
            "spec.dataset.format.",
        )
    messages = tuple(_message(turn, f"messages[{i}]", where) for i, turn in enumerate(turns))
    if not any(m.role == "assistant" for m in messages):
        raise bad_row(where, "has no turn of the assistant to learn from", "Add one.")
    return Row(where, messages=messages)


def _message(turn: Any, name: str, where: str) -> Message:  # noqa: ANN401 - it came from JSON
    if not isinstance(turn, dict) or turn.get("role") not in ROLES:
        raise bad_row(where, f"{name} has no known `role`", f"Write one of {', '.join(ROLES)}.")
    for call in ("tool_calls", "function_call"):
        if turn.get(call):
            raise bad_row(
                where,
                f"{name} has `{call}`, which is not learnt",
                "Write the call into `content` as the model writes it, or drop the row.",
            )
    if not isinstance(turn.get("content"), str):
        raise bad_row(where, f"{name} has no `content` that is text", "Write the turn's text.")
    if turn["role"] == "assistant" and not turn["content"].strip():
        raise bad_row(
            where,
            f"{name}: the assistant says nothing, so only the end of its turn would be learnt",
            "Give the turn a text, or drop the row.",
        )
    return Message(turn["role"], turn["content"])


def _instruction(fields: Fields, where: str) -> Row:
    task, answer = _text(fields, "instruction", where), _text(fields, "output", where)
    given = fields.get("input") or ""
    if not isinstance(given, str):
        raise bad_row(where, "`input` is not text", "Write text or leave it out.")
    material = f"### Input:\n{given}\n\n" if given else ""
    prompt = f"### Instruction:\n{task}\n\n{material}### Response:\n"
    return Row(where, segments=(Segment(prompt, learn=False), Segment(answer, learn=True)))


def _completion(fields: Fields, where: str) -> Row:
    prompt, answer = _text(fields, "prompt", where), _text(fields, "completion", where)
    return Row(where, segments=(Segment(prompt, learn=False), Segment(answer, learn=True)))


def _plain(fields: Fields, where: str) -> Row:
    return Row(where, segments=(Segment(_text(fields, "text", where), learn=True),))


def _text(fields: Fields, name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        found = "is missing" if name not in fields else "is empty or not text"
        raise bad_row(
            where, f"`{name}` {found}", f"Write text in `{name}`, or set spec.dataset.format."
        )
    return value


_PARSERS: dict[str, Callable[[Fields, str], Row]] = {
    "chat": _chat,
    "instruction": _instruction,
    "completion": _completion,
    "text": _plain,
}
