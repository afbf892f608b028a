"""Host time and launches of one layer's forward and backward, without a GPU (see `host_arms`).

torch for CUDA runs over the shim of the tests: kernels return at once and compute nothing, so time
is the host's. Shapes are those of Llama-3-8B, in memory that nobody fills. Beside an idle decode,
standalone and plain PEFT take turns in one process, optimizer step by optimizer step.

Example: python -m benchmarks.host_cost --json /tmp/host_cost.json
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from benchmarks.torch_shim import build_shim, environment_of

ROW_TOKENS, ROWS = 1024, (1, 2)
LAYERS, ROUNDS, ROUNDS_QUICK = 32, 24, 6
# Which arm against which other one, with as many rows.
GOALS = (
    ("beside", "standalone", 1.08),
    ("beside-half", "standalone", 1.25),
    ("standalone", "peft", 1.2),
    ("compiled", "peft", 0.6),
    ("packed", "peft", 0.4),
    ("graphs", "peft", 0.02),
)
MOST_LAUNCHES = {"compiled": 60, "packed": 30, "graphs": 4}
# Norm of the gradient, clipping and AdamW over all layers.
MOST_OF_OPTIMIZER = 10
_MEMORY = 160 << 30


def main() -> int:
    """Measure each number of rows in a process of its own, and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    options = parser.parse_args()
    rounds = ROUNDS_QUICK if options.quick else ROUNDS
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="wh-") as name:
        folder = Path(name)
        environ = _environment(folder)
        for rows in ROWS:
            found = _run(folder / str(rows), environ, rows, rounds, options.layers)
            results += _results(rows, found)
    facts = environment() | {
        "driver": "cudart shim: kernels compute nothing, and memory is not filled",
        "shape": "llama-3-8b",
        "layers": options.layers,
        "row_tokens": ROW_TOKENS,
        "rounds": rounds,
        "time": "CPU time of the whole process, from a layer's begin to the next one's",
    }
    write("host_cost", results, facts, options.json)
    return 0


def _environment(folder: Path) -> dict[str, str]:
    """Build shim and stand-in; what a process needs for them."""
    build = ROOT / "build" / "libcuda_standin"
    options = ["-DWINDROW_PYTHON=OFF", "-DWINDROW_CUDA_STANDIN=ON", "-DCMAKE_BUILD_TYPE=Debug"]
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("ninja", path=programs):  # as the tests, which build there too
        options += ["-G", "Ninja"]
    for command in (
        ["cmake", *options, "-S", str(ROOT), "-B", str(build)],
        ["cmake", "--build", str(build), "--target", "cuda_standin", "--parallel", "2"],
    ):
        subprocess.run(
            command, env=os.environ | {"PATH": programs}, check=True, stdout=subprocess.DEVNULL
        )
    build_shim(build / "tests" / "libcuda_standin" / "libcuda.so.1", folder)
    (folder / "mps").mkdir()
    (folder / "mps" / "control").touch()
    return {
        **os.environ,
        **environment_of(folder),
        "WINDROW_SHIM_UNFILLED": "1",
        # The shim knows the calls of Triton's own launcher, and not those of Inductor's.
        "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
        "WINDROW_SHIM_MEMORY": str(_MEMORY),
        "WINDROW_STANDIN_MEMORY": str(_MEMORY),
        "WINDROW_STANDIN_MPS": "1",
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"),
    }


def _run(
    folder: Path, environ: dict[str, str], rows: int, rounds: int, layers: int
) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.host_arms", str(folder)]
    command += [f"--rows={rows}", f"--rounds={rounds}", f"--layers={layers}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the arms ended with {done.returncode}:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def _results(rows: int, found: dict[str, Any]) -> list[Result]:
    shape, us = f"{rows}x{ROW_TOKENS}", {arm: middle(of["us"]) for arm, of in found.items()}
    results = []
    for arm, (value, spread) in us.items():
        beside = Baseline("PEFT", us["peft"][0]) if arm != "peft" else None
        results.append(
            Result(f"{arm} {shape}: host time", value, "us", "lower", None, spread, beside)
        )
        if any(found[arm]["once_us"]):
            once, _ = middle(found[arm]["once_us"])
            name = f"{arm} {shape}: copies of the adapter, once a step"
            results.append(Result(name, once, "us", "lower"))
        launches, most = found[arm]["launches"], MOST_LAUNCHES.get(arm)
        results.append(Result(f"{arm} {shape}: launches", launches, "launches", "lower", most))
        taken, most = found[arm]["optimizer"], None if arm == "peft" else MOST_OF_OPTIMIZER
        name = f"{arm} {shape}: launches of the optimizer's step"
        results.append(Result(name, taken, "launches", "lower", most))
    for arm, other, goal in GOALS:
        if arm not in us:  # layers are not compiled where there is no compiler
            continue
        value, name = us[arm][0] / us[other][0], f"{arm} {shape} against {other}"
        base = Baseline(other, us[other][0])
        results.append(Result(name, value, "x", "lower", goal, None, base))
    planned, name = found["beside"]["planned"], f"beside {shape}: layers with a plan"
    results.append(Result(name, planned, "layers", "lower", 0))
    return results


if __name__ == "__main__":
    sys.exit(main())
