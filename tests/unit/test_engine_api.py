from __future__ import annotations

import pytest

from windrow.errors import UserError
from windrow_sidecar.engines.builtin.link import RequestUpdate
from windrow_sidecar.engines.builtin.web import api
from windrow_sidecar.engines.builtin.web.answer import CompletionAnswer
from windrow_sidecar.engines.builtin.web.messages import Finished


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": ["two", "prompts"]}, "prompt.0"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "stop": 3}, "stop"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "stream_options": {"include": 1}}, "stream_options.include"),
        ({"prompt": "x", "maxtokens": 3}, "maxtokens"),
        *(
            ({"prompt": "x", name: True}, name)
            for name in (
                *("max_tokens", "temperature", "top_p", "seed", "deferral_ms", "n", "best_of"),
                *("bootstrap_room", "bootstrap_port"),
            )
        ),
        ({"prompt": "x", "stop_token_ids": [7, False]}, "stop_token_ids"),
        ({"prompt": [True]}, "prompt"),
        ("x", ""),
    ],
)
def test_a_bad_request_is_refused_by_its_field(body, field):
    with pytest.raises(UserError) as refused:
        api.parse_body(body)
    assert refused.value.field == field


def test_switches_are_true_or_false():
    body = {"prompt": "x", "stream": True, "ignore_eos": True, "echo": False}
    assert api.parse_body(body).stream
    assert api.parse_body({**body, "stream_options": {"include_usage": True}}).ignore_eos


def test_a_bootstrap_host_or_room_says_that_the_kv_arrives():
    assert not api.parse_body({"prompt": "x"}).kv_arrives
    assert api.parse_body({"prompt": "x", "bootstrap_host": "2.2.2.2"}).kv_arrives
    assert api.parse_body({"prompt": "x", "bootstrap_room": 0}).kv_arrives


def test_kv_from_elsewhere_is_refused_where_none_can_arrive():
    body = api.parse_body({"prompt": "x", "bootstrap_room": 3})
    api.check_source(body, disaggregated=True)
    with pytest.raises(UserError) as refused:
        api.check_source(body, disaggregated=False)
    assert refused.value.field == "bootstrap_room"


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(0, 1), (10, 91), (100, 1)])
def test_what_could_never_fit_is_refused(n_prompt, max_tokens):
    with pytest.raises(UserError):
        api.check_length(n_prompt, max_tokens, 100)


def test_what_just_fits_passes():
    api.check_length(10, 90, 100)


def answer(**fields):
    body = api.parse_body({"prompt": "x", "max_tokens": 9, **fields})
    return CompletionAnswer("cmpl-1", "model", 1, body, lambda tokens: bytes(tokens).decode())


def test_a_whole_answer_has_text_usage_and_the_reason_of_its_end():
    whole = answer()
    whole.add(RequestUpdate([104], None))
    whole.add(RequestUpdate([105], Finished(1, "length", 10, 2_000_010)))
    found = whole.whole()
    assert found["choices"][0]["text"] == "hi"
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert found["windrow"]["tpot_ms"] == 2.0


def test_a_stop_string_ends_an_answer_before_the_engine_does():
    stopping = answer(stop=["lo"])
    texts = [stopping.add(RequestUpdate([byte], None)) for byte in b"hello"]
    assert "".join(texts) == "hel"
    assert stopping.is_done
    assert stopping.whole()["choices"][0]["finish_reason"] == "stop"
