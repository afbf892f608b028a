"""Etas by the rule, in the README and on the page of GPU results, follow from committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PAGE = (ROOT / "docs" / "gpu-results.md").read_text()
OBJECTIVES_MS = (10, 15, 20, 40)


def rows_of(name: str) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((RESULTS / name).read_text())["results"]}


LIGHT = rows_of("first_light.json")
DEDICATED = LIGHT["dedicated worker"]["value"]
ALONE = rows_of("finetune.json")["dedicated throughput, llama-3-8b, cuda"]
# The faster of our worker, in either run, and of PEFT's best configuration.
FASTEST = max(DEDICATED, ALONE["value"], ALONE["baseline"]["value"])


def harvested(arm: str, objective_ms: int) -> float:
    """Tokens a second of an arm; its own eta is a share of the same run's dedicated worker."""
    return LIGHT[f"{arm} at {objective_ms} ms: eta"]["value"] * DEDICATED


@pytest.mark.parametrize("objective_ms", OBJECTIVES_MS)
def test_a_row_of_the_page_is_the_arithmetic_on_committed_results(objective_ms):
    line = next(row for row in PAGE.splitlines() if re.match(rf"\| {objective_ms} ms \| 0\.", row))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    eta = LIGHT[f"windrow at {objective_ms} ms: eta"]["value"]
    ours, naive = harvested("windrow", objective_ms), harvested("naive", objective_ms)
    assert cells[1] == f"{eta:.3f} x {DEDICATED:,.0f} = {ours:,.0f}"
    assert cells[2] == f"{ours / FASTEST:.2f}"
    assert cells[3].endswith(f"{naive:,.0f}")
    assert cells[4] == f"{naive / FASTEST:.2f}"


def test_the_range_that_page_and_readme_name_is_that_of_the_rows():
    by_rule = [harvested("windrow", ms) / FASTEST for ms in OBJECTIVES_MS]
    low, high = f"{min(by_rule):.2f}", f"{max(by_rule):.2f}"
    naive = {f"{harvested('naive', ms) / FASTEST:.2f}" for ms in OBJECTIVES_MS}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"harvested {low} to {high}, and `naive` {naive.pop()}" in " ".join(PAGE.split())
    assert not naive
    at_15 = f"{harvested('windrow', 15) / FASTEST:.2f} and {harvested('naive', 15) / FASTEST:.2f}"
    assert f"PEFT's faster rate that is {at_15} ({low} to {high} over all objectives" in readme


def test_the_rates_that_the_page_divides_by_are_those_of_the_results():
    for rate in (DEDICATED, ALONE["value"], ALONE["baseline"]["value"]):
        assert f"{rate:,.0f}" in PAGE
    assert ALONE["baseline"]["value"] == FASTEST
