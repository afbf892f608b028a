"""`windrow demo --node real`: the demo's pods as containers, the same summary and report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from windrow.local.summary import summarize


@pytest.mark.timeout(600)
def test_the_demo_runs_on_the_node_to_the_same_summary_and_report(node, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-c", "from windrow.cli import main; main()", "demo"]
    command += ["--node=real", "--seconds=10", f"--out={out}", "--json", "--steps=6"]
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
