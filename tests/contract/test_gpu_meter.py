"""The GPU's utilisation by NVML: of the GPU that decode uses, and of the processes that use it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from windrow_sidecar.compute.utilization import gpu_name

SOURCE = Path(__file__).with_name("nvml_standin.c")
FIRST = "GPU-00000000-1111-2222-3333-444444444444"
SECOND = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
SLICE = "MIG-b0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
GPUS = ",".join((FIRST, SECOND, SLICE))

SAMPLE = """
import json, logging, os, subprocess, sys
from dataclasses import asdict
logging.basicConfig(level=logging.INFO, format="%(message)s")
from windrow_sidecar.compute.utilization import make_meter
driver, uuid, use = sys.argv[1:4]
# As the agent starts it: the leader of a group of its own, here with a process of its own in turn.
worker = subprocess.Popen(
    [sys.executable, "-c", "import subprocess, sys; "
     "child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"],
    stdout=subprocess.PIPE, process_group=0,
)
child = int(worker.stdout.readline())
use = use.replace("WORKER", str(worker.pid)).replace("CHILD", str(child))
os.environ.update(json.loads(use.replace("ENGINE", str(os.getpid()))))
meter = make_meter(driver, 132, uuid)
found = [asdict(meter.sample(os.getpid(), worker.pid)) for _ in range(2)]
os.killpg(worker.pid, 9)
print(json.dumps({"meter": type(meter).__name__, **found[-1]}))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """A folder with libnvidia-ml.so.1."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += ["-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder


def sampled(library: Path, driver: str, uuid: str, **use: str) -> tuple[dict, str]:
    """Return what the meter of such an engine finds, and what it says."""
    environ = {k: v for k, v in os.environ.items() if not k.endswith("_VISIBLE_DEVICES")}
    visible = {k: use.pop(k) for k in tuple(use) if k.endswith("_VISIBLE_DEVICES")}
    done = subprocess.run(
        [sys.executable, "-c", SAMPLE, driver, uuid, json.dumps(use)],
        env=environ | visible | {"LD_LIBRARY_PATH": str(library), "NVML_GPUS": GPUS},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_gpu_of_the_engines_uuid_is_read_whatever_its_number(library):
    uuid = SECOND.removeprefix("GPU-").replace("-", "")
    found, _ = sampled(library, "cuda", uuid, NVML_USE_0="ENGINE:99", NVML_USE_1="ENGINE:40")
    assert found == {"meter": "GpuMeter", "decode": 0.4, "finetune": 0.0}


def test_the_worker_and_what_it_started_are_told_from_all_else_on_the_gpu(library):
    found, said = sampled(library, "cuda", "", NVML_USE_0="ENGINE:40,WORKER:20,CHILD:5,1:10")
    assert (found["decode"], found["finetune"]) == (0.5, 0.25)
    assert said == ""


def test_numbers_of_another_pid_namespace_count_as_decode_and_that_is_said_once(library):
    hidden = "4194400:30,4194401:20"  # above the most that a kernel gives
    found, said = sampled(library, "cuda", "", NVML_USE_0=hidden)
    assert (found["decode"], found["finetune"]) == (0.5, 0.0)
    assert said.count("another PID namespace") == 1


def test_a_gpu_on_which_nothing_runs_is_idle(library):
    found, said = sampled(library, "cuda", "")
    assert (found["decode"], found["finetune"], said) == (0.0, 0.0, "")


def test_a_slice_has_no_such_counters_and_that_is_said(library):
    uuid = SLICE.removeprefix("MIG-").replace("-", "")
    found, said = sampled(library, "cuda", uuid, NVML_USE_2="ENGINE:40")
    assert found == {"meter": "GpuMeter", "decode": 0.0, "finetune": 0.0}
    assert said.count("Not Supported") == 2  # by process, and of the whole


def test_the_second_gpu_by_the_engines_driver_is_no_host(library):
    found, _ = sampled(library, "cuda:1", "", NVML_USE_1="ENGINE:40")
    assert found == {"meter": "GpuMeter", "decode": 0.4, "finetune": 0.0}


def test_a_gpu_that_nvml_does_not_have_leaves_the_figures_out_with_the_reason(library):
    found, said = sampled(library, "cuda", "f" * 32)
    assert found["meter"] == "Unmetered"
    assert "and the GPU that decode uses" in said


def test_the_beginning_of_a_uuid_names_it_as_for_cuda(library):
    found, _ = sampled(library, "cuda", "", NVML_USE_1="ENGINE:40", CUDA_VISIBLE_DEVICES="GPU-a0a1")
    assert found["decode"] == 0.4


@pytest.mark.parametrize(
    ("driver", "environ", "name"),
    [
        ("cuda", {}, 0),
        ("cuda:1", {}, 1),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "3,1"}, 3),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "3, 1"}, 1),
        ("cuda", {"CUDA_VISIBLE_DEVICES": f"{SLICE},{FIRST}"}, SLICE),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-GPU-0f/1/0"}, "MIG-GPU-0f/1/0"),
        ("cuda", {"NVIDIA_VISIBLE_DEVICES": SECOND}, SECOND),
        ("cuda", {"NVIDIA_VISIBLE_DEVICES": "all"}, 0),
        ("cuda", {"NVIDIA_VISIBLE_DEVICES": "5"}, 0),  # the container's only one
        ("cuda:1", {"NVIDIA_VISIBLE_DEVICES": f"{SECOND},{FIRST}"}, 1),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": SECOND}, 0),
    ],
)
def test_without_the_engines_word_the_environment_names_the_gpu(driver, environ, name):
    assert gpu_name(driver, "", environ) == name
    assert gpu_name(driver, "a" * 32, environ) == "a" * 32
