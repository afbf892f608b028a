"""`.ci/run` plays every pass once, what measures alone, and its last lines say what was red."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
# As `tools/run_parts.py` calls itself, with other parts.
CALL = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("run_parts", {tool!r})
tool = sys.modules["run_parts"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)
sys.exit(tool.main(json.loads(sys.argv[1])))
"""
# Waits for what the part in the other lane leaves: one after the other they would never end.
MEET = "echo {0} begins; : > {0}; until [ -e {1} ]; do sleep 0.02; done; echo {0} ends"


def load(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def command(*stages):
    tool = str(TOOLS / "run_parts.py")
    return [sys.executable, "-c", CALL.format(tool=tool), json.dumps(stages)]


def sh(text):
    return ("sh", "-c", text)


def test_lanes_run_side_by_side_and_each_parts_output_comes_whole(tmp_path):
    stages = [[[sh(MEET.format("a", "b")), sh("echo after a")], [sh(MEET.format("b", "a"))]]]
    done = subprocess.run(
        command(*stages), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for name in "ab":
        assert f"\n{name} begins\n{name} ends\n" in done.stdout
    assert re.search("^after a$", done.stdout, re.MULTILINE)
    assert len(list((tmp_path / "build" / "ci").glob("*.log"))) == 3


def test_parts_after_a_red_one_run_and_the_last_lines_name_it_with_its_seconds(tmp_path):
    stages = [
        [[sh("exit 3"), sh("echo still")]],
        [[sh("kill -9 $$")], [sh("true")]],
        [[sh("true")]],
    ]
    done = subprocess.run(
        command(*stages), cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "\nstill\n" in done.stdout
    closing = done.stdout.partition("summary of all parts")[2].splitlines()[1:]
    assert len([line for line in closing if re.match(r"[0-9]+ s: sh -c ", line)]) == 5
    assert re.fullmatch("[0-9]+ s: all parts", closing[5])
    assert closing[-2:] == [
        "red: sh -c 'exit 3' (exit code 3)",
        "red: sh -c 'kill -9 $$' (exit code 137)",
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_what_runs_with_its_children_and_shows_what_it_said(tmp_path, number):
    slow = "echo said before; sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait"
    stages = [[[sh(slow.format("a")), sh("echo never")], [sh(slow.format("b"))]], [[sh("echo no")]]]
    process = subprocess.Popen(command(*stages), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not all((tmp_path / name).exists() for name in "ab"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert said.count("\nsaid before\n") == 2
    lines = said.splitlines()
    assert "never" not in lines
    assert "no" not in lines
    # A shell has what it starts in the background ignore interrupts: these were killed.
    deadline = time.monotonic() + 60
    while any(runs(int((tmp_path / name).read_text())) for name in "ab"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid):
    """Return whether a process does more than wait to be reaped."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def played(stages, target, suite):
    """Return the passes of a make target in those stages, each as often as it is played."""
    found = Counter()
    for part in (part for stage in stages for lane in stage for part in lane):
        if part[:2] == ("make", target):
            words = shlex.split(part[2].removeprefix("PASSES=")) if part[2:] else []
            found.update(this.name for this in load("run_tests").chosen([suite, *words]))
    return found


SUITES = [("test", "test"), ("test-extended", "extended"), ("test-sglang", "sglang")]


@pytest.mark.parametrize(("target", "suite"), SUITES)
def test_ci_plays_each_pass_once(target, suite):
    found = played(load("run_parts").STAGES, target, suite)
    assert found == Counter(this.name for this in load("run_tests").PASSES[suite])


def test_what_is_marked_alone_or_waits_for_idle_time_has_the_machine_to_itself():
    beside = [stage for stage in load("run_parts").STAGES if len(stage) > 1]
    assert beside
    for target, suite in SUITES[:2]:
        names = set(played(beside, target, suite))
        assert not names & {"alone", "two at a time"}
    assert "alone" not in played(beside, "test-sglang", "sglang")


def test_each_part_is_a_target_of_make():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for part in (p for stage in load("run_parts").STAGES for lane in stage for p in lane):
        assert part[0] == "make"
        assert {
            word for word in part[1:] if re.fullmatch("[a-z-]+", word) and word[0] != "-"
        } <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "tools/run_parts.py" in (ROOT / ".ci" / "run").read_text()
