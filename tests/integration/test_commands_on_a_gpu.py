"""Every option that docs/gpu.md writes on a command line is one of that command's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent


def command_lines() -> list[list[str]]:
    """Return the indented blocks in words; a line that ends in a backslash goes on."""
    text = re.sub(r"\\\n\s+", "", (ROOT / "docs" / "gpu.md").read_text())
    lines = re.findall(r"^    (.+)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def programs() -> dict[tuple[str, ...], set[str]]:
    """Ours, each with all of the options that it is given there."""
    found: dict[tuple[str, ...], set[str]] = {}
    for words in command_lines():
        if words[:2] == ["python", "-m"]:
            program = tuple(words[:3])
        elif words[0] == "windrow":
            program = tuple(words[:2])
        else:
            continue
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        found[program] = found.get(program, set()) | options
    return found


def test_there_are_commands():
    assert len(programs()) >= 7
    targets = {words[1] for words in command_lines() if words[0] == "make"}
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    cmake = (ROOT / "CMakeLists.txt").read_text()
    ours = {w[2:].partition("=")[0] for words in command_lines() for w in words if "DWINDROW" in w}
    assert ours
    assert all(f"option({name}" in cmake for name in ours)


@pytest.mark.parametrize("program", programs(), ids=" ".join)
def test_a_command_knows_its_options(program):
    first = sys.executable if program[0] == "python" else str(SCRIPTS / program[0])
    done = subprocess.run(
        [first, *program[1:], "--help"],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    known = set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))
    assert programs()[program] <= known
