"""First light on a GPU, walked to its end: every step of its table in docs/gpu.md, over the shim.

What stops here is the kernels themselves: Triton's are compiled, loaded and launched, and compute
nothing; torch's operators give the CPU's values. No figure of such a run means anything.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from worker_pod import ROOT

from windrow_sidecar.qos.levels import GPU_SHARES

pytestmark = [pytest.mark.paired, pytest.mark.extended, pytest.mark.timeout(900)]

FAKE_MPS = ROOT / "tests" / "contract" / "fake_mps_control.py"
SMALLEST = ["--driver=cuda", "--shape=tiny", "--quick", "--seconds=2", "--batch=2"]
SMALLEST += ["--objectives", "2000", "--context=64", "--arena-bytes=256MiB"]


STAGES = ["dedicated", "solo", "alone", "naive", "corun", "windrow-2000", "gaps-2000"]


def test_every_stage_runs_under_mps_and_breaks_no_rule(shim, tmp_path):
    control = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(FAKE_MPS, control)
    control.chmod(0o755)
    out, counts = tmp_path / "light.json", tmp_path / "counts"
    environ = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "WINDROW_STANDIN_MPS": "1",
        "WINDROW_SHIM_COUNTS": str(counts),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_light", *SMALLEST, f"--json={out}"],
        cwd=ROOT,
        env=shim.environment(computes=True, **environ),
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    parts = tmp_path / "light.json.parts"
    texts = [f"== {log.name}\n{log.read_text()[-3000:]}" for log in (parts / "logs").glob("*")]
    said = "\n".join([*texts, f"== console\n{done.stderr[-3000:]}"])
    assert done.returncode == 0, said
    assert not [bad for bad in ("rule broken", "Traceback", "windrow: ") if bad in said], said
    found = {path.stem: json.loads(path.read_text()) for path in parts.glob("*.json")}
    assert set(STAGES) <= set(found)
    # On each share of SMs the worker has begun a tasklet, else its point would be an error.
    assert len(found["device"]["splits"]) == 1 + GPU_SHARES
    assert len({point["units"] for point in found["corun"]["points"]}) == GPU_SHARES
    assert found["device"]["captures"]["graphs"] == 7
    assert json.loads(out.read_text())["environment"]["mps"] == "a private daemon"
    # The worker beside decode has no memory of its own there.
    most = [json.loads(line)["most_device_bytes"] for line in counts.read_text().splitlines()]
    assert 0 in most, most
    assert out.with_suffix(".html").stat().st_size > 100_000
