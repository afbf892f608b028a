"""What dataset files may hold, and what is said about those that are wrong."""

from __future__ import annotations

import gzip
import importlib.util
import json

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from windrow.crd import DatasetSpec
from windrow.errors import UserError
from windrow_sidecar.finetune.dataset.places import find_files, local_path
from windrow_sidecar.finetune.dataset.reading import ModelLimits, read_dataset
from windrow_sidecar.finetune.dataset.records import Record, read_records
from windrow_sidecar.finetune.dataset.rows import Message, Row, Segment, row_of
from windrow_sidecar.finetune.dataset.tokens import RowTokenizer
from windrow_sidecar.finetune.training.data import BatchPlan, Example, lengths_of, split

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


ROWS = {
    "chat": CHAT,
    "instruction": {"instruction": "a", "output": "b"},
    "completion": {"prompt": "a", "completion": "b"},
    "text": {"text": "a"},
}
ROOMY = ModelLimits(vocabulary=1 << 20, positions=None)


def read(source, form="text", *, limits=ROOMY, max_length=100, tokenizer=None, **spec):
    return read_dataset(
        DatasetSpec(source=str(source), format=form, eval_fraction=0.0, **spec),
        RowTokenizer(tokenizer or Tokenizer(), max_length=max_length),
        limits,
        seed=1,
    )


def texts(split_) -> list[str]:
    return ["".join(map(chr, e.ids[1:-1])) for e in split_.train]


def tokenize(rows, tokenizer, *, max_length, learn_all=False):
    made = RowTokenizer(tokenizer, max_length=max_length, learn_all=learn_all)
    return [made.example(row) for row in rows]


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
        ("chat", '{"messages": [{"role": "assistant", "content": " "}]}', "says nothing"),
        (
            "chat",
            '{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": 1}]}]}',
            "messages[0] has `tool_calls`, which is not learnt",
        ),
        ("instruction", '{"instruction": "x"}', "`output` is missing"),
        ("instruction", '{"instruction": "", "output": "y"}', "`instruction` is empty"),
        ("instruction", '{"instruction": "x", "output": "y", "input": 4}', "`input` is not text"),
        ("completion", '{"prompt": "x"}', "`completion` is missing"),
        ("text", '{"txt": "x"}', "`text` is missing"),
        ("text", '{"prompt": "x", "completion": "y"}', "looks like a row of the format completion"),
        ("chat", '{"instruction": "x"}', "looks like a row of the format instruction"),
    ],
)
def test_a_wrong_line_is_named_with_file_number_and_reason(tmp_path, form, line, problem):
    source = write(tmp_path, json.dumps(ROWS[form]), "", line)
    with pytest.raises(UserError) as caught:
        read(source, form)
    assert caught.value.field == f"{source}:3"
    assert problem in caught.value.problem
    assert caught.value.remedy
    assert caught.value.reason == "DatasetInvalid"


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:2: is not UTF-8"):
        read(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_row_is_refused(tmp_path, content):
    with pytest.raises(UserError) as caught:
        read(write(tmp_path, content))
    assert caught.value.reason == "DatasetEmpty"


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        read(tmp_path / "none.jsonl")
    assert caught.value.reason == "DatasetUnreadable"
    assert caught.value.field == "spec.dataset.source"


def test_paths_and_file_urls_name_files_and_other_schemes_are_refused():
    assert str(local_path("file:///a%20b/c", field="f")) == "/a b/c"
    assert str(local_path("a/b", field="f")) == "a/b"
    with pytest.raises(UserError, match="cannot be reached"):
        local_path("s3://bucket/key", field="f")


def put(path, form: str, rows) -> None:
    path.parent.mkdir(exist_ok=True)
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif form == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("form", ["jsonl", "ndjson", "json", "parquet"])
def test_each_kind_of_file_gives_the_same_rows(tmp_path, form):
    put(tmp_path / f"rows.{form}", form, [{"text": "ab"}, {"text": "cd"}])
    assert texts(read(tmp_path / f"rows.{form}")) == ["ab", "cd"]


@pytest.mark.parametrize("form", sorted(ROWS))
def test_each_format_is_read(tmp_path, form):
    (example,) = read(write(tmp_path, json.dumps(ROWS[form])), form).train
    assert example.targets > 0


def test_a_directory_is_read_in_order_and_only_the_split_that_is_wanted(tmp_path):
    for name, text in (("train-00001.jsonl", "b"), ("train-00000.jsonl", "a"), ("test.jsonl", "z")):
        put(tmp_path / "data" / name, "jsonl", [{"text": text}])
    (tmp_path / "README.md").write_text("not rows")
    assert texts(read(tmp_path)) == ["a", "b"]
    assert texts(read(tmp_path, split="test")) == ["z"]
    with pytest.raises(UserError, match=r"spec.dataset.split.*one of test, train"):
        read(tmp_path, split="validation")


def test_a_directory_without_rows_and_a_file_of_no_known_kind_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b")
    for source in (tmp_path, tmp_path / "rows.csv"):
        with pytest.raises(UserError) as caught:
            read(source)
        assert caught.value.field == "spec.dataset.source"
        assert ".parquet" in str(caught.value)


def test_a_file_may_be_compressed(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "ab"}\n'))
    assert texts(read(path)) == ["ab"]


def test_what_another_file_system_holds_is_read_through_fsspec():
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/train/a.jsonl", b'{"text": "ab"}\n{"text": 3}\n')
    (file,) = find_files("memory://bucket/train")
    first, second = read_records(file)
    assert row_of(first, "text").segments[0].text == "ab"
    assert second.where == "memory:///bucket/train/a.jsonl:2"


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_place_without_a_client_says_what_to_install():
    with pytest.raises(UserError, match=r"Install windrow\[s3\]"):
        find_files("s3://bucket/rows.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.json", "{", "is not JSON"),
        ("rows.json", "3", "is not a list of rows"),
        ("rows.parquet", "PAR1 no", "is not a Parquet file"),
    ],
)
def test_a_file_that_is_not_what_its_suffix_says_is_refused(tmp_path, name, content, problem):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=problem) as caught:
        read(tmp_path / name, bad_rows="skip")
    assert caught.value.reason == "DatasetUnreadable"


def test_all_wrong_rows_are_named_at_once(tmp_path):
    source = write(tmp_path, '{"text": "a"}', "{", '{"text": ""}')
    with pytest.raises(UserError) as caught:
        read(source)
    assert caught.value.field == f"{source}:2"
    assert f"{source}:3" in caught.value.problem
    assert "badRows" in caught.value.remedy


def test_wrong_rows_are_left_out_counted_and_logged_where_the_job_says_so(tmp_path, caplog):
    source = write(tmp_path, "{", '{"text": "a"}', '{"text": 4}', '{"text": "b"}')
    made = read(source, bad_rows="skip")
    assert texts(made) == ["a", "b"]
    assert made.skipped == 2
    assert [place in caplog.text for place in (f"{source}:1", f"{source}:3")] == [True, True]


def test_a_dataset_of_wrong_rows_only_is_refused_even_where_they_are_skipped(tmp_path):
    with pytest.raises(UserError, match="all of its 1 rows are wrong") as caught:
        read(write(tmp_path, "{"), bad_rows="skip")
    assert caught.value.reason == "DatasetEmpty"


def test_a_row_that_is_longer_than_the_model_allows_is_refused(tmp_path):
    limits = ModelLimits(vocabulary=1 << 20, positions=4)
    source = write(tmp_path, '{"text": "abcdef"}')
    with pytest.raises(UserError, match="8 tokens, the model allows 4") as caught:
        read(source, limits=limits, bad_rows="skip")
    assert caught.value.field == "spec.training.maxSequenceLength"
    assert read(source, limits=limits, max_length=4).train[0].length == 4


def test_virtual_tokens_count_in_the_models_positions(tmp_path):
    source = write(tmp_path, '{"text": "abcdef"}')
    assert read(source, limits=ModelLimits(1 << 20, 24, prefix=16)).train[0].length == 8
    with pytest.raises(UserError, match=r"virtualTokens takes 16\. Set it to 7 or less") as caught:
        read(source, limits=ModelLimits(1 << 20, 23, prefix=16))
    assert caught.value.field == "spec.training.maxSequenceLength"
    with pytest.raises(UserError, match=r"takes 30\. Lower virtualTokens"):
        read(source, limits=ModelLimits(1 << 20, 23, prefix=30))


def test_a_token_beyond_the_models_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocabulary ends before 90") as caught:
        read(write(tmp_path, '{"text": "a"}'), limits=ModelLimits(90, None))
    assert caught.value.field == "spec.model.name"


def test_a_tokenizer_without_a_chat_template_is_refused_for_chat_only(tmp_path):
    class Plain(Tokenizer):
        chat_template = None

    with pytest.raises(UserError, match="no chat template") as caught:
        read(write(tmp_path, json.dumps(CHAT)), "chat", tokenizer=Plain(), bad_rows="skip")
    assert caught.value.field == "spec.dataset.format"
    assert read(write(tmp_path, '{"text": "a"}'), tokenizer=Plain()).train


def test_rows_lie_on_disk_and_are_read_by_number(tmp_path):
    source = write(tmp_path, *(json.dumps({"text": "ab" * (i + 1)}) for i in range(6)))
    rows = read(source).train
    assert list(lengths_of(rows)) == lengths_of(list(rows))
    assert rows[4].where == f"{source}:5"
    assert [e.where for e in rows[1:3]] == [f"{source}:2", f"{source}:3"]


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


def test_the_loss_may_count_prompts_as_well():
    row = Row("f:1", segments=(Segment("ab", learn=False), Segment("cd", learn=True)))
    (example,) = tokenize([row], Tokenizer(), max_length=100, learn_all=True)
    assert example.labels == (-100, *example.ids[1:])


def test_a_row_whose_labels_are_all_masked_is_named():
    turns = (Message("user", "a"), Message("assistant", ""))

    class Silent(Tokenizer):
        def apply_chat_template(self, turns, *, tokenize, add_generation_prompt):
            return "".join(t["content"] for t in turns)

    with pytest.raises(UserError, match=r"f:3: none of its 1 tokens would be learnt"):
        tokenize([Row("f:3", messages=turns)], Silent(), max_length=50)


def test_a_record_that_is_no_object_is_named():
    with pytest.raises(UserError, match=r"rows.json\[3\]: is not a JSON object"):
        row_of(Record("rows.json[3]", "text"), "text")


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
