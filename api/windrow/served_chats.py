"""Give tools and turns of a chat the form in which a server gives them to its chat template.

Servers take a request into models of their own, and their template gets what these write: fields in
another order, defaults that nobody sent, nothing of a field that they do not know. The facts are of
SGLang 0.5.22 and 0.5.23 (`srt/entrypoints/openai/protocol.py`: Tool, Function and the messages;
`serving_chat.py`; `srt/function_call/utils.py`: types) and of vLLM 0.27
(`entrypoints/openai/engine/protocol.py`, and `entrypoints/chat_utils.py` for the turns; older
versions keep unknown fields of tools).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from windrow.rows import DatasetRow, Fields

Server = Literal["transformers", "sglang-0.5.22", "sglang-0.5.23", "vllm"]
SERVERS: Final[tuple[Server, ...]] = get_args(Server)
# Rows as they are: what `apply_chat_template` gets from those who call it.
PLAIN: Final[Server] = "transformers"
_SGLANG: Final = "sglang-"
# In the order in which the servers' models have them.
_SGLANG_FUNCTION: Final = ("description", "name", "parameters", "strict", "defer_loading")
_VLLM_FUNCTION: Final = ("name", "description", "parameters", "strict", "defer_loading")
_SGLANG_TURN: Final = (
    *("role", "content", "tool_call_id", "name", "phase", "reasoning_content"),
    *("tool_calls", "tools", "prefix"),
)
_VLLM_TURN: Final = ("role", "content", "tool_call_id", "name")
# Of a user's turn SGLang's model has these alone.
_OF_USER: Final = ("role", "content")
# Types of a schema as databases and programs name them, which SGLang writes as JSON schema does.
_STANDARD: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_TYPES: Final = {
    name: standard
    for standard, names in {
        "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea "
        "bytes varbinary",
        "boolean": "bool",
        "integer": "bigint smallint tinyint",
        "number": "double decimal real numeric",
        "array": "arr tuple set",
        "object": "map",
    }.items()
    for name in names.split()
}
_BEGINS: Final = tuple(
    (re.compile(rf"({names})(?=$|[0-9\[<( \t])"), standard)
    for names, standard in (
        ("int|uint|long|short|unsigned", "integer"),
        ("num|float", "number"),
        ("list", "array"),
        ("dict", "object"),
    )
)
# Keywords of a JSON schema that hold schemas: by a name, in a list, and one.
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE: Final = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)


def server_of(engine: str, version: str) -> Server | Literal[""]:
    """Return the server that an engine is; "": one that takes no chats, or is not known.

    An SGLang of another version counts as the nearest one that is known.

    Args:
        engine: its name, as it tells the sidecar.
        version: its version; what follows three numbers does not count.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if engine != "sglang" or found is None:
        return ""
    before = tuple(map(int, found.groups())) < (0, 5, 23)
    return "sglang-0.5.22" if before else "sglang-0.5.23"


def is_sglang(server: str) -> bool:
    """Return whether a server is SGLang, of whichever version."""
    return server.startswith(_SGLANG)


def named(server: str) -> str:
    """Return a server's name for people."""
    return server.replace(_SGLANG, "SGLang ").replace("vllm", "vLLM")


def as_served(row: DatasetRow, server: str) -> DatasetRow:
    """Return a chat row as the chat template of a server gets it.

    What the assistant says keeps all of its fields: it is what the model shall write, and no server
    has taken it from a request.
    """
    if server not in SERVERS or server == PLAIN:
        return row
    tools = [_tool(tool, server) for tool in row.tools] if row.tools else row.tools
    return replace(row, tools=tools, turns=tuple(_turn(turn, server) for turn in row.turns))


def left_out(row: DatasetRow, server: str) -> set[str]:
    """Return the fields of a row's turns, and of its tools, that a server leaves out."""
    served = as_served(row, server)
    pairs = [*zip(row.turns, served.turns, strict=True)]
    for tool, other in zip(row.tools or (), served.tools or (), strict=True):
        pairs += [(tool, other), (_function(tool), _function(other))]
    return {key for one, other in pairs for key in one.keys() - other.keys()}


def bare_tools(row: DatasetRow) -> DatasetRow:
    """Return a row with its tools as SGLang writes them where the template fails over the others.

    That is functions without what is around them.
    """
    return replace(row, tools=[tool.get("function", tool) for tool in row.tools or ()])


def _turn(turn: Fields, server: str) -> Fields:
    known: tuple[str, ...] = _SGLANG_TURN if is_sglang(server) else _VLLM_TURN
    if turn["role"] == "user" and is_sglang(server):
        known = _OF_USER
    kept = {name: turn[name] for name in known if name in turn}
    if not is_sglang(server):
        if turn["role"] != "tool":
            kept.pop("tool_call_id", None)
        if not isinstance(kept.get("name", ""), str):
            kept.pop("name")
    return kept if turn["role"] != "assistant" else {**kept, **turn}


def _function(tool: Fields) -> Fields:
    found = tool.get("function")
    return found if isinstance(found, dict) else {}


def _tool(tool: Fields, server: str) -> Fields:
    """Return a tool as a server's model writes it; one that the server refuses stays as it is."""
    function, deferred = _function(tool), tool.get("defer_loading")
    if not isinstance(function.get("name"), str):
        return tool
    known = _SGLANG_FUNCTION if is_sglang(server) else _VLLM_FUNCTION
    found = {name: function.get(name) for name in known}
    if found["defer_loading"] is None:
        found["defer_loading"] = deferred
    if server == "sglang-0.5.22":
        found["strict"] = bool(found["strict"])
    found = _without_unset(found, "strict", "defer_loading")
    if server == "sglang-0.5.23":
        first = [name for name in function if name in found]
        found = {name: found[name] for name in dict.fromkeys((*first, *found))}
    kind = tool.get("type") or "function"
    if is_sglang(server):
        found["parameters"] = _of_json(found["parameters"])
        return {"type": kind, "function": found, "defer_loading": deferred}
    return {"type": kind, "function": found}


def _without_unset(found: Mapping[str, Any], *names: str) -> Fields:
    return {key: value for key, value in found.items() if value is not None or key not in names}


def _of_json(schema: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a schema with the types of JSON schema in place of others' names for them."""
    if isinstance(schema, list):
        return [_of_json(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    if isinstance(kind := found.get("type"), str):
        found["type"] = _type(kind)
    elif isinstance(kind, list):
        types: list[Any] = []
        for each in map(_type, kind):
            if each not in types:
                types.append(each)
        found["type"] = types
    for key in _BY_NAME:
        if isinstance(held := found.get(key), dict):
            found[key] = {name: _of_json(part) for name, part in held.items()}
    for key in _LISTS:
        if isinstance(held := found.get(key), list):
            found[key] = _of_json(held)
    for key in _ONE:
        if key in found:
            found[key] = _of_json(found[key])
    return found


def _type(name: Any) -> Any:  # noqa: ANN401 - any JSON
    if not isinstance(name, str) or name in _STANDARD:
        return name
    base = name.split("(", 1)[0].strip().lower()
    if base in _STANDARD:
        return base
    if base in _TYPES:
        return _TYPES[base]
    return next((standard for begins, standard in _BEGINS if begins.match(base)), name)
