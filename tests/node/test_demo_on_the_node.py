"""`windrow demo --node real`: the demo's pods as containers, the same summary and report."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from windrow.local.summary import summarize

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart" / "node.md"


def options_of_the_page() -> list[str]:
    """What the quick start hands to `windrow demo`."""
    (line,) = [one for one in PAGE.read_text().splitlines() if one.startswith("    make demo")]
    _, _, arguments = shlex.split(line)
    return arguments.removeprefix("ARGS=").split()


@pytest.mark.timeout(600)
def test_the_demo_runs_on_the_node_to_the_same_summary_and_report(node, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from windrow.cli import main; main()", "demo"]
    command += [*options_of_the_page(), "--seconds=10", f"--out={out}", "--json", "--steps=6"]
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
