"""Fixtures of the native core: one arena per test on each driver, and child processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from windrow_sidecar import _core
from windrow_sidecar._core import Arena, Geometry

if TYPE_CHECKING:
    from torch import Tensor

RESERVED = 2


@pytest.fixture
def cuda_standin(standin: Path, monkeypatch) -> Iterator[Path]:
    """ "cuda" is CUDA's driver over the stand-in, here and in children."""
    # Read when the stand-in is first opened; children find it as libcuda.so.1.
    monkeypatch.setenv("WINDROW_STANDIN_GRANULARITY", "4096")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(standin.parent))
    _core.use_libcuda(str(standin))
    yield standin
    _core.use_libcuda("libcuda.so.1")


@pytest.fixture
def gpu() -> str:
    """The driver of a real GPU; skips where there is none."""
    try:
        _core.driver("cuda")
    except _core.DriverUnavailable as error:
        pytest.skip(f"no GPU: {error}")
    return "cuda"


@pytest.fixture(params=["host", "standin", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request) -> str:
    """The name of a driver: the host's, or CUDA's over the stand-in or over a GPU."""
    if request.param == "host":
        return "host"
    request.getfixturevalue("cuda_standin" if request.param == "standin" else "gpu")
    return "cuda"


@pytest.fixture
def geometry(request, driver: str) -> Callable[..., Geometry]:
    """Makes small geometries; on a real GPU the blocks are as small as CUDA knows them."""
    real = request.node.callspec.params["driver"] == "cuda"

    def make(*, layout: str = "per-layer", **sizes: int) -> Geometry:
        usual = {"layers": 2, "kv_heads": 2, "head_dim": 32, "dtype_bytes": 4, "chunks": 16}
        blocks = {"block_bytes": 2 << 20 if real else 8192}
        return Geometry(**(usual | blocks | sizes), layout=layout)

    return make


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """Give this process's cores, two at least; every thread has them again afterwards."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("a host device needs two cores; this process may use one")
    yield before
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(name), before)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: the name of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="wr-") as path:
        yield Path(path)


@pytest.fixture
def arena(driver: str, geometry: Callable[..., Geometry]) -> Iterator[Arena]:
    made = Arena.create(geometry(), reserved_chunks=RESERVED, driver=driver)
    yield made
    made.check()
    made.close()


@pytest.fixture
def served(arena: Arena, run_dir: Path) -> tuple[Arena, str]:
    """The arena, and the path of the socket that hands it out."""
    path = str(run_dir / "arena-0.sock")
    arena.serve(path)
    return arena, path


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts Python processes that run a piece of code; ends what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def arenas(request, tmp_path_factory):
    """Decode's arena, of as many chunks as the module's `CHUNKS`, and the worker's view of it."""
    geometry = Geometry(
        layers=2,
        kv_heads=1,
        head_dim=32,
        dtype_bytes=4,
        block_bytes=4096,
        chunks=request.module.CHUNKS,
    )
    decode = Arena.create(geometry, reserved_chunks=1)
    path = str(tmp_path_factory.mktemp("a") / "s")
    decode.serve(path)
    worker = Arena.attach(path)
    yield decode, worker
    worker.close()
    decode.check()
    decode.close()


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Tensor]:
    """The adapter that a tiny job learns which nothing interrupts."""
    from windrow_sidecar.testing.tinyjob import adapter_of, finish, tiny_job

    job = tiny_job()
    finish(job)
    return adapter_of(job)
