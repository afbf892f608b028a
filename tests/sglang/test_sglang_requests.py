"""Rows are given to the chat template as SGLang's own request models give it what clients send."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from support.sglang_servers import PYTHON

from windrow.rows import DatasetRecord, row_of
from windrow.served_chats import as_served, server_of

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
ROWS = {
    "a tool as OpenAI's clients send it": {
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "F", "parameters": SCHEMA},
            }
        ]
    },
    "fields in another order": {
        "tools": [
            {
                "function": {"parameters": SCHEMA, "strict": False, "name": "f"},
                "type": "function",
            }
        ]
    },
    "a name alone": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "a type that is left out": {"tools": [{"function": {"name": "f", "description": "F"}}]},
    "fields that nobody knows": {
        "tools": [
            {
                "type": "function",
                "id": 3,
                "function": {"name": "f", "return": {"type": "string"}, "strict": True},
            }
        ]
    },
    "tools that are loaded later": {
        "tools": [
            {"type": "function", "defer_loading": True, "function": {"name": "f"}},
            {"type": "function", "function": {"defer_loading": False, "name": "g"}},
        ]
    },
    "types of databases": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "type": "dict",
                        "properties": {
                            name: {"type": name, "items": {"type": [name, "str", "string"]}}
                            for name in (
                                *("varchar(255)", "int32", "float64", "list[str]", "String"),
                                *("bool", "decimal(10,2)", "dict[str, int]", "enum", "tuple"),
                                *("integer", "numeric", "unsigned int", "timestamp"),
                            )
                        },
                        "additionalProperties": {"anyOf": [{"type": "int"}, {"type": "null"}]},
                        "$defs": {"x": {"not": {"type": "uint8"}, "enum": ["int"]}},
                    },
                },
            }
        ]
    },
    "turns with more than their text": {
        "messages": [
            {"name": "s", "role": "system", "content": "Be kind.", "source": "x"},
            {"role": "user", "content": "Hi", "name": "ann", "date": "today"},
            {"role": "assistant", "content": "Yes"},
            {"role": "tool", "name": "f", "content": "3", "tool_call_id": "a", "status": "done"},
        ]
    },
}
ASK = """
import copy, json, sys
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.function_call.utils import normalize_json_schema_types
from sglang.srt.parser.jinja_template_utils import process_content_for_template_format
def given(row):
    request = ChatCompletionRequest(model="m", **row)
    for tool in request.tools or ():  # as its `_validate_request` does
        if tool.function.parameters is not None:
            normalize_json_schema_types(tool.function.parameters)
    turns = [copy.deepcopy(turn.model_dump()) for turn in request.messages]
    return [
        [process_content_for_template_format(t, "string", [], [], [], []) for t in turns],
        [tool.model_dump() for tool in request.tools or ()],
    ]
import sglang
rows = json.loads(sys.argv[1])
print(json.dumps([sglang.__version__, {name: given(row) for name, row in rows.items()}]))
"""


def sent(row):
    return {"messages": TALK, **row}


@pytest.fixture(scope="module")
def asked():
    """Return SGLang's version, and what its template gets of each row."""
    done = subprocess.run(
        [str(PYTHON), "-c", ASK, json.dumps({name: sent(row) for name, row in ROWS.items()})],
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ROWS)
def test_a_template_gets_of_a_row_what_sglang_gives_it_of_a_request(asked, name):
    version, answers = asked
    row = row_of(DatasetRecord("rows.jsonl:1", sent(ROWS[name])), "chat")
    served = as_served(row, server_of("sglang", version))
    # The order of keys counts: templates write objects as JSON.
    assert json.dumps([list(served.turns), served.tools or []]) == json.dumps(answers[name])
