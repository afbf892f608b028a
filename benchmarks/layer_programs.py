"""Tokens a second of a dedicated worker by each layer program, beside plain PEFT, in turns.

Each run is a process of its own. A rate counts only with a gradient norm that is finite and not
zero, and a loss that moves as plain PEFT's does. What an arm really ran, and why, is in the file's
environment: a program that cannot run falls back to the next simpler one.

Example: python -m benchmarks.layer_programs --driver cuda --shape llama-3-8b --json OUT.json
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine.setting import Setting, of_shape
from benchmarks.harness import (
    DRIVER_HELP,
    ROOT,
    Baseline,
    Result,
    arguments,
    environment,
    middle,
    write,
)
from benchmarks.shapes import SHAPES
from windrow import openmp
from windrow.rundir import ENV_LAYER_PROGRAM

WORKER, LOOP = "windrow_sidecar.finetune.worker", "windrow_sidecar.finetune.standalone.baseline"
PEFT, CHECKPOINTED = "peft", "peft, gradient checkpointing"
PROGRAMS = ("eager", "packed", "graphs")
# What a GPU is expected to do by graphs, against the faster of the two PEFT loops.
GOAL_ON_GPU = 1.6
# How far apart two losses may be that learn the same in other roundings, after some steps: a
# hundredth of what the loss is. A program that learns nothing, or something else, is farther off.
LOSS_WITHIN = 0.01

Found = dict[str, Any]


def arms() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return command and environment of each arm."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {
        PEFT: ([LOOP], {}),
        CHECKPOINTED: ([LOOP, "--gradient-checkpointing"], {}),
    }
    return found | {
        name: ([WORKER, "--standalone"], {ENV_LAYER_PROGRAM: name}) for name in PROGRAMS
    }


def run_arm(setting: Setting, command: list[str], environ: dict[str, str], steps: int) -> Found:
    """Run one arm for so many optimizer steps; returns its measurement, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        flags = [*setting.flags, "--json", str(out), "--steps", str(steps), "--log-dir", folder]
        done = subprocess.run(
            [sys.executable, "-m", *command, *flags],
            cwd=ROOT,
            env={**os.environ, **openmp.WORKER, **environ},
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return {"error": done.stderr[-2000:]}
        found: Found = json.loads(out.read_text())
        return found


def refused(found: Found, reference: Found | None) -> str:
    """Return why a rate does not count; "" if it does.

    Args:
        found: of the arm.
        reference: of plain PEFT over the same rows and steps; None: it did not run.
    """
    if "error" in found:
        return f"it failed: {found['error']}"
    norm, loss = found["gradient_norm_last"], found["loss_last"]
    if not (math.isfinite(norm) and norm > 0):
        return f"its gradient norm is {norm}"
    if not math.isfinite(loss):
        return f"its loss is {loss}"
    if reference is not None and "error" not in reference:
        theirs = reference["loss_last"]
        if abs(loss - theirs) > LOSS_WITHIN * abs(theirs):
            return f"its loss is {loss:.4f} after as many steps as plain PEFT's is {theirs:.4f}"
    return ""


def results_of(
    runs: dict[str, list[Found]], *, on_gpu: bool
) -> tuple[list[Result], dict[str, Any]]:
    """Return the figures of all arms, and what each of them ran."""
    reference = runs[PEFT][-1] if runs.get(PEFT) else None
    rates: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    for arm, found in runs.items():
        whys = [why for one in found if (why := refused(one, reference))]
        facts[arm] = {"not_counted": whys} if whys else {}
        if "error" not in found[-1] and arm in PROGRAMS:
            facts[arm] |= {"ran": found[-1]["layer_program"], "why": found[-1]["layer_program_why"]}
        rates[arm] = [one["tokens_per_second"] for one in found if not refused(one, reference)]
    loops = {arm: middle(rates[arm])[0] for arm in (PEFT, CHECKPOINTED) if rates.get(arm)}
    best = max(loops, key=lambda arm: loops[arm]) if loops else ""
    baseline = Baseline(best, loops[best]) if best else None
    results = []
    for arm, of_arm in rates.items():
        value, spread = middle(of_arm) if of_arm else (0.0, 0.0)
        beside = baseline if arm in PROGRAMS else None
        goal = GOAL_ON_GPU * loops[best] if on_gpu and best and arm == "graphs" else None
        results.append(
            Result(f"dedicated, {arm}", value, "tokens/s", "higher", goal, spread, beside)
        )
    last = runs.get("graphs", [{}])[-1]
    if last.get("layer_program") == "graphs":
        expected = Baseline("estimated by nodes, a shape and share", last["graph_bytes_expected"])
        taken = float(last["graph_bytes"])
        results.append(
            Result("graphs: the driver's memory", taken, "bytes", "lower", None, None, expected)
        )
    return results, facts


def main() -> int:
    """Run all arms in turns, in another order each time."""
    parser = arguments(__doc__)
    parser.add_argument("--driver", default="host", help=DRIVER_HELP)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True, help="of the model")
    parser.add_argument("--steps", type=int, help="of each run (default: 12, --quick 6)")
    options = parser.parse_args()
    device = "cpu" if options.driver == "host" else options.driver
    repeats, steps = (1, options.steps or 6) if options.quick else (3, options.steps or 12)
    planned = arms()
    runs: dict[str, list[Found]] = {arm: [] for arm in planned}
    with tempfile.TemporaryDirectory(prefix="wp-") as folder:
        setting = of_shape(Path(folder), options.shape, device)
        for repeat in range(repeats):
            for arm in planned if repeat % 2 == 0 else reversed(planned):
                runs[arm].append(run_arm(setting, *planned[arm], steps))
                print(f"  {arm}: {runs[arm][-1].get('tokens_per_second', 'failed')}", flush=True)
    results, facts = results_of(runs, on_gpu=setting.on_gpu)
    write("layer_programs", results, environment() | {"steps": steps, "arms": facts}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
