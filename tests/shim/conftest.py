"""torch for CUDA on a machine without a GPU: processes with the shim of cudart and of libcuda."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from worker_pod import Pod

from benchmarks.torch_shim import NotBuilt, build_shim, environment_of
from windrow_sidecar import _core

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Shim:
    """The two libraries, and processes that have them."""

    folder: Path

    def environment(self, *, computes: bool = False, **more: str) -> dict[str, str]:
        """Of such a process; `computes`: its operators give results (see `kernels_on_host`)."""
        if computes:
            more = {"PYTHONPATH": str(HERE / "site"), **more}
        without = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        return without | environment_of(self.folder) | more

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
        # The core complains there of calls that fail where nobody hears of it.
        assert "windrow: " not in done.stderr, done.stderr[-6000:]
        return done.stdout.strip()


@pytest.fixture(scope="session")
def shim(standin: Path, tmp_path_factory) -> Shim:
    """Compiled against the headers that the wheels bring along."""
    if torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} is built without CUDA")
    folder = tmp_path_factory.mktemp("shim")
    try:
        build_shim(standin, folder)
    except NotBuilt as missing:
        pytest.skip(str(missing))
    except subprocess.CalledProcessError as failed:
        pytest.fail(failed.stderr)
    return Shim(folder)


@pytest.fixture
def pod(shim, standin: Path, tmp_path_factory, request) -> Iterator[Pod]:
    """Decode in this process over the stand-in; its workers have the shim, and compute.

    A parameter says whether they are clients of MPS.
    """
    _core.use_libcuda(str(standin))
    root = tmp_path_factory.mktemp("p")
    environ = shim.environment(computes=True, WINDROW_SHIM_COUNTS=str(root / "counts"))
    if getattr(request, "param", False):
        (root / "control").touch()
        environ |= {"CUDA_MPS_PIPE_DIRECTORY": str(root), "WINDROW_STANDIN_MPS": "1"}
    pod = Pod(root, driver="cuda", environ=environ)
    yield pod
    pod.close()
    _core.use_libcuda("libcuda.so.1")
