"""The words of the tree: docstrings begin with a verb or a noun, and prose uses the field's nouns.

Bounds count what is left. They only go down: a change that lowers a count lowers its bound.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("api", "benchmarks", "cli", "lab", "operator", "sidecar", "simulator", "tools")

# English has few words that open neither a verb phrase nor a noun phrase with its noun: they are
# closed classes, so a list of them is whole. Questions and relatives, pronouns, prepositions and
# conjunctions, and adverbs of time and place.
FUNCTION_WORDS = frozenset(
    [
        "what",
        "whatever",
        "whether",
        "how",
        "who",
        "whom",
        "whose",
        "whoever",
        "which",
        "whichever",
        "where",
        "wherever",
        "when",
        "whenever",
        "why",
        "that",
        "those",
        "this",
        "these",
        "it",
        "its",
        "they",
        "them",
        "he",
        "she",
        "we",
        "you",
        "i",
        "everything",
        "something",
        "anything",
        "nothing",
        "everybody",
        "somebody",
        "nobody",
        "anybody",
        "everyone",
        "someone",
        "anyone",
        "none",
        "of",
        "for",
        "in",
        "on",
        "at",
        "by",
        "with",
        "without",
        "within",
        "from",
        "to",
        "between",
        "before",
        "after",
        "since",
        "until",
        "till",
        "while",
        "during",
        "under",
        "over",
        "up",
        "down",
        "into",
        "onto",
        "out",
        "off",
        "per",
        "via",
        "against",
        "among",
        "through",
        "about",
        "above",
        "below",
        "beside",
        "besides",
        "inside",
        "outside",
        "beyond",
        "as",
        "if",
        "unless",
        "because",
        "though",
        "although",
        "so",
        "than",
        "like",
        "but",
        "and",
        "or",
        "nor",
        "not",
        "only",
        "also",
        "even",
        "still",
        "yet",
        "then",
        "there",
        "here",
        "once",
        "always",
        "never",
    ]
)
# Rows of committed results.
NAMED_ELSEWHERE = frozenset({"decision in place, anew", "before_step in place, anew"})
# A determiner without its noun: "The one that was dialled last".
HEADLESS = re.compile(
    r"(?:(?:The|Each|Every|All|Any) ?(?:ones?|others?)? (?:that|who|which|whom|whose)"
    r"|One (?:that|who|which)|(?:The |An? )?(?:ones?|others?)(?= that| who| which|[.,:;]|$))\b",
    re.IGNORECASE,
)
NOT_IN_PROSE = re.compile(
    r"\b(?:anew|whoever|mend(?:s|ed|ing)?|heed(?:s|ed|ing)?|lies|stands|told|by itself"
    r"|by themselves|what (?:is|was) not there|gone on from"
    r"|(?:came|comes?|coming) to (?:its|their|an) end"
    r"|glances?|contests?|footings?|standing|promis(?:es?|ed|ing)|(?<!back)ground(?!ed| truth))\b",
    re.IGNORECASE,
)
# "There is no such job" is plain; "'x' is no port" is not.
IS_NO = re.compile(r"(?<!here )\b(?:is|are) no (?!longer|more\b|other\b|such\b|better\b|reason)\w+")
METAPHORS = re.compile(
    r"(?<![a-z])(?:Ground|Glance|Stay|Signs|Elsewhere|Together|Narrow|Contest|Footing|Standing"
    r"|Promise)(?![a-z])"
)


@dataclass(frozen=True)
class Prose:
    """A piece of prose and where it is."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.text.split())[:160]}"


@cache
def files() -> tuple[str, ...]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return tuple(sorted(name for name in found.split("\0") if name and (ROOT / name).is_file()))


@cache
def modules(tests: bool) -> tuple[tuple[str, ast.Module], ...]:
    return tuple(
        (name, ast.parse((ROOT / name).read_text()))
        for name in files()
        if name.endswith(".py")
        and "_pb2" not in name
        and (name.startswith("tests/") if tests else name.split("/")[0] in PRODUCT)
    )


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(*, tests: bool, quoted: bool = False) -> Iterator[Prose]:
    for name, tree in modules(tests):
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                # Names of arguments and code are the code's own.
                prose = re.sub(r"(?m)`[^`]*`|^\s+\w+:(?= )", "", text) if quoted else text
                yield Prose(f"{name}:{node.body[0].lineno}", prose)


def messages() -> Iterator[Prose]:
    """Texts of a few words in the product that are no docstrings: errors, log lines, help."""
    for name, tree in modules(tests=False):
        described = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and " " in node.value
                and id(node) not in described
                and node.value not in NAMED_ELSEWHERE
            ):
                yield Prose(f"{name}:{node.lineno}", node.value)


def pages() -> Iterator[Prose]:
    """Lines of the Markdown pages, without what they quote as code."""
    for name in files():
        if name.endswith(".md"):
            code = False
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
                code ^= line.lstrip().startswith("```")
                if not code:
                    yield Prose(f"{name}:{number}", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line))


def native_prose() -> Iterator[Prose]:
    """Comments and texts of the C++ sources, line by line."""
    for name in files():
        if name.endswith((".cpp", ".h")):
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
                for text in re.findall(r'//(.*)|"([^"\\]* [^"\\]*)"', line):
                    yield Prose(f"{name}:{number}", "".join(text))


def comments() -> Iterator[Prose]:
    """Comments of the Python sources."""
    for name in files():
        if (
            name.endswith(".py")
            and "_pb2" not in name
            and name != "tests/layout/test_plain_english.py"
        ):
            with (ROOT / name).open() as file:
                for token in tokenize.generate_tokens(file.readline):
                    if token.type == tokenize.COMMENT:
                        yield Prose(f"{name}:{token.start[0]}", token.string)


def begins_with_neither_verb_nor_noun(docstring: str) -> bool:
    word = re.match(r"[\w']*", docstring)
    return word[0].lower() in FUNCTION_WORDS or bool(HEADLESS.match(docstring))


def held_to(bound: int, found: list[Prose]) -> None:
    listed = "\n".join(map(str, found))
    assert len(found) <= bound, f"{len(found)} found, the bound is {bound}:\n{listed}"


@pytest.mark.parametrize(
    ("docstring", "refused"),
    [
        ("Whether a worker runs.", True),
        ("The one that was dialled last is right.", True),
        ("Of the job.", True),
        ("Others.", True),
        ("Return whether a worker runs.", False),
        ("The client underneath.", False),
        ("All chunks of one arena.", False),
        ("`windrow top`: slots and jobs.", False),
    ],
)
def test_the_rule_for_docstrings_tells_phrases_without_a_head(docstring, refused):
    assert begins_with_neither_verb_nor_noun(docstring) == refused


@pytest.mark.parametrize(("tests", "bound"), [(False, 0), (True, 42)])
def test_docstrings_begin_with_a_verb_or_a_noun(tests, bound):
    found = [d for d in docstrings(tests=tests) if begins_with_neither_verb_nor_noun(d.text)]
    held_to(bound, found)


def test_docstrings_use_plain_words():
    held_to(0, [d for d in docstrings(tests=False, quoted=True) if NOT_IN_PROSE.search(d.text)])


def test_errors_and_log_lines_use_plain_words():
    held_to(0, [m for m in messages() if NOT_IN_PROSE.search(m.text) or IS_NO.search(m.text)])


def test_pages_use_plain_words():
    held_to(0, [line for line in pages() if NOT_IN_PROSE.search(line.text)])


def test_native_sources_use_plain_words():
    found = [n for n in native_prose() if NOT_IN_PROSE.search(n.text) or IS_NO.search(n.text)]
    held_to(0, found)


def test_comments_use_plain_words():
    held_to(0, [c for c in comments() if NOT_IN_PROSE.search(c.text) or IS_NO.search(c.text)])


def test_no_class_is_named_by_a_metaphor():
    named = [
        Prose(f"{name}:{node.lineno}", node.name)
        for name, tree in modules(tests=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and METAPHORS.search(node.name)
    ]
    held_to(0, named)
