"""Files that a source names, how they are unpacked, and what is said of those that cannot be."""

from __future__ import annotations

import bz2
import functools
import gzip
import importlib.util
import io
import json
import lzma
import os
from decimal import Decimal

import fsspec
import pyarrow as pa
import pytest
from pyarrow import parquet

from windrow.errors import UserError
from windrow.rows import DatasetRecord, row_of
from windrow_sidecar.finetune.data import records
from windrow_sidecar.finetune.data.places import find_files, local_path
from windrow_sidecar.finetune.data.records import read_records
from windrow_sidecar.finetune.data.source_access import UNCONFINED

find_files_anywhere = functools.partial(find_files, access=UNCONFINED)


def texts(source, split="train") -> list[str]:
    files = find_files_anywhere(str(source), split)
    return [row_of(record, "text").answer for file in files for record in read_records(file)]


@pytest.mark.parametrize("content", ["[" * 100_000 + "]" * 100_000, "[" + "9" * 5000 + "]"])
def test_a_list_beyond_what_can_be_read_is_a_bad_file(tmp_path, content):
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(UserError, match=r"rows\.json is beyond what is read") as caught:
        texts(tmp_path / "rows.json")
    assert caught.value.reason == "DatasetUnreadable"


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        texts(tmp_path / "none.jsonl")
    assert caught.value.reason == "DatasetUnreadable"
    assert caught.value.field == "spec.dataset.source"


def test_a_pipe_that_nobody_may_ever_write_is_refused(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="neither a file nor a directory"):
        texts(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(("place", "lacks"), [("http:///x.jsonl", "host"), ("s3:///x", "bucket")])
def test_a_url_without_a_host_is_the_users_to_mend(place, lacks):
    with pytest.raises(UserError, match=f"names no {lacks}"):
        find_files_anywhere(place)


def test_paths_and_file_urls_name_files_and_other_schemes_are_refused():
    assert str(local_path("file:///a%20b/c", field="f")) == "/a b/c"
    assert str(local_path("a/b", field="f")) == "a/b"
    with pytest.raises(UserError, match="cannot be reached"):
        local_path("s3://bucket/key", field="f")


def put(path, form: str, rows) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif form == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("form", ["jsonl", "ndjson", "json", "parquet"])
def test_each_kind_of_file_gives_the_same_rows(tmp_path, form):
    put(tmp_path / f"rows.{form}", form, [{"text": "ab"}, {"text": "cd"}])
    assert texts(tmp_path / f"rows.{form}") == ["ab", "cd"]


def test_a_directory_is_read_in_order_and_only_the_split_that_is_wanted(tmp_path):
    for name, text in (("train-00001.jsonl", "b"), ("train-00000.jsonl", "a"), ("test.jsonl", "z")):
        put(tmp_path / "data" / name, "jsonl", [{"text": text}])
    (tmp_path / "README.md").write_text("not rows")
    assert texts(tmp_path) == ["a", "b"]
    assert texts(tmp_path, split="test") == ["z"]
    with pytest.raises(UserError, match=r"spec.dataset.split.*one of test, train"):
        texts(tmp_path, split="validation")


def told(source, split="train"):
    notes = []
    found = [
        file.path.removeprefix(f"{source}/")
        for file in find_files_anywhere(str(source), split, notes.append)
    ]
    return found, notes


def test_files_beside_the_rows_that_are_not_read_are_told(tmp_path):
    for name in (
        "a.jsonl",
        "b.csv",
        "c/d.tsv",
        "README.md",
        ".hidden",
        "LICENSE",
        "dataset_info.json",
    ):
        put(tmp_path / name, "jsonl", [{"text": "ab"}])
    found, (note,) = told(tmp_path)
    assert found == ["a.jsonl"]
    assert note.startswith(f"{tmp_path} holds files that are not read: b.csv, c/d.tsv (")
    put(tmp_path / "train.jsonl", "jsonl", [{"text": "ab"}])
    found, (note,) = told(tmp_path)
    assert found == ["train.jsonl"]
    assert "not read: a.jsonl, b.csv, c/d.tsv (" in note
    for n in range(9):
        put(tmp_path / f"e{n}.csv", "jsonl", [])
    assert "c/d.tsv, e0.csv, e1.csv, 7 more (" in told(tmp_path)[1][0]


def test_a_link_to_a_directory_is_told_as_what_is_not_read(tmp_path):
    put(tmp_path / "rows" / "a.jsonl", "jsonl", [{"text": "ab"}])
    put(tmp_path / "more" / "b.jsonl", "jsonl", [{"text": "cd"}])
    (tmp_path / "rows" / "linked").symlink_to(tmp_path / "more")
    found, (note,) = told(tmp_path / "rows")
    assert found == ["a.jsonl"]
    assert "not read: linked (" in note
    assert note.endswith(", or are links to directories)")


@pytest.mark.parametrize(
    "name", ["Test.jsonl", "data_test.jsonl", "testing.jsonl", "x/my-val.json"]
)
def test_a_file_that_may_be_of_another_split_and_is_read_is_told(tmp_path, name):
    put(tmp_path / "rows.jsonl", "jsonl", [])
    put(tmp_path / name, "jsonl", [])
    found, (note,) = told(tmp_path)
    assert found == sorted(["rows.jsonl", name])
    assert note.startswith(f"{tmp_path}: read as rows of the split 'train', though")
    assert f"another: {name} (" in note


def test_a_file_that_is_read_packed_and_unpacked_is_told(tmp_path):
    put(tmp_path / "rows.jsonl", "jsonl", [])
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b""))
    assert told(tmp_path)[1] == [
        f"{tmp_path}: read packed and unpacked, so their rows count twice: rows.jsonl.gz"
    ]


def test_rows_alone_are_read_without_a_word(tmp_path):
    put(tmp_path / "train.jsonl", "jsonl", [])
    put(tmp_path / "test.jsonl", "jsonl", [])
    assert told(tmp_path) == (["train.jsonl"], [])
    assert told(tmp_path / "test.jsonl")[1] == []


def test_a_split_that_a_single_file_does_not_hold_is_refused(tmp_path):
    put(tmp_path / "rows.jsonl", "jsonl", [{"text": "ab"}])
    put(tmp_path / "test.jsonl", "jsonl", [{"text": "ab"}])
    with pytest.raises(
        UserError, match=r"rows\.jsonl is one file, which holds no split 'test'"
    ) as no:
        texts(tmp_path / "rows.jsonl", split="test")
    assert no.value.field == "spec.dataset.split"
    assert texts(tmp_path / "test.jsonl", split="test") == ["ab"]


def test_a_split_that_no_file_of_a_directory_is_named_after_is_refused(tmp_path):
    put(tmp_path / "a.jsonl", "jsonl", [{"text": "ab"}])
    with pytest.raises(UserError, match=r"'test' is not a split .* files is named after"):
        texts(tmp_path, split="test")
    put(tmp_path / "pilot-0.jsonl", "jsonl", [{"text": "cd"}])
    assert texts(tmp_path, split="pilot") == ["cd"], "a split may have any name"


def test_a_directory_without_rows_and_a_file_of_no_known_kind_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b")
    for source in (tmp_path, tmp_path / "rows.csv"):
        with pytest.raises(UserError) as caught:
            texts(source)
        assert caught.value.field == "spec.dataset.source"
        assert ".parquet" in str(caught.value)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


PACKED = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd}
# Lines that hardly repeat, so that half of what they become is half of them.
MANY = b"".join(b'{"text": "%x"}\n' % (n * 7919**5 % 2**64) for n in range(4000))


@pytest.mark.parametrize("how", PACKED)
def test_a_file_may_be_compressed(tmp_path, how):
    path = tmp_path / f"rows.jsonl.{how}"
    path.write_bytes(PACKED[how](b'{"text": "ab"}\n{"text": "cd"}\n'))
    assert texts(path) == ["ab", "cd"]


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "not packed"])
@pytest.mark.parametrize("how", PACKED)
def test_a_damaged_file_is_named_wherever_it_lies(how, damage):
    packed = PACKED[how](MANY)
    half = len(packed) // 2
    content = {
        "cut off": packed[:half],
        "overwritten": packed[:half] + bytes(99) + packed[half + 99 :],
        "not packed": MANY,
    }[damage]
    fsspec.filesystem("memory").pipe(f"/damaged/rows.jsonl.{how}", content)
    with pytest.raises(UserError, match=rf"rows\.jsonl\.{how} is damaged or cut off") as caught:
        list(read_records(*find_files_anywhere(f"memory://damaged/rows.jsonl.{how}")))
    assert caught.value.reason == "DatasetUnreadable"
    assert caught.value.field == "spec.dataset.source"


@pytest.mark.parametrize("place", [slice(8, 40), slice(200, 300)])
def test_a_damaged_page_of_parquet_is_the_files_fault_wherever_it_lies(place):
    written = io.BytesIO()
    table = pa.table({"text": [f"hello world {n}" for n in range(3000)]})
    parquet.write_table(table, written, compression="snappy")
    content = bytearray(written.getvalue())
    content[place] = b"\xff" * (place.stop - place.start)
    fsspec.filesystem("memory").pipe("/damaged/rows.parquet", bytes(content))
    with pytest.raises(UserError, match=r"rows\.parquet is damaged or cut off"):
        list(read_records(*find_files_anywhere("memory://damaged/rows.parquet")))


@pytest.mark.parametrize("names", [["main/train-0", "other/train-0"], ["train", "other/train/0"]])
def test_sets_in_several_folders_are_refused_by_name(tmp_path, names):
    for name in names:
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "ab"}\n')
    with pytest.raises(UserError, match=r"several sets of rows with the split 'train'") as caught:
        texts(tmp_path)
    assert caught.value.field == "spec.dataset.source"
    assert caught.value.remedy.endswith(f"{tmp_path}/other.")
    assert texts(tmp_path / "other") == ["ab"]


def test_parts_of_one_split_may_lie_in_folders_below_it(tmp_path):
    for part in ("0", "1"):
        (tmp_path / "data" / "train" / part).mkdir(parents=True)
        (tmp_path / "data" / "train" / part / "rows.jsonl").write_text('{"text": "ab"}\n')
    assert texts(tmp_path) == ["ab", "ab"]


@pytest.mark.parametrize("name", ["dataset_infos.json", "dataset_info.json", "state.json"])
def test_what_libraries_write_beside_rows_is_passed_over(tmp_path, name):
    (tmp_path / name).write_text('{"default": {"features": {}}}')
    (tmp_path / "rows.jsonl").write_text('{"text": "ab"}\n')
    assert texts(tmp_path) == ["ab"]


def test_what_another_file_system_holds_is_read_through_fsspec():
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/train/a.jsonl", b'{"text": "ab"}\n{"text": 3}\n')
    (file,) = find_files_anywhere("memory://bucket/train")
    first, second = read_records(file)
    assert row_of(first, "text").answer == "ab"
    assert second.where == "memory:///bucket/train/a.jsonl:2"


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")
def test_a_bucket_without_credentials_is_the_users_to_mend(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="Unable to locate credentials") as caught:
        find_files_anywhere("s3://bucket/rows.jsonl")
    assert caught.value.field == "spec.dataset.source"
    assert "AWS_ACCESS_KEY_ID" in caught.value.remedy


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_place_without_a_client_says_what_to_install():
    with pytest.raises(UserError, match=r"pip install .*\[s3\]"):
        find_files_anywhere("s3://bucket/rows.jsonl")


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
        texts(tmp_path / name)
    assert caught.value.reason == "DatasetUnreadable"


def test_a_json_file_may_hold_a_row_a_line_and_a_table_its_turns_as_json(tmp_path):
    """`datasets` reads .json so, and writes what it calls Json as text."""
    row = {"messages": [{"role": "user", "content": "x"}, ANSWER]}
    path = tmp_path / "rows.json"
    path.write_text(f"{json.dumps(row)}\n\n{json.dumps(row)}\n")
    (first, second) = rows_of(path)
    assert first.turns == second.turns == tuple(row["messages"])
    assert second.where == f"{path}:3"
    path.write_text(f"{json.dumps(row)}\n3\n")
    with pytest.raises(UserError, match=r"rows.json:2: is not a JSON object"):
        rows_of(path)
    written = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(row["messages"])]))
    parquet.write_table(pa.table({"messages": written}), tmp_path / "rows.parquet")
    (found,) = rows_of(tmp_path / "rows.parquet")
    assert found.turns == tuple(row["messages"])


SCHEMA = "{% if tools %}{{ tools | tojson }}{% endif %}"


def tool(name, **parameters):
    function = {"name": name, "parameters": {"properties": parameters}}
    return {"type": "function", "function": function}


WEATHER = tool("weather", city={"type": "string"})
ADD = tool("add", a={"type": "number"}, b={"enum": ["1"]})
CALLS = [
    {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [WEATHER],
        "chat_template_kwargs": None,
    },
    {"messages": [{"role": "user", "content": "y"}], "tools": [ADD]},
    {"messages": [{"role": "user", "content": "z"}], "chat_template_kwargs": {"think": True}},
]
ANSWER = {"role": "assistant", "content": "yes"}


def rows_of(path):
    return [
        row_of(record, "chat")
        for file in find_files_anywhere(str(path))
        for record in read_records(file)
    ]


@pytest.mark.parametrize("written", ["parquet", "jsonl", "json"])
def test_keys_that_only_other_rows_have_are_no_parameters(tmp_path, written):
    """A table gives each object the keys of all; `datasets` writes them into JSON lines as well."""
    calls = [{**row, "messages": [*row["messages"], ANSWER]} for row in CALLS]
    table = pa.Table.from_pylist(calls)
    path = tmp_path / f"rows.{written}"
    if written == "parquet":
        parquet.write_table(table, path)
    elif written == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        path.write_text(json.dumps(table.to_pylist()))
    first, second, third = rows_of(path)
    assert first.tools == [WEATHER]
    assert second.tools == [ADD]
    assert third.tools is None
    assert first.pruned
    if written == "parquet":
        assert third.template_settings == {"think": True}


def test_a_default_of_null_that_a_schema_states_stays(tmp_path):
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    stated = tool("f", a=nullable, b={"enum": [None, "x"]})
    row = {"messages": [{"role": "user", "content": "x"}, ANSWER], "tools": [stated]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (found,) = rows_of(tmp_path / "rows.jsonl")
    assert found.tools == [stated]
    assert not found.pruned


BARE = WEATHER["function"]
TEXT = {**BARE, "parameters": json.dumps(BARE["parameters"])}


@pytest.mark.parametrize(
    ("tools", "as_served"),
    [
        ([WEATHER], False),
        ([json.dumps(WEATHER)], False),
        ([BARE], True),
        (json.dumps([BARE]), True),
        ([{"type": "function", **BARE}], True),
        ([{"type": "function", "function": TEXT}], True),
        ([json.dumps(TEXT)], True),
    ],
)
def test_tools_are_brought_into_the_form_that_servers_take(tools, as_served):
    row = {"messages": [{"role": "user", "content": "x"}, ANSWER], "tools": tools}
    found = row_of(DatasetRecord("rows.jsonl:1", row), "chat")
    assert found.tools == [WEATHER]
    assert found.as_served is as_served


@pytest.mark.parametrize("tools", [None, [], "", " ", "null", "[]"])
def test_a_row_may_say_in_each_way_that_it_has_no_tools(tools):
    row = {"messages": [{"role": "user", "content": "x"}, ANSWER], "tools": tools}
    assert row_of(DatasetRecord("rows.jsonl:1", row), "chat").tools is None


def test_what_tables_hold_besides_json_is_read_as_json_says_it(tmp_path):
    turn = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.large_string()),
            ("at", pa.timestamp("ns")),
            ("cost", pa.decimal128(5, 2)),
        ]
    )
    turns = [
        {"role": role, "content": text, "at": 1, "cost": Decimal("1.50")}
        for role, text in (("user", "x"), ("assistant", "y"))
    ]
    columns = {
        "messages": pa.array([turns], pa.list_(turn)),
        "chat_template_kwargs": pa.array([[("think", "no")]], pa.map_(pa.string(), pa.string())),
    }
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    (row,) = rows_of(tmp_path / "rows.parquet")
    assert row.template_settings == {"think": "no"}
    assert row.turns[1]["cost"] == 1.5
    assert row.turns[1]["at"].startswith("1970-01-01")
    texts = pa.table({"text": pa.array([b"caf\xc3\xa9"]).dictionary_encode()})
    tables = [pa.array([b"caf\xc3\xa9"], kind) for kind in (pa.binary(), pa.binary_view())]
    named = zip("abc", [texts, *(pa.table({"text": each}) for each in tables)], strict=True)
    for name, table in named:
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        (record,) = read_records(*find_files_anywhere(str(tmp_path / f"{name}.parquet")))
        assert row_of(record, "text").answer == "caf\u00e9"


def test_a_packed_line_of_gigabytes_is_a_wrong_row(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_ROW_BYTES", 1 << 10)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b" " * (1 << 20)))
    with pytest.raises(UserError, match="a row is longer") as caught:
        texts(tmp_path / "rows.jsonl.gz")
    assert caught.value.field.endswith("rows.jsonl.gz:1")


def test_a_json_file_that_is_larger_than_memory_should_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_JSON_BYTES", 1 << 10)
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(b" " * (1 << 20)))
    with pytest.raises(UserError, match=r"write a row a line"):
        texts(tmp_path / "rows.json.gz")
