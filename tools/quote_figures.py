"""Write the figures that README and docs quote, from the committed results (`make figures`)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windrow.local import verdict
from windrow.local.frontier import load_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "operations" / "cost.md")
RESULTS = ROOT / "benchmarks" / "results"

_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w@.,-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def comparison(result: Mapping[str, Any]) -> str:
    """Return a comparison as Markdown: its table, what it says, and what it was made under."""
    titles = ["", *verdict.TITLES]
    lines = [titles, ["---", *("--:" for _ in verdict.TITLES)]]
    lines += [verdict.cells(row) for row in result["arms"]]
    table = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([*table, "", f"{verdict.sentence(result)} {load_of(result)}"])


def table(result: Mapping[str, Any]) -> str:
    """Return a benchmark's figures as Markdown: each with its spread, baseline and goal."""
    lines = ["| | measured | spread | beside it | goal |", "|---|--:|--:|--:|--:|"]
    for one in result["results"]:
        unit, beside, goal = f" {one['unit']}".rstrip(), one["baseline"], one["goal"]
        cells = [
            one["name"],
            f"{one['value']:.3g}{unit}",
            f"{one['spread'] or 0:.2g}{unit}",
            f"{beside['value']:.3g}{unit} {beside['name']}" if beside else "-",
            "-" if goal is None else f"{goal:g}{unit}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    machine = result["environment"]
    made = f"{result['date'][:10]}, commit {result['commit']}"
    return "\n".join([*lines, "", f"{made}, {machine['cores']} cores of {machine['cpu']}."])


def quoted(text: str) -> str:
    """Return `text` with every block of figures as the committed results have it.

    A block's name is that of a result below `benchmarks/results`, machines as `machine,name`.
    """

    def fill(block: re.Match[str]) -> str:
        machine, name = block["name"].split(",")
        found = json.loads((RESULTS / machine / f"{name}.json").read_text())
        shown = table(found) if "results" in found else comparison(found)
        return f"{block[1]}{shown}\n{block[3]}"

    return _BLOCK.sub(fill, text)


def main() -> None:
    """Write them, or with --check say whether they are true."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when they differ")
    check = parser.parse_args().check
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    if check:
        sys.exit(any(quoted(text) != text for text in texts.values()))
    for page, text in texts.items():
        page.write_text(quoted(text), encoding="utf-8")


if __name__ == "__main__":
    main()
