"""`windrow doctor --gpu`, as far as a machine without a GPU goes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from worker_pod import ROOT

FAKE_MPS = ROOT / "tests" / "contract" / "fake_mps_control.py"
NVML = ROOT / "tests" / "contract" / "nvml_standin.c"
ALL = [
    "driver",
    "torch",
    "mps",
    "mps across containers",
    "memory between processes",
    "shares of SMs",
    "nvml",
    "triton",
]
ALL += ["pinned memory"]
# Of the stand-in for libcuda, as NVML writes it; another GPU comes first there.
UUID = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
OTHER = "GPU-00000000-1111-2222-3333-444444444444"


def nvml(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process that has a stand-in for NVML."""
    library = folder / "libnvidia-ml.so.1"
    compiler = next(c for c in ("cc", "gcc", "clang") if shutil.which(c))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(NVML)], check=True)
    return {"NVML_GPUS": f"{OTHER},{UUID}", "PYTORCH_NVML_BASED_CUDA_CHECK": "0", **more}


def with_mps(folder):
    """PATH with a stand-in of the MPS daemon's control program, which is put into `folder`."""
    control = folder / "nvidia-cuda-mps-control"
    shutil.copy(FAKE_MPS, control)
    control.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


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


@pytest.mark.extended
def test_over_shim_and_stand_in_every_check_passes(shim, tmp_path):
    environ = shim.environment(computes=True, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    environ |= {"PATH": with_mps(tmp_path), "WINDROW_STANDIN_MPS": "1"}
    environ |= nvml(tmp_path)
    environ["LD_LIBRARY_PATH"] += f":{tmp_path}"
    status, found = doctor(environ)
    assert [check for check in found.values() if not check["ok"]] == []
    assert status == 0
    assert "cuda tensors" in found["memory between processes"]["found"]
    assert "132 SMs" in found["driver"]["found"]
    assert "shares memory with a third" in found["mps"]["found"]
    assert found["mps across containers"]["found"].startswith("with another PID namespace: ")
    assert found["nvml"]["found"].startswith("stand-in 1 by its UUID, with 1 process(es), this one")


NVML_CHECK = """
from windrow_sidecar.compute.gpu_check import CHECKS, run
(found,) = run([check for check in CHECKS if check.what == "nvml"])
print(found.ok, found.found, "|", found.remedy)
"""


@pytest.mark.extended
def test_nvml_that_knows_no_such_gpu_or_names_strange_processes_is_told(shim, tmp_path):
    environ = nvml(tmp_path, LD_LIBRARY_PATH=f"{shim.folder}:{tmp_path}")
    assert shim.run(NVML_CHECK, **environ).startswith("True stand-in 1")
    said = shim.run(NVML_CHECK, **environ | {"NVML_GPUS": OTHER})
    assert said.startswith("False NVML: ")
    assert "driver capability `utility`" in said
    said = shim.run(NVML_CHECK, **environ | {"NVML_RUNS": "1"})
    assert said.startswith("False NVML finds stand-in 1 by its UUID, but not this process")
    assert "hostPID" in said


@pytest.mark.extended
def test_memory_that_does_not_go_between_clients_of_mps_is_found_out(shim, tmp_path):
    code = """
from windrow_sidecar.compute import gpu_check
gpu_check._MODULE = "without_memory"
(found,) = gpu_check.run([check for check in gpu_check.CHECKS if check.what == "mps"])
print(found.ok, found.found, "|", found.remedy)
"""
    (tmp_path / "without_memory.py").write_text("""
import sys
from windrow_sidecar.compute import gpu_check
if "import" in sys.argv:
    sys.exit("the import was refused")
gpu_check._MODULE = "without_memory"
gpu_check.main()
""")
    environ = {"PATH": with_mps(tmp_path), "WINDROW_STANDIN_MPS": "1", "PYTHONPATH": str(tmp_path)}
    said = shim.run(code, **environ)
    assert said.startswith("False between two clients of the daemon, ")
    assert "the import was refused" in said
    assert "sharing: temporal" in said


@pytest.mark.extended
def test_a_process_that_mps_did_not_connect_is_found_out(shim, tmp_path):
    code = """
from windrow_sidecar.compute.gpu_check import CHECKS, run
(found,) = run([check for check in CHECKS if check.what == "mps"])
print(found.ok, found.found, found.remedy)
"""
    said = shim.run(code, PATH=with_mps(tmp_path), WINDROW_STANDIN_MPS="0")
    assert said.startswith("False the driver did not connect this process")
    assert "hostPID" in said


@pytest.mark.extended
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
