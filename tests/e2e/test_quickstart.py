"""The commands of the laptop's quick start run as they stand on the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quickstart" / "laptop.md"
BIN = Path(sys.executable).parent


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def run(line, environment):
    words = line.replace(".venv/bin/", f"{BIN}/").split()
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_page_starts_with_the_demo_that_other_tests_run():
    assert blocks("bash")[0] == "make demo\n"
    assert re.search(r"^demo: ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_cluster_that_stays_does_what_the_page_says(tmp_path):
    # Its state beside that of a cluster that a person may have left running.
    hidden = ("KUBECONFIG", "PROMETHEUS_URL")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["XDG_STATE_HOME"] = str(tmp_path)
    *commands, down = blocks("bash")[1].splitlines()
    assert commands[0].endswith("windrow up")
    assert down.endswith("windrow down")
    said = {}
    try:
        for line in commands:
            said[line.split()[1]] = run(line, environment)
        (python,) = blocks("python")
        subprocess.run([sys.executable, "-c", python], cwd=ROOT, env=environment, check=True)
        policies = run(".venv/bin/windrow top --json", environment)
        # What decode serves is called what the job calls it.
        deadline = time.monotonic() + 120
        while "shares the served model's weights" not in (
            story := run(".venv/bin/windrow explain support-tone", environment)
        ):
            assert time.monotonic() < deadline, story
            time.sleep(0.5)
    finally:
        run(down, environment)
    assert "support-tone" in said["get"]
    # Nothing harvests yet: the page says that the job waits, and that `explain` says why.
    assert "is Pending" in said["explain"]
    assert "TENANT" in said["report"]
    assert policies.startswith("[")


def test_a_step_is_planned_without_a_cluster():
    (line,) = blocks("bash")[2].splitlines()
    assert "backward" in run(line, dict(os.environ))
