"""Rows of the core's benchmark: their goals, and how it is built and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ROOT, Baseline, Result, middle
from windrow.errors import UserError

BUILD = ROOT / "build" / "bench"


@dataclass(frozen=True)
class NativeRow:
    """A figure of `windrow_bench`: how it is shown, what it shall reach, what ran beside it."""

    unit: str = "ns"
    goal: float | None = None
    scale: float = 1.0  # from what is measured to `unit`
    beside: str = ""
    better_is_more: bool = False


MALLOC = "malloc and free"
LITTLE = "blocks of a large tensor, 6 GiB lent"
NATIVE_ROWS = {
    "take a KV chunk from the reserve, p99": NativeRow("us", 1, 1e-3),
    "lend a chunk of 64 blocks, both sides": NativeRow("us", 5, 1e-3),
    "return a chunk of 64 blocks, both sides": NativeRow("us", 5, 1e-3),
    "system calls of 2,000 loans and returns": NativeRow("calls", 0),
    "small pool, allocate and free": NativeRow(goal=60, beside=MALLOC),
    "device allocator, allocate and free": NativeRow(beside=MALLOC),
    "blocks of a large tensor, 48 GiB lent": NativeRow("us", 1, 1e-3, beside=LITTLE),
    "publish a view": NativeRow(goal=50),
    "publish a grant": NativeRow(),
    "read a grant": NativeRow(goal=50),
    "check the pause epoch": NativeRow(),
    "a revoke is seen, spinning": NativeRow("us", 1, 1e-3),
    "a revoke is seen, futex": NativeRow("us", 50, 1e-3),
    "create a block": NativeRow("us"),
    "map a block, access included": NativeRow("us"),
    "set the access of a block": NativeRow("us"),
    "unmap a block": NativeRow("us"),
    "map a chunk of 64 blocks, per-layer": NativeRow("us"),
    "unmap a chunk of 64 blocks, per-layer": NativeRow("us"),
    "map a chunk of 64 blocks, token-major": NativeRow("us"),
    "unmap a chunk of 64 blocks, token-major": NativeRow("us"),
    "copy a block": NativeRow("GB/s", better_is_more=True),
}


def build_native() -> Path:
    """The executable of `benchmarks/native`, built where it is not there or not fresh.

    Raises:
        UserError: there is no CMake, or it does not compile.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("cmake", path=path) is None:
        raise UserError("cmake is missing", remedy="Run make setup, which brings it.")
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DWINDROW_PYTHON=OFF", "-DWINDROW_BENCH=ON"]
    for step in (
        ["cmake", *generator, *options, "-S", str(ROOT), "-B", str(BUILD)],
        ["cmake", "--build", str(BUILD), "--parallel", "2"],
    ):
        done = subprocess.run(
            step, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(
                f"building benchmarks/native failed: {(done.stdout + done.stderr)[-2000:]}",
                remedy="Install a C++20 compiler (Debian: apt-get install g++).",
            )
    return BUILD / "benchmarks" / "native" / "windrow_bench"


def measure_native(trace: Path, driver: str, *, quick: bool) -> list[Result]:
    """Return everything that `windrow_bench` prints, with its goals.

    Args:
        trace: of allocations, for the small pool.
        driver: "host" or "cuda": whose mapping calls are measured.
        quick: fewer repeats.

    Raises:
        UserError: it cannot be built, or the driver cannot be used here.
    """
    repeats, revokes = (5, 30) if quick else (31, 1_000)
    print("building benchmarks/native ...", flush=True)
    executable = build_native()
    done = subprocess.run(
        [str(executable), str(trace), str(repeats), str(revokes), driver],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"windrow_bench failed: {done.stderr.strip()}", field="--driver")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    figures = {line["name"]: middle(line["repeats"]) for line in lines}
    results = []
    for name, row in NATIVE_ROWS.items():
        if name not in figures:
            print(f"not measured, for this machine lets no process trace another: {name}")
            continue
        value, spread = figures[name]
        beside = Baseline(row.beside, figures[row.beside][0] * row.scale) if row.beside else None
        results.append(
            Result(
                name,
                value * row.scale,
                row.unit,
                "higher" if row.better_is_more else "lower",
                row.goal,
                spread * row.scale,
                beside,
            )
        )
    return results
