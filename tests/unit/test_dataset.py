"""Check what dataset files may hold, and what is said about those that are wrong."""

from __future__ import annotations

import json
import tracemalloc
from functools import cache

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.vocabularies import letters

from windrow.crd import DatasetSpec, parse_job_spec
from windrow.errors import UserError
from windrow.rows import DatasetRecord, DatasetRow, row_of
from windrow_sidecar.finetune.data.reading import ModelLimits, read_dataset
from windrow_sidecar.finetune.data.split import BatchPlan, Example, lengths_of, split
from windrow_sidecar.finetune.data.tokens import RowTokenizer

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@cache
def tokenizer_of(template: str | None):
    made = letters()
    made.chat_template = template
    return made


ROWS = {
    "chat": CHAT,
    "instruction": {"instruction": "a", "output": "b"},
    "completion": {"prompt": "a", "completion": "b"},
    "text": {"text": "a"},
}
ROOMY = ModelLimits(vocabulary=1 << 20, positions=None)


def read(source, form="text", *, limits=ROOMY, max_length=100, template=TEMPLATE, **spec):
    return read_dataset(
        DatasetSpec(source=str(source), format=form, eval_fraction=0.0, **spec),
        RowTokenizer(tokenizer_of(template), max_length=max_length),
        limits,
        seed=1,
    )


def texts(split_) -> list[str]:
    return ["".join(map(chr, e.ids[:-1])) for e in split_.train]


def tokenize(row, *, max_length, template=TEMPLATE):
    return RowTokenizer(tokenizer_of(template), max_length=max_length).example(row)


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
        (
            "chat",
            '{"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text"}]}]}',
            "messages[0] has a part of the type 'image', and text alone is learnt",
        ),
        (
            "chat",
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, '
            '{"type": "text", "text": "b"}]}]}',
            "messages[0] has 2 parts of text, which servers join in different ways",
        ),
        ("chat", '{"messages": [{"role": "user", "content": [3]}]}', "no `content` that is text"),
        ("chat", '{"messages": [{"role": "user", "content": []}]}', "no `content` that is text"),
        (
            "chat",
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "no `content` that is text",
        ),
        (
            "chat",
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}',
            "messages[0] has the `weight` 0",
        ),
        *(
            (
                "chat",
                f'{{"messages": [{{"role": "assistant", "content": "a", "{share}": {value}}}]}}',
                f"messages[0] has the `{share}` ",
            )
            for share, value in (
                ("train", "false"),
                ("training", "false"),
                ("trainable", "0"),
                ("loss", "false"),
                ("loss_mask", "0"),
            )
        ),
        ("instruction", '{"instruction": "x"}', "`output` is missing"),
        ("instruction", '{"instruction": "", "output": "y"}', "`instruction` is blank"),
        ("instruction", '{"instruction": "x", "output": "y", "input": 4}', "`input` is not text"),
        ("completion", '{"prompt": "x"}', "`completion` is missing"),
        ("text", '{"text": 4}', "`text` is not text"),
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


BEYOND = {
    "half a character": '{"text": "bad \\ud83d"}',
    "brackets": "[" * 100_000 + "]" * 100_000,
    "digits": '{"text": "a", "n": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("line", BEYOND.values(), ids=BEYOND)
def test_a_line_beyond_what_can_be_read_is_a_wrong_row_as_others_are(tmp_path, line):
    source = write(tmp_path, '{"text": "ab"}', line, '{"text": "cd"}')
    with pytest.raises(UserError) as caught:
        read(source)
    assert caught.value.field == f"{source}:2"
    assert caught.value.reason == "DatasetInvalid"
    made = read(source, bad_rows="skip")
    assert (texts(made), made.skipped) == (["ab", "cd"], 1)


def test_a_row_of_parquet_that_is_not_utf8_is_named_and_the_others_are_read(tmp_path):
    column = pa.array([b"ab", b"\xff", b"cd"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": column}), tmp_path / "rows.parquet")
    with pytest.raises(UserError) as caught:
        read(tmp_path / "rows.parquet")
    assert caught.value.field.endswith("rows.parquet[1]")
    assert "not UTF-8" in caught.value.problem
    assert texts(read(tmp_path / "rows.parquet", bad_rows="skip")) == ["ab", "cd"]


# As pandas writes them, and others that Python's own types do not hold.
TIMES = {
    "nanoseconds": pa.timestamp("ns"),
    "unknown zone": pa.timestamp("us", tz="Nowhere/Never"),
    "far": pa.timestamp("ms"),
    "day": pa.date32(),
    "while": pa.duration("ns"),
    "hour": pa.time64("ns"),
}


@pytest.mark.parametrize("kind", TIMES)
def test_a_column_of_times_beside_the_rows_is_told_and_harms_none(tmp_path, kind):
    times = pa.array([3 * 10**14 if kind == "far" else 10**7 + 1, None]).cast(pa.int64())
    if kind == "day":
        times = times.cast(pa.int32())
    table = pa.table({"text": ["a", "b"], "at": times.view(TIMES[kind])})
    parquet.write_table(table, tmp_path / "rows.parquet")
    made = read(tmp_path / "rows.parquet")
    assert texts(made) == ["a", "b"]
    assert made.notes[0].startswith("fields of rows that are not read: at (1);")


def test_a_row_of_parquet_that_python_cannot_hold_is_named_and_the_others_are_read(tmp_path):
    pairs = pa.array([[("k", 1), ("k", 2)], [("k", 1)]], pa.map_(pa.string(), pa.int64()))
    table = pa.table({"text": ["a", "b"], "more": pairs})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="holds a value that cannot be read") as caught:
        read(tmp_path / "rows.parquet")
    assert caught.value.field.endswith("rows.parquet[0]")
    assert texts(read(tmp_path / "rows.parquet", bad_rows="skip")) == ["b"]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_row_is_refused(tmp_path, content):
    with pytest.raises(UserError) as caught:
        read(write(tmp_path, content))
    assert caught.value.reason == "DatasetEmpty"


@pytest.mark.parametrize("form", sorted(ROWS))
def test_each_format_is_read(tmp_path, form):
    (example,) = read(write(tmp_path, json.dumps(ROWS[form])), form).train
    assert example.targets > 0


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
    (note,) = made.notes
    assert note.startswith(f"2 rows are wrong and left out (first {source}:1: is not JSON")


def test_fields_of_rows_that_do_not_count_are_told_with_their_number(tmp_path):
    rows = [{"text": "a"}, {"text": "b", "system": "c", "label": 1}, {"text": "d", "system": "e"}]
    (note,) = read(write(tmp_path, *map(json.dumps, rows))).notes
    assert note == (
        "fields of rows that are not read: system (2), label (1); of a row of the format text "
        "these are: text"
    )
    nothing = json.dumps({"text": "a", "label": None})  # as tables of several kinds of rows have it
    assert read(write(tmp_path, nothing)).notes == ()
    full = {"instruction": "a", "input": "b", "output": "c"}
    assert read(write(tmp_path, json.dumps(full)), "instruction").notes == ()


@pytest.mark.parametrize(
    "line", ['{"text": "a", "text": "b"}', '{"text": "a", "more": [{"text": 1, "text": 2}]}']
)
def test_a_row_that_writes_a_field_twice_is_a_wrong_one(tmp_path, line):
    with pytest.raises(UserError, match=r"rows\.jsonl:2: writes 'text' twice") as refused:
        read(write(tmp_path, '{"text": "a"}', line))
    assert refused.value.reason == "DatasetInvalid"
    made = read(write(tmp_path, '{"text": "a"}', line), bad_rows="skip")
    assert (len(made.train), made.skipped) == (1, 1)


@pytest.mark.parametrize(
    ("holds", "problem"),
    [
        ('[{"text": "a"}, {"text": "b", "text": "c"}]', "writes 'text' twice in one object"),
        ('{"data": [{"text": "a"}], "more": [{"text": "b"}]}', "holds several lists: data, more"),
    ],
)
def test_a_json_file_of_which_a_part_would_not_be_read_is_refused(tmp_path, holds, problem):
    (tmp_path / "rows.json").write_text(holds)
    with pytest.raises(UserError, match=problem) as refused:
        read(tmp_path / "rows.json")
    assert refused.value.reason == "DatasetUnreadable"


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    columns = [pa.array(["a"]), pa.array(["b"])]
    table = pa.Table.from_arrays(columns, names=["text", "text"])
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="has two columns 'text'"):
        read(tmp_path / "rows.parquet")


def test_cut_rows_are_counted_and_told_with_the_longest(tmp_path):
    lines = [json.dumps({"text": "a" * n}) for n in (3, 20, 40, 10, 9)]
    made = read(write(tmp_path, *lines), max_length=10)
    assert made.cut == 3, "with the end of its text the fourth has eleven"
    (note,) = made.notes
    assert note == (
        "3 rows are cut to spec.training.maxSequenceLength, 10 tokens; the longest has 41 "
        f"({tmp_path / 'rows.jsonl'}:3)"
    )
    assert read(write(tmp_path, *lines), max_length=41).notes == ()


@pytest.mark.parametrize(
    ("form", "row", "field"),
    [
        ("text", {"text": " \n\t"}, "text"),
        ("instruction", {"instruction": "\u00a0", "output": "b"}, "instruction"),
        ("instruction", {"instruction": "a", "output": "\n"}, "output"),
    ],
)
def test_a_row_of_blank_text_is_a_wrong_one(tmp_path, form, row, field):
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: `{field}` is blank"):
        read(write(tmp_path, json.dumps(row)), form)


def test_a_completion_of_blanks_is_told_and_a_row_of_them_refused(tmp_path):
    rows = [{"prompt": "a", "completion": c} for c in ("b", " ", "\n")]
    (note,) = read(write(tmp_path, *map(json.dumps, rows)), "completion").notes
    assert note.startswith(f"2 rows are completed by blanks alone (first {tmp_path}/rows.jsonl:2)")
    with pytest.raises(UserError, match="prompt and completion are blank"):
        read(write(tmp_path, json.dumps({"prompt": " ", "completion": "\n"})), "completion")


def test_a_blank_input_of_an_instruction_counts_as_left_out(tmp_path):
    row = {"instruction": "a", "output": "b"}
    source = write(tmp_path, json.dumps({**row, "input": " \n"}), json.dumps(row))
    blank, without = read(source, "instruction").train
    assert blank.ids == without.ids


def test_a_dataset_of_wrong_rows_only_is_refused_even_where_they_are_skipped(tmp_path):
    why = r"all of its 1 rows are wrong \(first .*rows\.jsonl:1: is not JSON"
    with pytest.raises(UserError, match=why) as caught:
        read(write(tmp_path, "{"), bad_rows="skip")
    assert caught.value.reason == "DatasetEmpty"


def test_a_row_that_is_longer_than_the_model_allows_is_refused(tmp_path):
    limits = ModelLimits(vocabulary=1 << 20, positions=4)
    source = write(tmp_path, '{"text": "abcdef"}')
    with pytest.raises(UserError, match="7 tokens, the model allows 4") as caught:
        read(source, limits=limits, bad_rows="skip")
    assert caught.value.field == "spec.training.maxSequenceLength"
    assert read(source, limits=limits, max_length=4).train[0].length == 4


def test_virtual_tokens_count_in_the_models_positions(tmp_path):
    source = write(tmp_path, '{"text": "abcdef"}')
    assert read(source, limits=ModelLimits(1 << 20, 23, prefix=16)).train[0].length == 7
    with pytest.raises(UserError, match=r"virtualTokens takes 16\. Set it to 6 or less") as caught:
        read(source, limits=ModelLimits(1 << 20, 22, prefix=16))
    assert caught.value.field == "spec.training.maxSequenceLength"
    with pytest.raises(UserError, match=r"takes 30\. Lower virtualTokens"):
        read(source, limits=ModelLimits(1 << 20, 22, prefix=30))


def test_a_token_beyond_the_models_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocabulary ends before 90") as caught:
        read(write(tmp_path, '{"text": "a"}'), limits=ModelLimits(90, None))
    assert caught.value.field == "spec.model.name"


def test_a_tokenizer_without_a_chat_template_is_refused_for_chat_only(tmp_path):
    with pytest.raises(UserError, match="no chat template") as caught:
        read(write(tmp_path, json.dumps(CHAT)), "chat", template=None, bad_rows="skip")
    assert caught.value.field == "spec.dataset.format"
    assert read(write(tmp_path, '{"text": "a"}'), template=None).train


def test_a_file_without_rows_beside_others_is_told(tmp_path):
    write(tmp_path, '{"text": "a"}')
    (tmp_path / "empty.jsonl").write_text("\n")
    (note,) = read(tmp_path).notes
    assert note == f"{tmp_path / 'empty.jsonl'} holds no row"


def test_rows_lie_on_disk_and_are_read_by_number(tmp_path):
    source = write(tmp_path, *(json.dumps({"text": "ab" * (i + 1)}) for i in range(6)))
    rows = read(source).train
    assert list(lengths_of(rows)) == lengths_of(list(rows))
    assert rows[4].where == f"{source}:5"
    assert [e.where for e in rows[1:3]] == [f"{source}:2", f"{source}:3"]


def test_a_row_takes_32_bytes_of_memory_with_its_place_in_the_order_of_two_epochs(tmp_path):
    n = 5000
    write(tmp_path, *(json.dumps({"text": "ab"}) for _ in range(n)))
    read(tmp_path)  # what libraries keep is kept by now
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        made = read(tmp_path)
        plan = BatchPlan(n, 8, 1)
        plan.rows_of(0), plan.rows_of(plan.steps_per_epoch)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made.train) == n
    # An array that grows has an eighth more than it needs.
    assert (after - before) / n <= 32 * 9 / 8 + 1


def test_a_row_whose_labels_are_all_masked_is_named():
    turns = (CHAT["messages"][0], {"role": "assistant", "content": ""})
    with pytest.raises(UserError, match=r"f:3: none of its 1 tokens would be learnt"):
        tokenize(
            DatasetRow("f:3", turns=turns),
            max_length=50,
            template="{% for m in messages %}{{ m.content }}{% endfor %}",
        )


def test_a_record_that_is_no_object_is_named():
    with pytest.raises(UserError, match=r"rows.json\[3\]: is not a JSON object"):
        row_of(DatasetRecord("rows.json[3]", "text"), "text")


def test_a_row_with_nothing_left_to_learn_is_named():
    with pytest.raises(UserError, match=r"f:7: nothing to learn .* within 5 tokens"):
        tokenize(DatasetRow("f:7", prompt="abcdef", answer="g"), max_length=5)


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


def test_a_weight_that_is_null_counts_as_none(tmp_path):
    answer = {"role": "assistant", "content": "yes", "weight": None}
    row = {"messages": [{"role": "user", "content": "x"}, answer]}
    assert row_of(DatasetRecord("rows.jsonl:1", row), "chat").turns[1]["content"] == "yes"


def test_rows_of_sharegpt_are_those_of_a_chat():
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    record = DatasetRecord("r:1", {"conversations": turns, "system": "c"})
    row = row_of(record, "sharegpt")
    system = {"role": "system", "content": "c"}
    chat = row_of(DatasetRecord("r:1", {"messages": [system, *CHAT["messages"]]}), "chat")
    assert row == chat
    assert tokenize(row, max_length=100).ids == tokenize(chat, max_length=100).ids


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"conversations": []}, "has no `conversations`"),
        ({"messages": []}, "looks like a row of the format chat"),
        (
            {"conversations": [{"from": "bot", "value": "a"}]},
            r"conversations\[0\]: `from` is 'bot'",
        ),
        ({"conversations": ["a"]}, "`from` is not an object"),
        ({"conversations": [{"from": "gpt", "value": 1}]}, r"conversations\[0\] has no `content`"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "no turn of the assistant"),
        (
            {"conversations": [{"from": "system", "value": "a"}], "system": "b"},
            "a turn of the system",
        ),
        (
            {"conversations": [{"role": "user", "content": "a"}]},
            r"format: chat and spec.dataset.columns: \{messages: conversations\}",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            r"conversations\[0\] is a `function_call`, which is not learnt. Write the call into",
        ),
    ],
)
def test_a_wrong_row_of_sharegpt_says_what_is_wrong(fields, said):
    with pytest.raises(UserError, match=said) as caught:
        row_of(DatasetRecord("r:7", fields), "sharegpt")
    assert caught.value.field == "r:7"


def test_turns_of_a_chat_under_the_name_of_sharegpt_are_read_by_columns():
    fields = {"conversations": CHAT["messages"]}
    with pytest.raises(UserError, match=r"spec.dataset.columns: \{messages: conversations\}"):
        row_of(DatasetRecord("r:7", fields), "chat")
    columns = {"messages": "conversations"}
    assert row_of(DatasetRecord("r:7", fields), "chat", columns).turns


ASKED = [{"role": "user", "content": "a"}]
GOOD, BAD = ([{"role": "assistant", "content": said}] for said in ("b", "c"))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": "a", "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"input": {"messages": ASKED}, "preferred_output": GOOD, "non_preferred_output": BAD},
    ],
)
def test_two_answers_as_turns_are_read_in_each_form(fields):
    row = row_of(DatasetRecord("r:1", fields), "preference")
    chosen = row_of(DatasetRecord("r:1", {"messages": ASKED + GOOD}), "chat")
    rejected = row_of(DatasetRecord("r:1", {"messages": ASKED + BAD}), "chat")
    tokenizer = RowTokenizer(tokenizer_of(TEMPLATE), max_length=100)
    pair = tokenizer.examples(row)
    assert [e.ids for e in pair] == [tokenizer.example(r).ids for r in (chosen, rejected)]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "One ", "chosen": "two", "rejected": "ten"},
        {"chosen": "One two", "rejected": "One ten"},  # what both begin with, but for the blank
    ],
)
def test_two_answers_as_text_are_read_in_both_forms(fields, tmp_path):
    pairs = read(write(tmp_path, json.dumps(fields)), "preference")
    assert texts(pairs) == ["One two", "One ten"]
    assert (pairs.train_rows, pairs.held_out_rows, pairs.together) == (1, 0, 2)
    learnt = ["".join(chr(i) for i in e.labels[:-1] if i >= 0) for e in pairs.train]
    assert [said.strip() for said in learnt] in (["two", "ten"], ["wo", "en"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "a", "completion": "b"}, "looks like a row of the format completion"),
        ({"prompt": "a", "chosen": "b"}, "`rejected` is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "`rejected` is blank"),
        ({"chosen": "ab", "rejected": "abc"}, "`chosen` has nothing behind the prompt"),
        ({"prompt": ASKED, "chosen": "b", "rejected": "c"}, "`prompt` is not text"),
        ({"chosen": GOOD, "rejected": BAD}, "has no prompt"),
        ({"prompt": ASKED, "chosen": ASKED, "rejected": BAD}, "no turn of the assistant"),
        (
            {"prompt": ASKED + GOOD, "chosen": GOOD, "rejected": BAD},
            "behind one of the assistant",
        ),
        ({"prompt": ASKED, "chosen": GOOD + ASKED, "rejected": BAD}, "`chosen` is not an answer"),
        ({"prompt": ASKED, "chosen": ["b"], "rejected": BAD}, r"chosen\[1\] has no known `role`"),
        ({"preferred_output": GOOD}, "`input` has no `messages`"),
    ],
)
def test_a_wrong_row_of_preferences_says_what_is_wrong(fields, said):
    with pytest.raises(UserError, match=said) as caught:
        row_of(DatasetRecord("r:7", fields), "preference")
    assert caught.value.field == "r:7"


def test_rows_of_preferences_are_held_out_in_pairs_and_equal_ones_are_reported(tmp_path):
    rows = [{"prompt": "q", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(6)]
    rows.append({"prompt": "q", "chosen": "same", "rejected": "same"})
    spec = DatasetSpec(
        source=write(tmp_path, *map(json.dumps, rows)), format="preference", eval_fraction=0.3
    )
    tokenizer = RowTokenizer(tokenizer_of(TEMPLATE), max_length=100)
    found = read_dataset(spec, tokenizer, ROOMY, seed=1)
    assert (found.train_rows, found.held_out_rows) == (5, 2)
    places = [e.where for e in (*found.train, *found.held_out)]
    assert places[::2] == places[1::2]
    assert any("1 pairs have the same tokens in both answers" in note for note in found.notes)


def test_fields_of_other_names_are_read_by_columns(tmp_path):
    rows = [{"question": "a", "answer": "b", "prompt": "ignored"}, {"question": "c"}]
    columns = {"prompt": "question", "completion": "answer"}
    row = row_of(DatasetRecord("r:1", rows[0]), "completion", columns)
    assert (row.prompt, row.answer, row.unread) == ("a", "b", ())
    with pytest.raises(UserError, match="`completion` is missing"):
        row_of(DatasetRecord("r:2", rows[1]), "completion", columns)
    with pytest.raises(UserError, match="has no `question`, which"):
        row_of(DatasetRecord("r:3", {"answer": "b"}), "completion", columns)
    (tmp_path / "rows.jsonl").write_text('{"body": "xy"}\n')
    assert texts(read(tmp_path / "rows.jsonl", columns={"text": "body"})) == ["xy"]
    for wrong in ({"text": "a"}, {"prompt": "a", "completion": "a"}):
        with pytest.raises(UserError, match="columns: "):
            parse_job_spec({**JOB, "dataset": {**JOB["dataset"], "columns": wrong}})


JOB = {
    "model": {"name": "m"},
    "dataset": {"source": "/rows.jsonl", "format": "completion"},
    "training": {"epochs": 1},
    "output": {"destination": "/out"},
}


def test_mixed_sources_come_as_often_as_their_weights_say(tmp_path):
    for name, count in (("a", 4), ("b", 8), ("c", 2)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"text": "{name}{i}"}}\n' for i in range(count))
        )
    places = [str(tmp_path / f"{name}.jsonl") for name in "abc"]

    def mixed(**spec):
        further = [{"source": places[1], "weight": 0.25}, {"source": places[2], "weight": 2.5}]
        return read(places[0], **{"mixture": further, **spec})

    found = texts(mixed())
    assert found[:4] == ["a0", "a1", "a2", "a3"]
    assert len(set(found[4:6])) == 2
    assert all(text[0] == "b" for text in found[4:6])
    assert found[6:10] == ["c0", "c1"] * 2
    assert len(found) == 11
    assert texts(mixed()) == found
    assert mixed().digest != mixed(weight=2).digest
    assert len(texts(mixed(weight=2))) == 15
    held_out = mixed(eval_source=places[1])
    assert len(held_out.held_out) == 8
    assert texts(held_out) == found
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(UserError, match="nothing to train on: it holds no row") as caught:
        mixed()
    assert caught.value.field == "spec.dataset.mixture[1].source"
    with pytest.raises(UserError, match=r"gone\.jsonl") as caught:
        mixed(mixture=[{"source": str(tmp_path / "gone.jsonl")}])
    assert caught.value.field == "spec.dataset.mixture[0].source"


def test_mixed_sources_are_checked_like_the_first():
    further = [{"source": "s3://bucket/rows", "weight": 0.5}]
    dataset = {**JOB["dataset"], "mixture": further, "secretRef": {"name": "keys"}}
    spec = parse_job_spec({**JOB, "dataset": dataset})
    assert ("dataset.mixture[0].source", "s3://bucket/rows") in spec.dataset.sources
    for wrong in (0, -1, 101, "much"):
        with pytest.raises(UserError, match="weight"):
            parse_job_spec(
                {**JOB, "dataset": {**dataset, "mixture": [{"source": "/a", "weight": wrong}]}}
            )


def test_rows_to_evaluate_on_come_from_evalsource_and_all_others_are_trained_on(tmp_path):
    source, held_out = tmp_path / "rows.jsonl", tmp_path / "eval.jsonl"
    source.write_text('{"text": "a"}\n{"text": "b"}\n')
    held_out.write_text('{"text": "c"}\n')
    found = read(source, eval_source=str(held_out))
    assert texts(found) == ["a", "b"]
    assert ["".join(map(chr, e.ids[:-1])) for e in found.held_out] == ["c"]
    assert found.digest != read(source).digest
    with pytest.raises(UserError, match=r"gone\.jsonl") as caught:
        read(source, eval_source=str(tmp_path / "gone.jsonl"))
    assert caught.value.field == "spec.dataset.evalSource"
    held_out.write_text("\n")
    with pytest.raises(UserError, match="nothing to evaluate on: it holds no row"):
        read(source, eval_source=str(held_out))
    held_out.write_text('{"text": 5}\n')
    with pytest.raises(UserError, match="is not text") as caught:
        read(source, eval_source=str(held_out))
    assert caught.value.field == f"{held_out}:1"
    training = {"epochs": 1, "evalEverySteps": 5}
    dataset = {**JOB["dataset"], "evalFraction": 0, "evalSource": "/eval.jsonl"}
    assert parse_job_spec({**JOB, "training": training, "dataset": dataset}).dataset.evaluates


@pytest.mark.parametrize("kind", ["text", "input_text"])
def test_a_content_of_one_part_is_its_text_as_servers_take_it(kind):
    parts = [
        {"role": role, "content": [{"type": kind, "text": said}]}
        for role, said in (("user", "Hi"), ("assistant", "Yes"))
    ]
    row = row_of(DatasetRecord("rows.jsonl:1", {"messages": parts}), "chat")
    assert [turn["content"] for turn in row.turns] == ["Hi", "Yes"]
