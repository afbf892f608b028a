"""Check what `make docs` makes of names and examples, and what it finds wrong with a site."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_site, site_hooks = load("check_site"), load("site_hooks")


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


def test_each_example_of_a_command_is_a_line_of_its_own():
    subprocess.run([sys.executable, ROOT / "tools" / "generate_docs.py"], check=True)
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    examples = re.findall(r"^    (.+)$", page, re.MULTILINE)
    assert "windrow explain decode-0" in examples
    assert not [line for line in examples if "Example:" in line]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("<code>windrow_slot_info</code>", "<code>windrow_<wbr>slot_<wbr>info</code>"),
        ("<code>dataset.badRows</code>", "<code>dataset.<wbr>bad<wbr>Rows</code>"),
        ("slot <code>EngineNotServing</code>", "slot <code>Engine<wbr>Not<wbr>Serving</code>"),
        ("<code>--objective</code>", '<code style="white-space: nowrap">--objective</code>'),
        ("<code>windrow top --json</code>", "<code>windrow top --json</code>"),
    ],
)
def test_long_names_break_between_words_in_tables_and_nowhere_else(cell, shown):
    table = "<table><tr><td>{}</td></tr></table>"
    assert site_hooks.on_page_content(table.format(cell)) == table.format(shown)
    assert site_hooks.on_page_content(f"<p>{cell}</p>") == f"<p>{cell}</p>"


def test_mkdocs_counts_its_warnings():
    """Build a page with a broken link: with --quiet it ends with 0, --strict or not."""
    rule = (ROOT / "Makefile").read_text().partition("\ndocs:")[2].partition("\n\n")[0]
    assert "mkdocs build --strict" in rule
    assert "--quiet\n" not in rule
