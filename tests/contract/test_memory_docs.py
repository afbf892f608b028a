"""docs/memory.md shows the tables that the core holds itself to."""

from __future__ import annotations

from pathlib import Path

from windrow_sidecar import _core

TEXT = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()


def table_under(heading: str) -> list[tuple[str, ...]]:
    """The rows of the first table after a heading, without its head."""
    lines = TEXT.split(heading, 1)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")))
    return rows


def test_the_table_of_transitions_is_the_one_of_the_core():
    assert table_under("## The written table") == list(_core.TRANSITIONS)


def test_the_layout_of_the_control_region_is_the_one_of_the_core():
    assert table_under("## The layout") == [tuple(map(str, part)) for part in _core.LAYOUT]
