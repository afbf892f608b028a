"""Every line of the tables of threats names tests, and each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of what is tried on parts, and of what is tried on a real API server.
TABLES = ("| attacker | attempt | protection | test |", "| attacker | attempt | test |")
TESTS = re.compile(r"^\s*(?:async )?def (test_\w+)\(", re.MULTILINE)
DEFINED = frozenset(
    name for path in (ROOT / "tests").rglob("test_*.py") for name in TESTS.findall(path.read_text())
)


def threats() -> list[str]:
    """Return the lines of every table of threats."""
    page = (ROOT / "docs" / "operations" / "security.md").read_text()
    lines: list[str] = []
    for head in TABLES:
        for table in page.split(head)[1:]:
            rows = table.strip().partition("\n\n")[0].splitlines()
            lines += rows[1:]  # the first one draws the line below the heads
    return lines


def test_every_test_that_the_page_names_is_there() -> None:
    """Read the text between the tables as well."""
    page = (ROOT / "docs" / "operations" / "security.md").read_text()
    assert set(re.findall(r"`(test_\w+)`", page)) <= DEFINED


def test_the_page_has_its_threats() -> None:
    """Find lines at all: the page may have changed its form."""
    assert len(threats()) > 30


@pytest.mark.parametrize("line", threats(), ids=lambda line: line[:60])
def test_each_threat_names_tests_that_exist(line: str) -> None:
    """Read the last column."""
    named = re.findall(r"`(test_\w+)`", line.rsplit(" | ", 1)[1])
    assert named
    assert [name for name in named if name not in DEFINED] == []
