"""Content of a row in each format, checked, with what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from windrow.conditions import Reason
from windrow.errors import UserError

# Longer ones are not rows of text; what is unpacked counts.
MOST_ROW_BYTES = 64 << 20
Fields = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
# The fields of a row that count, by its format.
READ = {
    "chat": {"messages", "tools", "chat_template_kwargs"},
    "sharegpt": {"conversations", "system", "tools", "chat_template_kwargs"},
    "instruction": {"instruction", "input", "output"},
    "completion": {"prompt", "completion", "tools", "chat_template_kwargs"},
    "text": {"text"},
    "preference": {
        *("prompt", "chosen", "rejected", "tools", "chat_template_kwargs"),
        *("input", "preferred_output", "non_preferred_output"),
    },
}
# The field by which a row's format is recognised.
MARKS = {
    "chat": "messages",
    "sharegpt": "conversations",
    "instruction": "instruction",
    "completion": "prompt",
    "text": "text",
    "preference": "chosen",
}
# Fields by which datasets of other programs say of an answer whether it is learnt.
_SHARES = ("weight", "train", "training", "trainable", "loss", "loss_mask")
# Fields by which an answer calls a function.
_CALLS = ("tool_calls", "function_call")
# Who speaks in rows of ShareGPT, by the roles of a chat.
_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """One object that has not been looked at yet. `where`: `file:line`, `file[n]` without lines.

    `of_table`: each object in it has the keys of all rows, as nulls where the row has none.
    """

    where: str
    content: Any  # bytes of a line, what a library made of it, or why it could not
    of_table: bool = False

    def fields(self) -> Fields:
        """Return the object.

        Raises:
            UserError: it is none.
        """
        if isinstance(self.content, UnicodeDecodeError):
            raise bad_row(self.where, "holds text that is not UTF-8", "Fix or drop the row.")
        if isinstance(self.content, Exception):
            problem = f"holds a value that cannot be read ({self.content})"
            raise bad_row(self.where, problem, "Fix or drop the row, or take its column out.")
        found = _decoded(self.content, self.where) if _is_line(self.content) else self.content
        if not isinstance(found, dict):
            raise bad_row(self.where, "is not a JSON object", 'Write an object: {"...": ...}.')
        return found


def bad_row(where: str, problem: str, remedy: str) -> UserError:
    """Return the error for one row."""
    return UserError(problem, field=where, remedy=remedy, reason=Reason.DATASET_INVALID)


class WrittenTwice(ValueError):
    """Duplicate key in an object, of which Python would take the last."""


def once_each(pairs: list[tuple[str, Any]]) -> Fields:
    """Return an object of JSON; raise WrittenTwice where it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise WrittenTwice(repr(next(n for n in names if names.count(n) > 1)))
    return found


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a value without keys of objects that are null; elements of lists stay."""
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return [without_nulls(element) for element in value] if isinstance(value, list) else value


def _is_line(content: Any) -> bool:  # noqa: ANN401
    return isinstance(content, bytes)


def _decoded(line: bytes, where: str) -> Any:  # noqa: ANN401 - any JSON
    try:
        return json.loads(line, object_pairs_hook=once_each)
    except UnicodeDecodeError as error:
        raise bad_row(where, "is not UTF-8", "Save the file as UTF-8.") from error
    except WrittenTwice as error:
        raise bad_row(where, f"writes {error} twice", "Keep one of the two.") from error
    except json.JSONDecodeError as error:
        problem = f"is not JSON ({error.msg}, column {error.colno})"
        raise bad_row(where, problem, "Fix the line.") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise bad_row(
            where, f"is beyond what is read of JSON ({error})", "Fix the line."
        ) from error


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row: either the turns of a conversation, or a prompt and its answer.

    `where` is its place. Turns are as the row has them, without fields that are null; so are
    `tools` and `template_settings`, which the chat template gets besides.

    A row of preferences is that of the chosen answer; `rejected` is that of the other one, behind
    the same prompt.
    """

    where: str
    turns: tuple[Fields, ...] = ()
    tools: list[Fields] | None = None
    template_settings: Fields = field(default_factory=dict)
    prompt: str = ""
    answer: str = ""
    unread: tuple[str, ...] = ()  # fields that do not count
    pruned: bool = False  # whether nulls of other rows' keys, or empty calls, were left out
    as_served: bool = False  # whether tools were brought into the form that servers take
    prompt_turns: int = 0  # that many turns are the prompt, and all others are learnt; 0: see roles
    rejected: DatasetRow | None = None


def row_of(
    record: DatasetRecord, form: str, columns: Mapping[str, str] | None = None
) -> DatasetRow:
    """Return a record as a row of a format, one of `READ`.

    Args:
        record: the record.
        form: the format.
        columns: by a field of the format, the field of the record that takes its place.

    Raises:
        UserError: it is none; `field` is its place.
    """
    found = _renamed(record.fields(), columns or {}, record.where)
    fields = {k: without_nulls(v) for k, v in found.items()} if record.of_table else found
    if MARKS[form] not in fields and not (form == "preference" and is_preference(fields)):
        _refuse_other_format(fields, record.where, form)
    row = _PARSERS[form](fields, record.where)
    unread = tuple(k for k in fields.keys() - READ[form] if fields[k] is not None)
    pruned = row.pruned or any(
        fields.get(name) != found.get(name) for name in ("tools", "chat_template_kwargs")
    )
    return replace(row, unread=unread, pruned=pruned) if unread or pruned else row


def _renamed(found: Fields, columns: Mapping[str, str], where: str) -> Fields:
    """Return a record with the fields of its format under the format's names."""
    if not columns:
        return found
    own = {name: column for name, column in columns.items() if column in found}
    # The mark of a format has to be there; what a row may leave out, a column may.
    needed = [column for name, column in columns.items() if name in MARKS.values()]
    if lacking := [column for column in needed if column not in found]:
        raise bad_row(
            where,
            f"has no `{lacking[0]}`, which spec.dataset.columns names",
            f"Its fields are {', '.join(sorted(found)) or 'none'}.",
        )
    taken = {*own.values(), *columns}
    kept = {name: value for name, value in found.items() if name not in taken}
    return {**kept, **{name: found[column] for name, column in own.items()}}


# Fields by which a row of preferences in the form of OpenAI's API is recognised.
_OPENAIS = "preferred_output"


def is_preference(fields: Mapping[str, object]) -> bool:
    """Return whether a row has two answers to compare, by the names of its fields."""
    return MARKS["preference"] in fields or _OPENAIS in fields


def _refuse_other_format(fields: Fields, where: str, form: str) -> None:
    if form == "chat" and _has_roles(fields.get(MARKS["sharegpt"])):
        raise bad_row(
            where,
            "has the turns of a chat in `conversations`",
            "Set spec.dataset.columns: {messages: conversations}.",
        )
    for other, mark in MARKS.items():
        if mark in fields:
            raise bad_row(
                where,
                f"has no `{MARKS[form]}`: it looks like a row of the format {other}, "
                f"spec.dataset.format is {form}",
                "Keep rows of one format in a dataset, and name it in spec.dataset.format.",
            )


def _turns(fields: Fields, name: str, example: str, where: str) -> list[Any]:
    """Return the list of turns in a field; `example` is a turn as the format writes it."""
    found = _parsed(fields.get(name))
    if not isinstance(found, list) or not found:
        raise bad_row(
            where,
            f"has no `{name}` (a list of turns)",
            f"Write {{'{name}': [{example}, ...]}}, or set spec.dataset.format.",
        )
    return found


def _chat(fields: Fields, where: str) -> DatasetRow:
    found = _turns(fields, "messages", "{'role': 'user', 'content': ...}", where)
    return _conversation(fields, found, "messages", where)


def _sharegpt(fields: Fields, where: str) -> DatasetRow:
    found = _turns(fields, "conversations", "{'from': 'human', 'value': ...}", where)
    if _has_roles(found):
        raise bad_row(
            where,
            "has the turns of a chat in `conversations`, with `role` in place of `from`",
            "Set spec.dataset.format: chat and spec.dataset.columns: {messages: conversations}.",
        )
    turns = [_of_sharegpt(turn, f"conversations[{i}]", where) for i, turn in enumerate(found)]
    system = fields.get("system")
    if system is not None and not isinstance(system, str):
        raise bad_row(where, "`system` is not text", "Write text or leave it out.")
    if system and system.strip():
        if turns[0]["role"] == "system":
            raise bad_row(where, "has `system` and a turn of the system", "Keep one of the two.")
        turns.insert(0, {"role": "system", "content": system})
    return _conversation(fields, turns, "conversations", where)


def _has_roles(turns: Any) -> bool:  # noqa: ANN401 - it came from JSON
    """Return whether turns say who speaks by `role`, as a chat does, and not by `from`."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and "role" in first and "from" not in first


def _of_sharegpt(turn: Any, name: str, where: str) -> Fields:  # noqa: ANN401 - it came from JSON
    if isinstance(turn, dict) and turn.get("from") == "function_call":
        raise _not_learnt(where, f"{name} is a `function_call`")
    if not isinstance(turn, dict) or turn.get("from") not in _SHAREGPT:
        said = repr(turn.get("from"))[:64] if isinstance(turn, dict) else "not an object"
        raise bad_row(
            where,
            f"{name}: `from` is {said}",
            f"Write one of {', '.join(_SHAREGPT)}.",
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _SHAREGPT[turn["from"]], "content": turn.get("value"), **rest}


def _conversation(fields: Fields, found: list[Any], name: str, where: str) -> DatasetRow:
    turns = tuple(_turn(turn, f"{name}[{i}]", where) for i, turn in enumerate(found))
    if not any(turn["role"] == "assistant" for turn in turns):
        raise bad_row(where, "has no turn of the assistant to learn from", "Add one.")
    if fields.get("functions"):
        raise bad_row(where, "has `functions`, which no template gets", "Write them in `tools`.")
    settings = fields.get("chat_template_kwargs") or {}
    if not isinstance(settings, dict):
        raise bad_row(where, "`chat_template_kwargs` is not an object", "Write an object.")
    tools = _tools(fields, where)
    plain = [_of_schema(tool) for tool in tools] if tools else None
    served = [_as_served(tool) for tool in plain] if plain else None
    return DatasetRow(
        where,
        turns=turns,
        tools=served,
        template_settings=settings,
        pruned=plain != tools or any(turn.get(c) is not None for turn in found for c in _CALLS),
        as_served=served != plain,
    )


def _parsed(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return what the JSON in a text is, as tables have it; any other value as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _tools(fields: Fields, where: str) -> list[Fields] | None:
    """Return a row's tools: a list, or the JSON of one or of its elements, as tables have it."""
    tools = _parsed(fields.get("tools"))
    if not tools or (isinstance(tools, str) and tools.strip() in ("", "null")):
        return None
    if isinstance(tools, list):
        tools = [_parsed(tool) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise bad_row(where, "`tools` is not a list of objects", "Write a list of JSON schemas.")
    return tools


def _as_served(tool: Fields) -> Fields:
    """Return a tool in the form in which servers take it, and give it to the template.

    That is {"type": "function", "function": {...}}, with `parameters` as an object; servers refuse
    a bare function, and parameters that are text.
    """
    if "name" in tool and "function" not in tool and tool.get("type") in (None, "function"):
        bare = {key: value for key, value in tool.items() if key != "type"}
        tool = {"type": "function", "function": bare}
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("parameters"), str):
        return tool
    return {**tool, "function": {**function, "parameters": _parsed(function["parameters"])}}


# Keywords of a JSON schema whose value may be null.
_NULLABLE = ("default", "const", "example")


def _of_schema(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a tool without nulls that a table has put there: no schema says them.

    A default may be null, but not where the table put other nulls beside it.
    """
    if isinstance(value, list):
        return [_of_schema(element) for element in value]
    if not isinstance(value, dict):
        return value
    nulls = {key for key, held in value.items() if held is None}
    if not nulls - set(_NULLABLE):
        nulls = set()
    return {key: _of_schema(held) for key, held in value.items() if key not in nulls}


def _turn(turn: Any, name: str, where: str) -> Fields:  # noqa: ANN401 - it came from JSON
    if not isinstance(turn, dict) or turn.get("role") not in ROLES:
        raise bad_row(where, f"{name} has no known `role`", f"Write one of {', '.join(ROLES)}.")
    for call in _CALLS:
        if _parsed(turn.get(call)):
            raise _not_learnt(where, f"{name} has `{call}`")
    for share in _SHARES if turn["role"] == "assistant" else ():
        if turn.get(share) not in (None, 1):
            raise bad_row(
                where,
                f"{name} has the `{share}` {turn[share]}, and every answer counts the same here",
                f"Take `{share}` out, or make a row of its own for each answer that shall be "
                "learnt.",
            )
    turn = {**turn, "content": _of_parts(turn.get("content"), name, where)}
    if not isinstance(turn["content"], str):
        raise bad_row(where, f"{name} has no `content` that is text", "Write the turn's text.")
    if turn["role"] == "assistant" and not turn["content"].strip():
        raise bad_row(
            where,
            f"{name}: the assistant says nothing, so only the end of its turn would be learnt",
            "Give the turn a text, or drop the row.",
        )
    # Tables have an empty list where a turn calls nothing; templates take it for a turn of calls.
    return {k: value for k, value in turn.items() if value is not None and k not in _CALLS}


def _of_parts(content: Any, name: str, where: str) -> Any:  # noqa: ANN401 - it came from JSON
    """Return the text of a list with one part, as OpenAI's clients write it; else the content."""
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    if other := next((kind for kind in kinds if kind not in ("text", "input_text")), None):
        raise bad_row(
            where,
            f"{name} has a part of the type {other!r}, and text alone is learnt",
            "Drop the row, or leave the part out.",
        )
    if len(parts) > 1 and len(kinds) == len(parts):
        raise bad_row(
            where,
            f"{name} has {len(parts)} parts of text, which servers join in different ways",
            "Write them as one text.",
        )
    return parts[0].get("text") if len(kinds) == len(parts) == 1 else content


def _not_learnt(where: str, what: str) -> UserError:
    return bad_row(
        where,
        f"{what}, which is not learnt",
        "Write the call into the text of a turn of the assistant, as the model writes it, or drop "
        "the row.",
    )


def _instruction(fields: Fields, where: str) -> DatasetRow:
    task, answer = _text(fields, "instruction", where), _text(fields, "output", where)
    given = fields.get("input") or ""
    if not isinstance(given, str):
        raise bad_row(where, "`input` is not text", "Write text or leave it out.")
    material = f"### Input:\n{given}\n\n" if given.strip() else ""
    prompt = f"### Instruction:\n{task}\n\n{material}### Response:\n"
    return DatasetRow(where, prompt=prompt, answer=answer)


def _completion(fields: Fields, where: str) -> DatasetRow:
    """Return a prompt with its completion: texts, or turns of a conversation, as TRL has them."""
    given = [_parsed(fields.get(name)) for name in ("prompt", "completion")]
    if all(isinstance(turns, list) and turns for turns in given):
        begun, said = given
        return replace(_answered(fields, begun, said, "completion", where), prompt_turns=len(begun))
    prompt, answer = (_text(fields, name, where, blank=True) for name in ("prompt", "completion"))
    if not (prompt + answer).strip():
        raise bad_row(where, "prompt and completion are blank", "Write text, or drop the row.")
    return DatasetRow(where, prompt=prompt, answer=answer)


def _plain(fields: Fields, where: str) -> DatasetRow:
    return DatasetRow(where, answer=_text(fields, "text", where))


def _preference(fields: Fields, where: str) -> DatasetRow:
    """Return a prompt with two answers: texts, or turns of a conversation.

    As TRL reads them: without a prompt, it is what both answers begin with.
    """
    if _OPENAIS in fields:
        fields = _of_openai(fields, where)
    chosen, rejected = fields.get("chosen"), fields.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _two_conversations(fields, chosen, rejected, where)
    answers = [_text(fields, name, where) for name in ("chosen", "rejected")]
    prompt = fields.get("prompt")
    if prompt is None:
        prompt = _common_text(*answers)
        answers = [answer.removeprefix(prompt) for answer in answers]
    elif not isinstance(prompt, str):
        raise bad_row(
            where,
            "`prompt` is not text, and `chosen` and `rejected` are",
            "Write all three as text, or all three as lists of turns.",
        )
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer.strip():
            raise bad_row(
                where,
                f"`{name}` has nothing behind the prompt that both answers begin with",
                "Write the prompt into a field of its own, `prompt`, or drop the row.",
            )
    other = DatasetRow(where, prompt=prompt, answer=answers[1])
    return DatasetRow(where, prompt=prompt, answer=answers[0], rejected=other)


def _of_openai(fields: Fields, where: str) -> Fields:
    """Return a row of OpenAI's API under the names that are used here."""
    given = fields.get("input")
    if not isinstance(given, dict) or not isinstance(given.get("messages"), list):
        raise bad_row(
            where,
            "`input` has no `messages`",
            "Write {'input': {'messages': [...]}, 'preferred_output': [...], "
            "'non_preferred_output': [...]}.",
        )
    chosen, rejected = fields[_OPENAIS], fields.get("non_preferred_output")
    for name, answer in ((_OPENAIS, chosen), ("non_preferred_output", rejected)):
        if not isinstance(answer, list):
            raise bad_row(where, f"`{name}` is not a list of turns", "Write the turns of one.")
    settings = {
        key: fields[key] for key in ("chat_template_kwargs",) if fields.get(key) is not None
    }
    prompt, tools = given["messages"], given.get("tools")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tools": tools, **settings}


def _two_conversations(
    fields: Fields, chosen: list[Any], rejected: list[Any], where: str
) -> DatasetRow:
    prompt = fields.get("prompt")
    if not isinstance(prompt, list):
        if not isinstance(prompt, str | None):
            raise bad_row(where, "`prompt` is not a list of turns", "Write one, or leave it out.")
        # A text beside two whole conversations says what their first turn says.
        alike = [one == other for one, other in zip(chosen, rejected, strict=False)]
        begun = alike.index(False) if False in alike else len(alike)
        prompt, chosen, rejected = chosen[:begun], chosen[begun:], rejected[begun:]
    if not prompt:
        raise bad_row(
            where,
            "has no prompt: `chosen` and `rejected` begin with different turns",
            "Write its turns in `prompt`.",
        )
    rows = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        row = _answered(fields, prompt, answer, name, where)
        rows.append(replace(row, prompt_turns=len(prompt)))
    return replace(rows[0], rejected=rows[1])


def _answered(
    fields: Fields, prompt: list[Any], answer: list[Any], name: str, where: str
) -> DatasetRow:
    """Return the conversation of a prompt and an answer, which a field holds."""
    row = _conversation(fields, [*prompt, *answer], name, where)
    roles = [turn["role"] for turn in row.turns[len(prompt) - 1 :]]
    if roles[0] == "assistant" or roles[1:2] != ["assistant"] or roles[-1] != "assistant":
        raise bad_row(
            where,
            f"`{name}` is not an answer to the prompt: its turns are of "
            f"{', '.join(roles[1:]) or 'nobody'}, behind one of the {roles[0]}",
            "End the prompt with a turn of the user; begin and end both answers with turns of "
            "the assistant.",
        )
    return row


def _common_text(one: str, other: str) -> str:
    """Return what two texts begin with; a blank before the first difference belongs to them."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[: at - 1 if one[at - 1 : at] == " " else at]


def _text(fields: Fields, name: str, where: str, *, blank: bool = False) -> str:
    """Return a field's text; `blank`: it may consist of blanks, as a part of the row's text."""
    value = fields.get(name)
    if not isinstance(value, str) or not (value if blank else value.strip()):
        found = "is blank" if isinstance(value, str) else "is not text"
        found = found if name in fields else "is missing"
        raise bad_row(
            where, f"`{name}` {found}", f"Write text in `{name}`, or set spec.dataset.format."
        )
    return value


_PARSERS: dict[str, Callable[[Fields, str], DatasetRow]] = {
    "chat": _chat,
    "sharegpt": _sharegpt,
    "instruction": _instruction,
    "completion": _completion,
    "text": _plain,
    "preference": _preference,
}
