"""Write the figures that the README quotes, from the committed results (`make figures`)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
# What the README quotes, and from where.
SOURCES = {"demo-compare": RESULTS / "epyc-2-cores" / "demo-compare.json"}

_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)
_NO_FIGURE = "-"


def compare_table(summary: Mapping[str, Any]) -> str:
    """Return the table of `windrow demo --compare` as Markdown, with what it was measured under."""
    arms = summary["compare"]
    shared = [arm for arm in arms if arm["eta"] is not None and arm["steps"] is not None]
    lowest = {
        key: min(arm[key] for arm in shared)
        for key in ("tpot_p50_ms", "tpot_p99_ms", "share_over_objective")
    }
    highest = {key: max(arm[key] for arm in shared) for key in ("tokens_per_second", "eta")}
    best = {**lowest, **highest}

    def cell(arm: Mapping[str, Any], key: str, form: str) -> str:
        value = arm[key]
        if value is None:
            return _NO_FIGURE
        return format(value, form) + (" *" if arm in shared and value == best[key] else "")

    rows = [
        "| | TPOT p50 ms | TPOT p99 ms | steps over the objective | finetune tok/s | eta |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    rows += [
        f"| {arm['name']} | {cell(arm, 'tpot_p50_ms', '.1f')} | {cell(arm, 'tpot_p99_ms', '.1f')} "
        f"| {cell(arm, 'share_over_objective', '.2%')} "
        f"| {cell(arm, 'tokens_per_second', ',.0f')} | {cell(arm, 'eta', '.2f')} |"
        for arm in arms
    ]
    run = summary["run"]
    where = (
        f"Objective {summary['serving']['objective_ms']:g} ms, {run['seconds']:g} s of load at "
        f"rate {run['rate']:g}, seed {run['seed']}; {summary['environment']['cpu']}, "
        f"{summary['environment']['cores']} cores."
    )
    return "\n".join([*rows, "", where])


_RENDER: dict[str, Callable[[Mapping[str, Any]], str]] = {"demo-compare": compare_table}


def quoted(text: str) -> str:
    """Return `text` with every block of figures as the committed results have it."""

    def fill(block: re.Match[str]) -> str:
        name = block["name"]
        return block[1] + _RENDER[name](json.loads(SOURCES[name].read_text())) + "\n" + block[3]

    return _BLOCK.sub(fill, text)


def main() -> None:
    """Write them, or with --check say whether they are true."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when they differ")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    if check:
        sys.exit(quoted(text) != text)
    README.write_text(quoted(text), encoding="utf-8")


if __name__ == "__main__":
    main()
