"""A chat template of a job's own model takes no more memory than reading rows may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from windrow.errors import UserError
from windrow.rows import DatasetRecord, row_of
from windrow_sidecar.finetune.data.reading_memory import bounded_memory
from windrow_sidecar.finetune.data.tokens import RowTokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "windrow-tiny"
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ ('a\\n' * 1000000) | indent(100000) }}",
    ],
)
def test_a_template_that_makes_gigabytes_is_ended_before_it_has_them(template):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    rows = RowTokenizer(tokenizer, max_length=64)
    row = row_of(DatasetRecord("rows.jsonl:1", json.dumps({"messages": TURNS}).encode()), "chat")
    with pytest.raises(UserError, match="more than 512 MiB of memory"), bounded_memory(512 << 20):
        rows.example(row)
