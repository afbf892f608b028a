"""Check what the quick start on a node tells people to run, run on the node.

`make images` and `make test-node`, which it names too, are how this test comes to run.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from windrow_lab.figures.summary import summarize

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart" / "node.md"


def handed_to(target: str) -> list[list[str]]:
    """Return the words that each line of the quick start hands to a target of make by ARGS."""
    lines = [one.strip() for one in PAGE.read_text().splitlines() if one.startswith("    make ")]
    words = [shlex.split(one.partition("  #")[0]) for one in lines]
    of_target = [one[2] for one in words if one[1] == target and len(one) > 2]
    return [shlex.split(arguments.removeprefix("ARGS=")) for arguments in of_target]


def test_a_command_on_the_node_is_one_of_its_shell(node):
    (command,) = handed_to("node")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "NAMESPACE" in done.stdout or "No resources found" in done.stderr


@pytest.mark.timeout(600)
def test_the_demo_runs_on_the_node_to_the_same_summary_and_report(node, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from windrow_cli import main; main()", "demo"]
    (options,) = handed_to("demo")
    command += [*options, "--seconds=10", f"--out={out}", "--json", "--steps=6"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    summary = json.loads((out / "summary.json").read_text())
    assert json.loads(run.stdout) == summary
    assert summary["job"]["phase"] == "Succeeded"
    assert summary["job"]["steps"] == 6
    assert summary["serving"]["requests_failed"] == 0
    assert summary["serving"]["requests_completed"] > 0
    assert summarize(out)["harvest"] == summary["harvest"]
    assert (out / "adapter" / "adapter_model.safetensors").is_file()
    assert (out / "report.html").stat().st_size
