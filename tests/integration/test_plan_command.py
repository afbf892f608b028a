"""`windrow plan` shows what a step of the example job would run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]


def plan(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from windrow.cli import main; main()", "plan", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_plan_of_a_step_names_phases_layers_tokens_bytes_and_times():
    done = plan("examples/finetunejob.yaml", "--window=64", "--order=token-major", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    tasklets = shown["tasklets"]
    assert {at["phase"] for at in tasklets} == {"fwd", "loss", "bwd", "opt"}
    assert max(end - begin for begin, end in (at["tokens"] for at in tasklets)) == 64
    assert sum(at["bytes"] for at in tasklets) == 0, "what forward keeps, backward gives back"
    assert all(at["estimate_us"] > 0 for at in tasklets if at["phase"] != "opt")
    passed = {
        phase: sum(t["layers"][1] - t["layers"][0] for t in tasklets if t["phase"] == phase)
        for phase in ("fwd", "bwd")
    }
    assert passed["fwd"] == passed["bwd"] >= shown["layers"]


def test_a_model_that_is_not_there_is_told_in_one_line():
    done = plan("examples/finetunejob.yaml", "--model=nowhere/at/all/here")
    assert done.returncode == 2
    assert "spec.model.name" in done.stderr
