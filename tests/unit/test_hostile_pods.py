"""Pods whose command lines are made to hold up the operator or to fill its memory."""

from __future__ import annotations

import itertools
import shlex

import pytest

from windrow_operator.command_line import commands_of, expanded, variables_of
from windrow_operator.decode_pods import find_decoders, model_of
from windrow_operator.engine_evidence import other_engine
from windrow_operator.shell_words import shell_words

# Linux starts no program with more (a quarter of a stack of 8 MiB).
MOST = 2 << 20


def container(**fields):
    return {"name": "main", "image": "sglang", **fields}


def doubling(name, value):
    """Variables of which each holds the one before it twice."""
    first = [{"name": "A0", "value": "x" * 64}]
    return first + [
        {"name": f"A{n}", "value": value.format(name.format(n - 1))} for n in range(1, 64)
    ]


def test_variables_that_name_each_other_twice_have_no_room():
    found = variables_of(container(env=doubling("$(A{})", "{0}{0}")))
    assert len(found["A10"]) == 64 << 10
    assert found["A40"] == "$(A39)$(A39)"
    assert sum(map(len, found.values())) < 2 * MOST


def test_assignments_of_a_shell_that_name_each_other_twice_have_no_room():
    lines = ["A0=" + "x" * 64, *(f"A{n}=$A{n - 1}$A{n - 1}" for n in range(1, 64))]
    script = "; ".join([*lines, "python -m sglang.launch_server --model-path $A63"])
    found = container(command=["sh", "-c", script])
    assert sum(len(word) for command in commands_of(found) for word in command) < 2 * MOST
    assert model_of(found) == ""  # its value is not known


def test_arrays_that_are_named_often_have_no_room():
    script = f"A=({'x ' * 8000}); run " + '"${A[@]}" ' * 4000
    commands = commands_of(container(command=["bash", "-c", script]))
    assert sum(map(len, commands)) < 2 * MOST


def test_many_words_that_name_a_long_variable_have_no_room():
    long = [{"name": "A", "value": "x" * (64 << 10)}]
    found = commands_of(container(env=long, args=["$(A)"] * 2000))
    assert sum(map(len, found[0])) < 2 * MOST
    assert found[0][-1] == "$(A)"


def test_what_is_expanded_alone_has_no_more_room():
    assert expanded("$(A)" * 4096, {"A": "x" * 4096}) == "$(A)" * 4096


def test_no_more_of_a_command_is_read_than_people_write():
    words = ["python", "-m", "sglang.launch_server", *["--a"] * 400_000]
    body = container(args=words)
    assert sum(map(len, commands_of(body)[0])) <= 64 << 10
    assert find_decoders({"spec": {"containers": [body]}}).why == "its command starts sglang"
    assert other_engine(body) == ""


@pytest.mark.parametrize("separates", [False, True])
def test_words_are_those_of_shlex(separates):
    letters = "a \n;&'\"\\$="
    for parts in itertools.product(letters, repeat=4):
        line = "".join(parts)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|" if separates else False)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            wanted = list(lexer)
        except ValueError:
            wanted = None
        try:
            found = shell_words(line, separates=separates)
        except ValueError:
            found = None
        assert found == wanted, line
