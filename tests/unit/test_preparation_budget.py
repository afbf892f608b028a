"""Rows that are only slow end with the budget of their job's preparation."""

from __future__ import annotations

import json

import pytest
from support.vocabularies import letters

from windrow.crd import DatasetSpec
from windrow.errors import UserError
from windrow_sidecar.finetune.data import preparation_budget, reading, records
from windrow_sidecar.finetune.data.preparation_budget import PreparationBudget
from windrow_sidecar.finetune.data.reading import ModelLimits, read_dataset
from windrow_sidecar.finetune.data.source_access import UNCONFINED, SourceAccess
from windrow_sidecar.finetune.data.tokens import RowTokenizer


class Clock:
    """Seconds of computing: so many more at each look, one after another."""

    def __init__(self, *steps_s: float) -> None:
        self.now_s, self._steps_s = 0.0, [0.0, *steps_s]

    def __call__(self) -> float:
        self.now_s += self._steps_s.pop(0) if len(self._steps_s) > 1 else self._steps_s[0]
        return self.now_s


def read(folder, access, rows=8, **dataset):
    source = folder / "rows.jsonl"
    lines = [json.dumps({"text": "abc"})] * rows
    source.write_text("\n".join(lines if not dataset else [*lines[1:], '{"no": 1}', lines[0]]))
    spec = DatasetSpec(source=str(source), format="text", eval_fraction=0, **dataset)
    tokenizer = RowTokenizer(letters(), max_length=16)
    return read_dataset(spec, tokenizer, ModelLimits(10_000, None), seed=1, access=access)


@pytest.mark.parametrize("bad_rows", [{}, {"bad_rows": "skip"}])
def test_rows_that_are_only_slow_end_with_the_budget_of_the_policy(tmp_path, monkeypatch, bad_rows):
    """Each row stays below its own limit; `badRows: skip` leaves no such job to go on."""
    clock = Clock(9.0, 9.5, 9.0)
    monkeypatch.setattr(
        reading, "PreparationBudget", lambda seconds: PreparationBudget(seconds, clock)
    )
    access = SourceAccess((tmp_path,), preparation_s=60.0)
    with pytest.raises(UserError, match=r"7 rows took 64 s of computing .* than the 60 s") as told:
        read(tmp_path, access, **bad_rows)
    assert told.value.field.endswith("rows.jsonl:2")  # the slowest, with 9.5 s
    assert "spec.access.preparation" in told.value.remedy


def test_a_user_on_a_machine_of_their_own_has_no_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation_budget, "LEAST_S", -1e9)
    assert len(read(tmp_path, UNCONFINED).train) == 8
    with pytest.raises(UserError, match=r"spec\.access\.preparation"):
        read(tmp_path, SourceAccess((tmp_path,)))


def test_without_a_word_of_the_policy_the_budget_grows_with_rows_and_their_text():
    fast = PreparationBudget(None, Clock(0.1))
    for row in range(100_000):
        fast.count(f"rows.jsonl:{row}", 0)
    slow = PreparationBudget(None, Clock(9.9))
    for row in range(61):
        slow.count(f"rows.jsonl:{row}", 0)
    with pytest.raises(UserError, match=r"this one took most, 9\.9 s"):
        slow.count("rows.jsonl:61", 0)
    long = PreparationBudget(None, Clock(9.9))
    for row in range(1, 63):
        long.count(f"rows.jsonl:{row}", row * 2_000_000)


def test_blank_lines_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_ROW_BYTES", 64)
    file = tmp_path / "rows.jsonl"
    text = json.dumps({"text": "abc"})
    file.write_text("\n" * 60 + text + "\n" * 60 + text)
    with file.open("rb") as source:
        assert len(list(records._lines(source, "rows.jsonl"))) == 2
    file.write_text(text + " \n" * 40 + text)
    with file.open("rb") as source, pytest.raises(UserError, match="blank lines") as refused:
        list(records._lines(source, "rows.jsonl"))
    assert refused.value.field == "rows.jsonl:34"


def test_rows_that_weights_multiply_beyond_the_memory_are_refused(tmp_path, monkeypatch):
    def too_many(*_, **__):
        raise MemoryError

    monkeypatch.setattr(reading, "weighted", too_many)
    with pytest.raises(UserError, match="MiB of memory") as refused:
        read(tmp_path, SourceAccess((tmp_path,)))
    assert refused.value.field == "spec.dataset.source"
