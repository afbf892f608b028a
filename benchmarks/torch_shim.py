"""Build the shim of cudart and of libcuda against the headers that torch's wheels bring along."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent / "tests" / "shim"
PACKAGES = Path(sysconfig.get_path("purelib"))
FLAGS = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]


class NotBuilt(RuntimeError):
    """Error that names what the shim needs and this machine lacks."""


def build_shim(standin: Path, folder: Path) -> None:
    """Put `cudart.so` and `libcuda.so.1` into `folder`, over the built stand-in for libcuda.

    Raises:
        NotBuilt: no compiler, or no headers.
        subprocess.CalledProcessError: they do not compile.
    """
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise NotBuilt("no C compiler")
    runtime = next(PACKAGES.glob("nvidia/*/include/cuda_runtime_api.h"), None)
    if runtime is None:
        raise NotBuilt("this torch brings no headers of CUDA's runtime")
    # CUDA's runtime asks for crt/, which only Triton's wheel has.
    includes = [runtime.parent, PACKAGES / "triton" / "backends" / "nvidia" / "include"]
    common = [compiler, *FLAGS, *(f"-isystem{include}" for include in includes)]
    for arguments in (
        ["-o", folder / "cudart.so", HERE / "cudart.c", "-ldl", "-lpthread"],
        [
            *("-o", folder / "libcuda.so.1", f'-DSTANDIN="{standin}"', HERE / "libcuda.c"),
            *("-Wl,--no-as-needed", standin, "-ldl"),
        ],
    ):
        subprocess.run([*common, *map(str, arguments)], capture_output=True, text=True, check=True)


def environment_of(folder: Path) -> dict[str, str]:
    """Return what a process needs so that torch runs over the shim in `folder`."""
    return {
        "LD_PRELOAD": str(folder / "cudart.so"),
        "LD_LIBRARY_PATH": str(folder),
        "OMP_NUM_THREADS": "1",
    }
