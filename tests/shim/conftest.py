"""torch for CUDA on a machine without a GPU: processes with the shim of cudart and of libcuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
PACKAGES = Path(sysconfig.get_path("purelib"))
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]


@dataclass(frozen=True, slots=True)
class Shim:
    """The two libraries, and processes that have them."""

    folder: Path

    def environment(self, *, computes: bool = False, **more: str) -> dict[str, str]:
        """Of such a process; `computes`: its operators give results (see `kernels_on_host`)."""
        if computes:
            more = {"PYTHONPATH": str(HERE / "site"), **more}
        without = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        return without | {
            "LD_PRELOAD": str(self.folder / "cudart.so"),
            "LD_LIBRARY_PATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            **more,
        }

    def run(self, code: str, *arguments: object, computes: bool = False, **environ: str) -> str:
        """Run a piece of Python in a process of its own; returns what it printed.

        The test fails where it ends otherwise than well, or breaks a rule of CUDA's.
        """
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env=self.environment(computes=computes, **environ),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        assert "rule broken" not in done.stderr, done.stderr[-6000:]
        # The core complains there of calls that fail where nobody can be told.
        assert "windrow: " not in done.stderr, done.stderr[-6000:]
        return done.stdout.strip()


@pytest.fixture(scope="session")
def shim(standin: Path, tmp_path_factory) -> Shim:
    """Compiled against the headers that the wheels bring along."""
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is built without CUDA")
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler")
    runtime = next(PACKAGES.glob("nvidia/*/include/cuda_runtime_api.h"), None)
    if runtime is None:
        pytest.skip("this torch brings no headers of CUDA's runtime")
    # CUDA's runtime asks for crt/, which only Triton's wheel has.
    includes = [runtime.parent, PACKAGES / "triton" / "backends" / "nvidia" / "include"]
    folder = tmp_path_factory.mktemp("shim")
    common = [compiler, *FLAGS, *(f"-isystem{include}" for include in includes)]
    for arguments in (
        ["-o", folder / "cudart.so", HERE / "cudart.c", "-ldl", "-lpthread"],
        [
            *("-o", folder / "libcuda.so.1", f'-DSTANDIN="{standin}"', HERE / "libcuda.c"),
            *("-Wl,--no-as-needed", standin, "-ldl"),
        ],
    ):
        done = subprocess.run(
            [*common, *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return Shim(folder)
