"""What `make docs` finds wrong with a site: links and places that are not there, things fetched."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

spec = importlib.util.spec_from_file_location("check_site", ROOT / "tools" / "check_site.py")
check_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_site)


@pytest.fixture
def site(tmp_path):
    """Return a function that writes a site of two pages, the first with these lines."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "index.html").write_text('<h1 id="there">There</h1>')

    def written(line):
        (tmp_path / "index.html").write_text(f'<h1 id="here">Here</h1>{line}')
        return tmp_path

    return written


@pytest.mark.parametrize(
    "line",
    [
        '<a href="deep/index.html#there">x</a>',
        '<a href="deep/#there">x</a>',
        '<a href="#here">x</a>',
        '<a href="#__codelineno-0-1">x</a>',
        '<a href="https://example.org/page#any">x</a>',
    ],
)
def test_what_is_there_is_no_problem(site, line):
    assert check_site.problems(site(line)) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('<a href="other.html">x</a>', "index.html leads to other.html, which is not there"),
        ('<a href="#nowhere">x</a>', "leads to #nowhere, a place that the page does not have"),
        ('<a href="deep/index.html#here">x</a>', "a place that the page does not have"),
        ('<img src="https://example.org/a.png">', "index.html fetches https://example.org/a.png"),
    ],
)
def test_what_is_not_there_is_told(site, line, told):
    (problem,) = check_site.problems(site(line))
    assert told in problem


def test_mkdocs_counts_its_warnings():
    """With --quiet it builds a page with a broken link and ends with 0, --strict or not."""
    rule = (ROOT / "Makefile").read_text().partition("\ndocs:")[2].partition("\n\n")[0]
    assert "mkdocs build --strict" in rule
    assert "--quiet\n" not in rule
