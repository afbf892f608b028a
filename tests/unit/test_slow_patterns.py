"""Patterns that would hold a worker for ever are refused before peft matches them."""

from __future__ import annotations

import pytest

from windrow_sidecar.finetune.adapter.patterns import as_matched, slow_pattern

NAMES = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(80) for p in "qkvo"]


@pytest.mark.parametrize(
    ("target", "ranks", "field"),
    [
        (r"(\w+\.?)+!", {}, "targetPattern"),
        (None, {r"(\w+\.?)+!": 8}, "rankPattern"),
        (None, {r"q_proj": 8, r"(\w+\.?)+!": 4}, "rankPattern"),
    ],
)
def test_a_pattern_that_backtracks_without_end_is_named(target, ranks, field):
    assert slow_pattern(as_matched(target, ranks, {}), NAMES) == field


@pytest.mark.parametrize("target", [r".*q_proj", r".*\.(0|1|2)\.self_attn\.(q|v)_proj", None])
def test_patterns_of_jobs_are_fast(target):
    assert slow_pattern(as_matched(target, {"q_proj": 8, "^model.*v_proj": 4}, {}), NAMES) is None
