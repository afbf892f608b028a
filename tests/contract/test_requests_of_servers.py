"""Rows with tools have the tokens that the server of the adapter makes of requests with them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from support.vocabularies import letters

from windrow.errors import UserError
from windrow.proto import agent_pb2, attach_pb2
from windrow.rows import DatasetRecord, row_of
from windrow.rundir import RunDir
from windrow.served_chats import SERVERS, as_served, left_out, server_of
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.slot import AgentSlot
from windrow_sidecar.agent.worker_supervisor import WorkerSupervisor
from windrow_sidecar.engine_facts import AdapterLimits, EngineFacts
from windrow_sidecar.finetune.data.tokens import RowTokenizer
from windrow_sidecar.finetune.job.assembly import JobSpec, read_job

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}"
    "{{ ' ' ~ m.name if m.name and m.role == 'user' else '' }}>{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FUNCTION = {"name": "f", "parameters": {"type": "dict", "properties": {}}, "returns": "int"}
ROW = {
    "messages": [
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "Yes", "name": "bot"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
JSON_TYPES = {"type": "object", "properties": {}}
WRITTEN = {
    "transformers": [{"type": "function", "function": FUNCTION}],
    "sglang-0.5.22": [
        {
            "type": "function",
            "function": {
                "description": None,
                "name": "f",
                "parameters": JSON_TYPES,
                "strict": False,
            },
            "defer_loading": None,
        }
    ],
    "sglang-0.5.23": [
        {
            "type": "function",
            "function": {"name": "f", "parameters": JSON_TYPES, "description": None},
            "defer_loading": None,
        }
    ],
    "vllm": [
        {
            "type": "function",
            "function": {"name": "f", "description": None, "parameters": FUNCTION["parameters"]},
        }
    ],
}


def row(fields=ROW):
    return row_of(DatasetRecord("rows.jsonl:7", fields), "chat")


def tokenizer_of(template):
    made = letters()
    made.chat_template = template
    return made


def text_of(rows, fields=ROW):
    made = rows.example(row(fields))
    return rows._tokenizer.decode(made.ids)


@pytest.mark.parametrize("server", SERVERS)
def test_tools_and_turns_of_a_row_are_those_that_the_server_gives_its_template(server):
    rows = RowTokenizer(tokenizer_of(TEMPLATE), max_length=900, served_by=server)
    user = "<user>" if server.startswith("sglang") else "<user ann>"
    text = text_of(rows)
    assert text.startswith(f"{json.dumps(WRITTEN[server])}{user}Hi<assistant>Yes")
    said = "; ".join(rows.notes())
    assert ("with fields of its own (first rows.jsonl:7)" in said) == (server != "transformers")
    assert ("is for spec.dataset.servedBy to say" in said) == (server == "transformers")
    assert ("leaves out of requests" in said) == (server != "transformers")


def test_what_the_assistant_says_keeps_its_fields_and_others_lose_unknown_ones():
    told = row(
        {
            "messages": [
                {"role": "system", "content": "s", "name": 3, "tool_call_id": "x"},
                {"role": "assistant", "content": "a", "thinking": "t", "weight": 1},
            ]
        }
    )
    assert as_served(told, "vllm").turns == (
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a", "thinking": "t", "weight": 1},
    )
    assert left_out(told, "vllm") == {"name", "tool_call_id"}
    assert left_out(told, "transformers") == set()


def test_a_template_that_fails_over_wrapped_tools_gets_the_functions_as_under_sglang():
    bare = "{% for t in tools %}{{ t['name'] | upper }}{% endfor %}" + TEMPLATE
    strict = "{% if tools and not tools[0].name %}{{ raise_exception('bare') }}{% endif %}" + bare
    rows = RowTokenizer(tokenizer_of(strict), max_length=900, served_by="sglang-0.5.23")
    assert text_of(rows).startswith('F[{"name": "f"')
    assert "as functions alone, as SGLang 0.5.23 does" in "; ".join(rows.notes())
    for server in ("transformers", "vllm"):
        with pytest.raises(UserError, match="refuses the turns: bare"):
            RowTokenizer(tokenizer_of(strict), max_length=900, served_by=server).example(row())


def test_the_first_error_is_told_where_neither_form_of_tools_helps():
    never = "{{ raise_exception('no ' ~ (tools[0].function is defined)) }}"
    rows = RowTokenizer(tokenizer_of(never), max_length=900, served_by="sglang-0.5.22")
    with pytest.raises(UserError, match="refuses the turns: no True"):
        rows.example(row())
    assert "functions alone" not in "; ".join(rows.notes())


def test_rows_that_the_engine_of_now_would_render_otherwise_are_told():
    def told(served_by, engine):
        rows = RowTokenizer(
            tokenizer_of(TEMPLATE), max_length=900, served_by=served_by, engine=engine
        )
        for fields in (ROW, {"messages": [{**turn, "name": None} for turn in ROW["messages"]]}):
            rows.example(row(fields))
        return "; ".join(rows.notes())

    assert (
        "1 row is rendered as the requests of SGLang 0.5.22, with which the job began; SGLang "
        "0.5.23, which serves now, gives its template others (first rows.jsonl:7)"
    ) in told("sglang-0.5.22", "sglang-0.5.23")
    assert "serves now" not in told("sglang-0.5.23", "sglang-0.5.23")
    assert "serves now" not in told("transformers", "")


@pytest.mark.parametrize(
    ("engine", "version", "server"),
    [
        ("sglang", "0.5.22", "sglang-0.5.22"),
        ("sglang", "0.5.23+EAGLE", "sglang-0.5.23"),
        ("sglang", "0.5.9.post1", "sglang-0.5.22"),
        ("sglang", "0.6.0rc1", "sglang-0.5.23"),
        ("sglang", "unknown", ""),
        ("builtin", "0.1.0", ""),
    ],
)
def test_an_engine_is_the_server_of_its_version(engine, version, server):
    assert server_of(engine, version) == server


def test_a_worker_hears_which_engine_serves(tmp_path):
    settings = AgentSettings(run_dir=RunDir(tmp_path))
    spec = {
        "model": {"name": "/m"},
        "dataset": {"source": "/rows.jsonl"},
        "training": {"maxSteps": 1},
        "output": {"destination": "/out"},
    }
    assign = attach_pb2.Assign(job_uid="u", job_name="j", epoch=1, spec_json=json.dumps(spec))
    run = SimpleNamespace(assign=assign, ended=None, asked_to_end=False, send=lambda command: None)
    supervisor = WorkerSupervisor(
        settings,
        0,
        on_exit=lambda end: None,
        engine=lambda: EngineFacts("sglang-0.5.22", AdapterLimits(rank=16)),
    )
    supervisor.runs.append(run)
    asyncio.run(supervisor.take(run))
    job = read_job(settings.run_dir.job_dir("u") / "job.json")
    assert job.engine == EngineFacts("sglang-0.5.22", AdapterLimits(rank=16))
    assert job.served_by == "sglang-0.5.22"


@pytest.mark.parametrize(
    ("chats", "known"), [("sglang-0.5.23", "sglang-0.5.23"), ("", ""), ("sglang-9.9.9", "")]
)
def test_a_slot_gives_jobs_the_form_that_its_engine_says(tmp_path, chats, known):
    settings = AgentSettings(run_dir=RunDir(tmp_path))
    slot = AgentSlot(0, settings, EventOutbox(), on_facts=lambda: None)
    assert slot.jobs._engine() == EngineFacts()
    limits = agent_pb2.AdapterLimits(rank=16, targets=["q_proj"])
    slot.hello = agent_pb2.EngineHello(engine="sglang", chats=chats, adapters=limits)
    facts = slot.jobs._engine()
    assert facts == EngineFacts(known, AdapterLimits(rank=16, targets=("q_proj",)))
    assert EngineFacts.of_document(facts.document()) == facts


def test_a_spec_that_names_a_server_overrules_the_engine(tmp_path):
    spec = {
        "model": {"name": "/m"},
        "dataset": {"source": "/rows.jsonl", "servedBy": "vllm"},
        "training": {"maxSteps": 1},
        "output": {"destination": "/out"},
    }
    path = tmp_path / "job.json"
    path.write_text(
        json.dumps({"name": "j", "uid": "u", "spec": spec, "engine": {"chats": "sglang-0.5.22"}})
    )
    job: JobSpec = read_job(path)
    assert (job.engine.chats, job.served_by) == ("sglang-0.5.22", "vllm")
