"""Write the figures that docs/comparison.md quotes, from the committed results (`make figures`)."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windrow_lab.compare import comparison_table
from windrow_lab.compare.comparison_page import load_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "comparison.md"
RESULTS = ROOT / "benchmarks" / "results"

_BLOCK = re.compile(r"(<!-- figures: (?P<name>[\w@.,-]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def comparison(result: Mapping[str, Any]) -> str:
    """Return a comparison as Markdown: its table, what it says, and what it was made under."""
    titles = ["", *comparison_table.TITLES]
    lines = [titles, ["---", *("--:" for _ in comparison_table.TITLES)]]
    lines += [comparison_table.cells(row) for row in result["arms"]]
    table = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([*table, "", f"{comparison_table.sentence(result)} {load_of(result)}"])


def quoted(text: str) -> str:
    """Return `text` with every block of figures as the committed results have it.

    A block's name is that of a result below `benchmarks/results`, machines as `machine,name`.
    """

    def fill(block: re.Match[str]) -> str:
        machine, name = block["name"].split(",")
        found = json.loads((RESULTS / machine / f"{name}.json").read_text())
        return f"{block[1]}{comparison(found)}\n{block[3]}"

    return _BLOCK.sub(fill, text)


def main() -> None:
    """Write them, or with --check say whether they are true."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when they differ")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    if check:
        sys.exit(quoted(text) != text)
    PAGE.write_text(quoted(text), encoding="utf-8")


if __name__ == "__main__":
    main()
