"""Fixtures of the native core: one arena per test on each driver, and child processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windrow_sidecar._core import Arena, Geometry

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=32, dtype_bytes=4, block_bytes=8192, chunks=16)
RESERVED = 2


@pytest.fixture(
    params=[
        "host",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skip("no CUDA driver yet")]),
    ]
)
def driver(request) -> str:
    return request.param


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short path: the name of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="wr-") as path:
        yield Path(path)


@pytest.fixture
def arena(driver: str) -> Iterator[Arena]:
    made = Arena.create(GEOMETRY, reserved_chunks=RESERVED)
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
