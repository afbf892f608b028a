"""Committed results: tables that the simulator has written agree with them, trees are committed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Made from a tree that was not committed: each stays until it is measured again, and none joins.
FROM_MODIFIED_TREES = {
    "epyc-2-cores/activations.json",
    "epyc-2-cores/memory.json",
    "epyc-2-cores/policy-parts.json",
    "epyc-2-cores/protections-engine.json",
    "epyc-2-cores/scale.json",
    "epyc-2-cores/sglang-serving.json",
    "epyc-2-cores/sglang-soak.json",
    "epyc-2-cores/simulate-speed.json",
    "h200/finetune.json",
    "h200/first_light-both-rows.json",
    "xeon-2-cores/starts.json",
    "xeon-2-cores/stopping.json",
}


def test_no_more_results_are_made_from_a_tree_that_was_not_committed():
    made = {
        str(path.relative_to(RESULTS))
        for path in RESULTS.glob("*/*.json")
        if re.search(r'"commit": "\w+-dirty"', path.read_text())
    }
    assert made <= FROM_MODIFIED_TREES, "commit first, then measure"


@pytest.mark.parametrize(
    ("name", "result", "table"),
    [
        ("gpu", "epyc-2-cores/simulate-gpu.json", 0),
        ("jobs", "xeon-2-cores/simulate-jobs.json", 1),
    ],
)
def test_a_table_of_the_simulator_is_that_of_its_committed_result(name, result, table):
    page = (ROOT / "docs" / "simulator.md").read_text()
    block = page.split(f"<!-- {name}: written by benchmarks/simulate.py -->")[1]
    lines = block.split(f"<!-- /{name} -->")[0].splitlines()
    shown = [line for line in lines if line.startswith("| ")]
    made = json.loads((RESULTS / result).read_text())["tables"][table]
    assert shown[0] == "| " + " | ".join(made["head"]) + " |"
    assert shown[2:] == ["| " + " | ".join(row) + " |" for row in made["rows"]]
