"""`windrow doctor --gpu`, as far as a machine without a GPU goes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from worker_pod import ROOT

FAKE_MPS = ROOT / "tests" / "contract" / "fake_mps_control.py"
ALL = ["driver", "torch", "mps", "memory between processes", "shares of SMs", "triton"]
ALL += ["pinned memory"]


def doctor(environ: dict[str, str]) -> tuple[int, dict[str, dict]]:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("windrow")), "doctor", "--gpu", "--json"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = {check["what"]: check for check in json.loads(done.stdout)}
    assert list(found) == ALL
    return done.returncode, found


def test_over_shim_and_stand_in_every_check_passes(shim, tmp_path):
    control = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(FAKE_MPS, control)
    control.chmod(0o755)
    environ = shim.environment(computes=True, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    environ |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "WINDROW_STANDIN_MPS": "1"}
    status, found = doctor(environ)
    assert [check for check in found.values() if not check["ok"]] == []
    assert status == 0
    assert "cuda tensors" in found["memory between processes"]["found"]
    assert "132 SMs" in found["driver"]["found"]


def test_a_process_that_mps_did_not_connect_is_found_out(shim, tmp_path):
    control = tmp_path / "nvidia-cuda-mps-control"
    shutil.copy(FAKE_MPS, control)
    control.chmod(0o755)
    code = """
from windrow_sidecar.compute.gpu_check import CHECKS, run
(found,) = run([check for check in CHECKS if check.what == "mps"])
print(found.ok, found.found, found.remedy)
"""
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    said = shim.run(code, PATH=path, WINDROW_STANDIN_MPS="0")
    assert said.startswith("False the driver did not connect this process")
    assert "hostPID" in said


def test_a_driver_that_is_too_old_for_torch_is_told_with_both_versions(shim):
    code = """
from windrow_sidecar.compute.finding import find_device
try:
    find_device("cuda")
except Exception as error:
    print(error)
"""
    said = shim.run(code, WINDROW_SHIM_DRIVER="12050")
    assert "the driver's CUDA is 12.5" in said
    assert "is built for CUDA 13" in said
    assert "Update NVIDIA's driver to R580 or newer" in said


def test_without_a_gpu_each_check_says_what_is_missing(tmp_path: Path):
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return
    status, found = doctor({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert status == 1
    assert not any(check["ok"] for check in found.values())
    assert all(check["found"] and check["remedy"] for check in found.values())
    assert "R580 or newer" in found["torch"]["remedy"]
    assert "libcuda.so.1" in found["driver"]["found"]
    assert "nvidia-cuda-mps-control" in found["mps"]["found"]
