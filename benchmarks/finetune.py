"""How fast the finetune engine trains on a device of its own, beside a plain peft loop.

Both train on the same rows with the same batch, in turns, each in a process of its own: real tokens
a second, without loading and without a first step. Also what a tasklet costs beyond its arithmetic:
asking for a grant and telling decode about it; how far gradients are from peft's, how soon a pause
is obeyed, how long a switch between two jobs over one base model takes, and how long a checkpoint
holds the stream.
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
from typing import cast

from benchmarks.engine.equality import ARCHITECTURES, equality
from benchmarks.engine.holding import holding
from benchmarks.engine.stopping import stopping
from benchmarks.engine.switching import switching
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


def checkpointed(units: int, seconds: float) -> float:
    """The plain loop with gradient checkpointing."""
    flags = ["--units", str(units), "--gradient-checkpointing"]
    return throughput("windrow_sidecar.finetune.baseline", flags, seconds)


def compare(units: int, repeats: int, seconds: float) -> list[Result]:
    """All in turns, so that whatever else the machine does meets all of them."""
    runs: dict[str, Callable[[int, float], float]] = {
        "ours": ours,
        "peft loop, gradient checkpointing": checkpointed,
        "peft loop": plain,
    }
    ran: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in runs if repeat % 2 == 0 else reversed(runs):
            ran[name].append(runs[name](units, seconds))
            print(f"  {units} core(s), {name}: {ran[name][-1]:,.0f} tokens/s", flush=True)
    value, spread = middle(ran.pop("ours"))
    results = []
    for name, rates in ran.items():
        rate = middle(rates)[0]
        against = "" if name == "peft loop" else ", against checkpointing"
        results.append(
            Result(
                f"dedicated throughput, {units} core(s){against}",
                value,
                "tokens/s",
                "higher",
                goal=rate,
                spread=spread,
                baseline=Baseline(name, rate),
            )
        )
    return results


def gate_cost_us(rounds: int) -> Result:
    """Launch and landing of a tasklet under a standing grant, without the tasklet."""
    from windrow_sidecar._core import Arena, Geometry
    from windrow_sidecar.compute.partition import Partition
    from windrow_sidecar.finetune.estimates import Estimates
    from windrow_sidecar.finetune.grants import GrantGate, OfferFacts
    from windrow_sidecar.finetune.plan.frontier import tasklet_of
    from windrow_sidecar.finetune.tasklets import MicroBatch, Window
    from windrow_sidecar.qos.view import Action, Decision, Phase

    class Still:
        """A partition that never changes: moving threads is measured elsewhere."""

        total_units = 2

        def levels(self) -> tuple[int, ...]:
            """Both."""
            return (1, 2)

        def activate(self, level: int) -> None:
            """Nothing to move."""

    geometry = Geometry(
        layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2
    )
    page = Arena.create(geometry, reserved_chunks=1).page
    go = Decision(action=Action.GO, finetune_units=1)
    page.publish_grant(*dataclasses.astuple(go)[:-1])
    facts = OfferFacts(1)
    still = cast(Partition, Still())
    gate = GrantGate(page, still, Estimates(), lambda: facts, decode_lives=lambda: True)
    micro = MicroBatch(0, (0,), (200,))
    tasklet = tasklet_of(Phase.FORWARD, micro, 0, Window(0, 200))
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
    repeats, seconds = (1, 5.0) if options.quick else (3, 12.0)
    cores = len(os.sched_getaffinity(0))
    results = [r for units in sorted({1, cores}) for r in compare(units, repeats, seconds)]
    results.append(gate_cost_us(2_000 if options.quick else 20_000))
    results += equality(list(ARCHITECTURES)[:2] if options.quick else list(ARCHITECTURES))
    results += holding(rounds=2 if options.quick else 7)
    results += switching(rounds=4 if options.quick else 20)
    results += stopping(rounds=5 if options.quick else 20, pauses=50 if options.quick else 300)
    write("finetune", results, env, options.json)


if __name__ == "__main__":
    main()
