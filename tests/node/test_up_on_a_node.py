"""`windrow up --node real` leaves a node that an ordinary shell uses, and `windrow down` ends it.

It brings up a node of its own, so `make test-node` runs these when its own node has ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from windrow_lab.cluster.up import start_ticks
from windrow_lab.machine.child_processes import descendants
from windrow_lab.realnode.machine import CGROUPS, missing
from windrow_lab.realnode.node import NodeInfo

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        NodeInfo.of_environment() is not None,
        reason="this is on a node already; `make test-node` runs these after it",
    ),
    pytest.mark.skipif(bool(missing()), reason="this machine cannot run a node"),
    pytest.mark.timeout(600),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def windrow(tmp_path):
    """Return a function that runs a command of windrow in a folder of its own."""
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}

    def run(*words: str) -> str:
        command = [sys.executable, "-c", "from windrow_cli import main; main()", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    run("down")


def left_of(pids: set[int]) -> list[int]:
    return [pid for pid in pids if start_ticks(pid) is not None]


def groups() -> set[Path]:
    return {*CGROUPS.glob("windrow-node-*"), *CGROUPS.glob("*/windrow-node-*")}


def test_a_job_trains_beside_a_pod_that_answers_on_this_machines_loopback(windrow, tmp_path):
    before = groups()
    up = json.loads(windrow("up", "--node", "real", "--pods", "1", "--json"))
    assert httpx.get(f"{up['endpoints'][0]}/health").is_success
    job = yaml.safe_load(Path(up["job"]).read_text())
    job["spec"]["training"]["maxSteps"] = 4
    Path(up["job"]).write_text(yaml.safe_dump(job))
    windrow("submit", up["policy"])
    windrow("submit", up["job"], "--wait")
    asked = {"model": "m", "prompt": "A coffee machine", "max_tokens": 8}
    answer = httpx.post(f"{up['endpoints'][0]}/v1/completions", json=asked, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 8
    adapter = tmp_path / "out" / "adapters" / "support-tone" / "adapter_model.safetensors"
    assert adapter.is_file()
    kept = {up["pid"], *descendants(up["pid"])}
    assert len(kept) > 10
    windrow("down")
    assert left_of(kept) == []
    assert groups() <= before


def test_killing_its_holder_ends_the_node(windrow):
    up = json.loads(windrow("up", "--node", "real", "--pods", "1", "--json"))
    kept = descendants(up["pid"])
    os.kill(up["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while left_of(kept):
        assert time.monotonic() < deadline, "its namespaces end with their first process"
        time.sleep(0.05)
    assert json.loads(windrow("down", "--json")) is None
