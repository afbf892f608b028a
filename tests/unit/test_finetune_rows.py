"""What dataset files may hold, and what is said about those that are wrong."""

from __future__ import annotations

import json

import pytest

from windrow.errors import UserError
from windrow_sidecar.finetune.data import BatchPlan, Example, split, tokenize
from windrow_sidecar.finetune.rows import Message, Row, Segment, local_path, read_rows

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


class Tokenizer:
    """One token a character; a template that marks roles by a letter and ends turns with a dot."""

    bos_token_id, eos_token_id = 1, 2
    chat_template = "yes"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(c) for c in text]

    def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
        text = "".join(f"{t['role'][0]}{t['content']}." for t in turns)
        return text + ("a" if add_generation_prompt else "")


def write(tmp_path, *lines: str):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("form", "line", "problem"),
    [
        ("chat", "{", "is not JSON"),
        ("chat", "[1]", "is not a JSON object"),
        ("chat", "{}", "has no `messages`"),
        ("chat", '{"messages": [{"role": "boss", "content": "x"}]}', "no known `role`"),
        ("chat", '{"messages": [{"role": "user", "content": 3}]}', "no `content`"),
        ("chat", '{"messages": [{"role": "user", "content": "x"}]}', "no turn of the assistant"),
        ("instruction", '{"instruction": "x"}', "`output` is missing"),
        ("instruction", '{"instruction": "", "output": "y"}', "`instruction` is empty"),
        ("instruction", '{"instruction": "x", "output": "y", "input": 4}', "`input` is not text"),
        ("text", '{"txt": "x"}', "`text` is missing"),
    ],
)
def test_a_wrong_line_is_named_with_file_number_and_reason(tmp_path, form, line, problem):
    good = {"chat": CHAT, "instruction": {"instruction": "a", "output": "b"}, "text": {"text": "a"}}
    source = write(tmp_path, json.dumps(good[form]), "", line)
    with pytest.raises(UserError) as caught:
        read_rows(source, form)
    assert caught.value.field == f"{source}:3"
    assert problem in caught.value.problem
    assert caught.value.remedy
    assert caught.value.reason == "DatasetInvalid"


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2: is not UTF-8"):
        read_rows(str(path), "text")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_row_is_refused(tmp_path, content):
    with pytest.raises(UserError) as caught:
        read_rows(write(tmp_path, content), "chat")
    assert caught.value.reason == "DatasetEmpty"


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        read_rows(str(tmp_path / "none.jsonl"), "chat")
    assert caught.value.reason == "DatasetUnreadable"
    assert caught.value.field == "spec.dataset.source"


def test_paths_and_file_urls_name_files_and_other_schemes_are_refused():
    assert str(local_path("file:///a%20b/c", field="f")) == "/a b/c"
    assert str(local_path("a/b", field="f")) == "a/b"
    with pytest.raises(UserError, match="cannot be reached"):
        local_path("s3://bucket/key", field="f")


def test_the_loss_of_a_conversation_counts_what_the_assistant_says():
    turns = [("user", "hi"), ("assistant", "yo"), ("user", "?"), ("assistant", "no")]
    row = Row("f:1", messages=tuple(Message(*t) for t in turns))
    (example,) = tokenize([row], Tokenizer(), max_length=100)
    assert "".join(map(chr, example.ids)) == "uhi.ayo.u?.ano."
    learned = [chr(i) for i, label in zip(example.ids, example.labels, strict=True) if label >= 0]
    assert "".join(learned) == "yo.no."


def test_an_instruction_learns_its_output_and_the_end():
    row = Row("f:1", segments=(Segment("ab", learn=False), Segment("cd", learn=True)))
    (example,) = tokenize([row], Tokenizer(), max_length=100)
    assert example.ids == (1, ord("a"), ord("b"), ord("c"), ord("d"), 2)
    assert example.labels == (-100, -100, -100, ord("c"), ord("d"), 2)


def test_a_row_with_nothing_left_to_learn_is_named():
    row = Row("f:7", segments=(Segment("abcdef", learn=False), Segment("g", learn=True)))
    with pytest.raises(UserError, match=r"f:7: nothing to learn .* within 5 tokens"):
        tokenize([row], Tokenizer(), max_length=5)


def test_a_template_that_rewrites_history_is_refused():
    class Rewriting(Tokenizer):
        def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
            return f"{len(turns)}" + super().apply_chat_template(
                turns, tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )

    row = Row("f:1", messages=(Message("user", "a"), Message("assistant", "b")))
    with pytest.raises(UserError, match="renders earlier turns anew"):
        tokenize([row], Rewriting(), max_length=50)


def rows(n: int) -> list[Example]:
    return [Example((3, 4), (-100, 4), f"f:{i}") for i in range(n)]


def test_the_split_is_the_same_for_the_same_seed_and_loses_nothing():
    one, two = (split(rows(20), eval_fraction=0.1, seed=5) for _ in range(2))
    assert one == two
    assert len(one.held_out) == 2
    assert {e.where for e in one.train + one.held_out} == {f"f:{i}" for i in range(20)}
    assert split(rows(3), eval_fraction=0.0, seed=5).held_out == ()


def test_too_few_rows_to_hold_one_out_are_refused():
    with pytest.raises(UserError, match="evalFraction"):
        split(rows(1), eval_fraction=0.1, seed=5)


def test_every_epoch_visits_every_row_once_in_another_order():
    plan = BatchPlan(rows=10, batch=4, seed=3)
    epochs = [
        [row for step in range(e * 3, e * 3 + 3) for row in plan.rows_of(step)] for e in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert plan.total_steps(epochs=2, max_steps=None) == 6
    assert plan.total_steps(epochs=None, max_steps=5) == 5
