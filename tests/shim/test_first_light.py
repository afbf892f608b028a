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
from pathlib import Path

import pytest
from worker_pod import ROOT

pytestmark = pytest.mark.alone

FAKE_MPS = ROOT / "tests" / "contract" / "fake_mps_control.py"
SMALLEST = ["--quick", "--shape=tiny", "--seconds=2", "--batch=2", "--objectives", "2000"]
SMALLEST += ["--context=64", "--arena-bytes=256MiB"]


def first_light(shim, out: Path, *flags: str, **environ: str) -> tuple[int, str]:
    """Its exit code, and what it and its processes have said."""
    environment = shim.environment(
        computes=True, TRITON_CACHE_DIR=str(out.parent / "triton"), **environ
    )
    command = [sys.executable, "-m", "benchmarks.first_light", "--driver=cuda", f"--json={out}"]
    done = subprocess.run(
        [*command, *SMALLEST, *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    logs = sorted((out.parent / f"{out.name}.parts" / "logs").glob("*"))
    return done.returncode, "\n".join([done.stderr, *(log.read_text() for log in logs)])


def test_every_stage_runs_under_mps_and_nothing_is_left_broken(shim, tmp_path):
    control = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(FAKE_MPS, control)
    control.chmod(0o755)
    out, counts = tmp_path / "light.json", tmp_path / "counts"
    code, said = first_light(
        shim,
        out,
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        WINDROW_STANDIN_MPS="1",
        WINDROW_SHIM_COUNTS=str(counts),
    )
    assert code == 0, said[-6000:]
    assert "rule broken" not in said
    assert "Traceback" not in said, said[-6000:]
    found = json.loads(out.read_text())
    assert found["environment"]["mps"] == "a private daemon"
    figures = {row["name"]: row["value"] for row in found["results"]}
    assert figures["dedicated worker"] > 0
    parts = out.with_name(out.name + ".parts")
    for arm in ("windrow", "gaps"):
        part = json.loads((parts / f"{arm}-2000.json").read_text())
        assert part["tasklets"], f"the worker ran nothing under {arm}"
    device = json.loads((parts / "device.json").read_text())
    assert len(device["splits"]) == 7, "six shares of SMs, and none"
    assert device["captures"]["graphs"] == 7
    assert json.loads((parts / "corun.json").read_text())["profile"]["coRun"]["samples"] == 6
    # Of all processes the worker beside decode alone has no memory of its own there.
    most = [json.loads(line)["most_device_bytes"] for line in counts.read_text().splitlines()]
    assert 0 in most
    assert out.with_suffix(".html").stat().st_size > 100_000


def test_without_mps_the_arms_that_share_in_time_run_and_one_line_says_what_is_left_out(
    shim, tmp_path
):
    path = os.pathsep.join(
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not (Path(folder) / "nvidia-cuda-mps-control").exists()
    )
    code, said = first_light(shim, tmp_path / "light.json", PATH=path)
    assert code == 0, said[-6000:]
    assert said.count("The GPU is shared in time only: co-run points") == 1
    assert "this worker shares the GPU in time only" in said
    parts = tmp_path / "light.json.parts"
    assert json.loads((parts / "gaps-2000.json").read_text())["tasklets"]
    assert not (parts / "corun.json").exists()
