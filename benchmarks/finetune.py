"""How fast the finetune engine trains on a device of its own, beside a plain peft loop.

Both train on the same rows with the same batch, in turns, each in a process of its own: real tokens
a second, without loading and without a first step. Also what a tasklet costs beyond its arithmetic:
asking for a grant and telling decode about it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write

JOB = ROOT / "examples" / "finetunejob.yaml"
# Asking, publishing and accounting must stay below a thousandth of a tasklet of 5 ms.
GATE_GOAL_US = 50.0


def throughput(module: str, flags: list[str], seconds: float) -> float:
    """Run one measurement in a process of its own; real tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", module, *flags, "--job", str(JOB), "--json", str(out)]
        command += ["--seconds", str(seconds), "--log-dir", folder]
        environ = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
        return float(json.loads(out.read_text())["tokens_per_second"])


def ours(units: int, seconds: float) -> float:
    """Our engine."""
    flags = ["--standalone", "--units", str(units)]
    return throughput("windrow_sidecar.finetune.worker", flags, seconds)


def plain(units: int, seconds: float) -> float:
    """The plain loop."""
    return throughput("windrow_sidecar.finetune.baseline", ["--units", str(units)], seconds)


def compare(units: int, repeats: int, seconds: float) -> Result:
    """Both in turns, so that whatever else the machine does meets both."""
    ran: dict[str, list[float]] = {"ours": [], "plain": []}
    runs: list[tuple[str, Callable[[int, float], float]]] = [("ours", ours), ("plain", plain)]
    for repeat in range(repeats):
        for name, run in runs if repeat % 2 == 0 else reversed(runs):
            ran[name].append(run(units, seconds))
            print(f"  {units} core(s), {name}: {ran[name][-1]:,.0f} tokens/s", flush=True)
    value, spread = middle(ran["ours"])
    baseline = middle(ran["plain"])[0]
    return Result(
        f"dedicated throughput, {units} core(s)",
        value,
        "tokens/s",
        "higher",
        goal=baseline,
        spread=spread,
        baseline=Baseline("peft loop", baseline),
    )


def gate_cost_us(rounds: int) -> Result:
    """Launch and landing of a tasklet under a standing grant, without the tasklet."""
    from windrow_sidecar._core import Arena, Geometry
    from windrow_sidecar.finetune.estimates import Estimates
    from windrow_sidecar.finetune.grants import GrantGate, OfferFacts
    from windrow_sidecar.finetune.tasklets import MicroBatch, Tasklet
    from windrow_sidecar.qos.view import Action, Decision, Phase

    class Still:
        """A partition that never changes: moving threads is measured elsewhere."""

        total_units = 2

        def activate_finetune(self, units: int) -> None:
            """Nothing to move."""

    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 32, "dtype_bytes": 4}
    geometry = Geometry(**sizes, block_bytes=4096, chunks=2)
    page = Arena.create(geometry, reserved_chunks=1).page
    go = Decision(action=Action.GO, finetune_units=1)
    page.publish_grant(*dataclasses.astuple(go)[:-1])
    facts = OfferFacts(1)
    gate = GrantGate(page, Still(), Estimates(), lambda: facts, decode_answers=lambda: True)
    tasklet = Tasklet(0, Phase.FORWARD, 0, MicroBatch(0, (0,), 200, 200))
    times = []
    for _ in range(rounds):
        page.beat(0)
        begun = time.perf_counter_ns()
        gate.launch(tasklet)
        gate.landed(tasklet)
        times.append((time.perf_counter_ns() - begun) / 1e3)
    value, spread = middle(times)
    name = "grant and offer of a tasklet"
    return Result(name, value, "us", "lower", goal=GATE_GOAL_US, spread=spread)


def main() -> None:
    """Run all."""
    options = arguments(__doc__).parse_args()
    env = environment()
    repeats, seconds = (2, 5.0) if options.quick else (5, 15.0)
    cores = len(os.sched_getaffinity(0))
    results = [compare(units, repeats, seconds) for units in sorted({1, cores})]
    results.append(gate_cost_us(2_000 if options.quick else 20_000))
    write("finetune", results, env, options.json)


if __name__ == "__main__":
    main()
