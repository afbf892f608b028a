"""Check whether Triton can launch a kernel on this machine's GPU, and say what is missing.

Its first launch compiles a small module in C: it needs a compiler, Python's headers, a folder that
it may write, and libcuda.so.1 where the linker finds it.
"""

# Triton compiles the kernel: annotations are types of its own, and no checker knows them.
# mypy: disable-error-code="no-untyped-def, misc, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

NEEDS = (
    "a C compiler (gcc or clang, or CC), Python's headers, a cache that can be written "
    "(TRITON_CACHE_DIR, else ~/.triton) and libcuda.so.1"
)
_FAILS = (
    AssertionError,
    AttributeError,
    ImportError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    subprocess.SubprocessError,
)


@triton.jit
def _fill(out, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    tl.store(out + tl.arange(0, BLOCK), 1.0)


def try_triton(device: torch.device) -> str:
    """Launch a kernel and wait for it; returns why that cannot be, "" where it can.

    Some seconds at the first time on a machine, while it compiles.
    """
    try:
        _fill[(1,)](torch.zeros(16, device=device), BLOCK=16)
        torch.cuda.current_stream(device).synchronize()
    except _FAILS as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return "; ".join([*lacks(), said])
    return ""


def lacks() -> list[str]:
    """Say what of `NEEDS` is not there."""
    missing = []
    compiler = os.environ.get("CC")
    if compiler is None and not (shutil.which("gcc") or shutil.which("clang")):
        missing.append("there is no C compiler")
    if compiler is not None and not shutil.which(compiler):
        missing.append(f"CC names {compiler!r}, which is not a program")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("there is no Python.h (Debian: python3-dev)")
    try:
        folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError) as error:  # the latter: a user without a home
        missing.append(f"its cache cannot be written ({error})")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        missing.append("there is no libcuda.so.1")
    return missing
