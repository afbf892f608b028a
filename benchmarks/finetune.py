"""Speed of the finetune engine on a device of its own, beside a plain peft loop.

Both train on the same rows with the same batch, in turns, each in a process of its own: real tokens
a second, without loading and without a first step. Also what a tasklet costs beyond its arithmetic:
asking for a grant and telling decode about it; how far gradients are from peft's, how soon a pause
is obeyed, how long a switch between two jobs over one base model takes, and how long a checkpoint
holds the stream.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine.equality import ARCHITECTURES, equality
from benchmarks.engine.holding import holding
from benchmarks.engine.setting import Setting, of_example, of_shape
from benchmarks.engine.stopping import stopping
from benchmarks.engine.switching import switching
from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from benchmarks.shapes import SHAPES
from windrow import openmp
from windrow.errors import UserError
from windrow_sidecar.compute.device import ComputeDevice

# Asking, publishing and accounting must stay below a thousandth of a tasklet of 5 ms.
GATE_GOAL_US = 50.0
# Benchmarks of the engine that are programs of their own.
THE_REST = ("activations", "offload", "endurance")
WORKER, LOOP = "windrow_sidecar.finetune.worker", "windrow_sidecar.finetune.standalone.baseline"
CHECKPOINTED = "peft loop, gradient checkpointing"
ENGINES = {
    "ours": [WORKER, "--standalone"],
    CHECKPOINTED: [LOOP, "--gradient-checkpointing"],
    "peft loop": [LOOP],
}
# Beside the worker's own step: how the cost of being stoppable falls with what a tasklet computes.
SMALLER_STEPS = ((1, 128), (1, 512))
# What a GPU is expected to do against the loop with checkpointing.
GOAL_ON_GPU = 1.1


def throughput(engine: list[str], setting: Setting, units: int | None, seconds: float) -> float:
    """Run one measurement in a process of its own; real tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", *engine, *setting.flags, "--json", str(out)]
        command += [] if units is None else ["--units", str(units)]
        command += ["--seconds", str(seconds), "--log-dir", folder]
        environ = {**os.environ, **openmp.WORKER}
        done = subprocess.run(
            command, cwd=ROOT, env=environ, check=False, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{engine[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return float(json.loads(out.read_text())["tokens_per_second"])


def compare(
    setting: Setting, what: str, units: int | None, repeats: int, seconds: float
) -> list[Result]:
    """All in turns, so that whatever else the machine does meets all of them."""
    runs: dict[str, Callable[[], float]] = {
        name: functools.partial(throughput, engine, setting, units, seconds)
        for name, engine in ENGINES.items()
    }
    ran: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in runs if repeat % 2 == 0 else reversed(runs):
            ran[name].append(runs[name]())
            print(f"  {what}, {name}: {ran[name][-1]:,.0f} tokens/s", flush=True)
    value, spread = middle(ran.pop("ours"))
    results = []
    for name, rates in ran.items():
        rate = middle(rates)[0]
        against = "" if name == "peft loop" else ", against checkpointing"
        goal: float | None = rate
        if setting.on_gpu:
            goal = GOAL_ON_GPU * rate if name == CHECKPOINTED else None
        results.append(
            Result(
                f"dedicated throughput, {what}{against}",
                value,
                "tokens/s",
                "higher",
                goal=goal,
                spread=spread,
                baseline=Baseline(name, rate),
            )
        )
    return results


def gate_cost_us(rounds: int) -> Result:
    """Measure launch and landing of a tasklet under a grant in force, without the tasklet."""
    from windrow_sidecar._core import Arena, Geometry
    from windrow_sidecar.compute.whole_device import WholeDevice
    from windrow_sidecar.finetune.colocated.grants import GrantGate, OfferFacts
    from windrow_sidecar.finetune.engine.group_progress import tasklet_of
    from windrow_sidecar.finetune.engine.sizing import Estimates
    from windrow_sidecar.finetune.tasklets import MicroBatch, TokenWindow
    from windrow_sidecar.qos.view import Action, Grant, Phase

    geometry = Geometry(
        layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2
    )
    page = Arena.create(geometry, reserved_chunks=1).page
    go = Grant(action=Action.GO, finetune_units=1)
    page.publish_grant(go)
    facts = OfferFacts(1)
    # One that never changes: moving threads is measured elsewhere.
    still = WholeDevice("finetune", 1)
    gate = GrantGate(page, still, Estimates(), lambda: facts, decode_lives=lambda: True)
    micro = MicroBatch(0, (0,), (200,))
    tasklet = tasklet_of(Phase.FORWARD, micro, 0, TokenWindow(0, 200))
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


def of_engine(*, quick: bool) -> list[Result]:
    """The example's job on this machine's cores, and what has no device."""
    repeats, seconds = (1, 5.0) if quick else (3, 12.0)
    cores, example = len(os.sched_getaffinity(0)), of_example()
    results = []
    for units in sorted({1, cores}):
        results += compare(example, f"{units} core(s)", units, repeats, seconds)
    results.append(gate_cost_us(2_000 if quick else 20_000))
    results += _without_a_model(example.find(), quick=quick)
    results += stopping(
        example, rounds=5 if quick else 60, pauses=50 if quick else 300, others=SMALLER_STEPS
    )
    return results


def _without_a_model(device: ComputeDevice, *, quick: bool) -> list[Result]:
    """Measure what brings models or tensors of its own: equality, checkpoints, switches."""
    results = equality(list(ARCHITECTURES)[:2] if quick else list(ARCHITECTURES), device)
    results += holding(rounds=2 if quick else 7, device=device)
    return results + switching(rounds=4 if quick else 20, device=device.torch)


def of_model(shape: str, device: str, *, quick: bool, whole: bool) -> list[Result]:
    """A shape with random weights on one device; `whole`: and all else that this file measures."""
    repeats, seconds = (1, 5.0) if quick else (3, 20.0)
    with tempfile.TemporaryDirectory() as folder:
        setting = of_shape(Path(folder), shape, device)
        found = setting.find()  # before anything is loaded for it
        results = compare(setting, setting.what, None, repeats, seconds)
        results += stopping(setting, rounds=5 if quick else 60, pauses=20 if quick else 300)
    if whole:
        results += _without_a_model(found, quick=quick)
    elif setting.on_gpu:
        results += switching(rounds=4 if quick else 20, device=found.torch)
    return results


def the_rest(driver: str, *, quick: bool, beside: Path | None) -> list[str]:
    """Run the engine's other benchmarks on the same device, one after the other.

    `beside`: results lie next to that file, under its name and theirs. Returns what failed.
    """
    failed = []
    for name in THE_REST:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--driver", driver]
        command += ["--quick"] if quick else []
        if beside is not None:
            command += ["--json", str(beside.with_name(f"{beside.stem}-{name}.json"))]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    return failed


def main() -> None:
    """Run the engine's table, or one shape on one device."""
    parser = arguments(__doc__)
    parser.epilog = (
        "example: python -m benchmarks.finetune --driver cuda --shape llama-3-8b --all --quick"
    )
    parser.add_argument(
        "--driver", default="host", help="host (default), cuda, or cuda:N: what trains --shape"
    )
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        help="measure a model of that shape, random weights, 2 x 1,024 tokens",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="with --shape: the whole table on that device, and the engine's other benchmarks "
        f"({', '.join(THE_REST)}) after it; with --json their files lie beside FILE",
    )
    options = parser.parse_args()
    device = "cpu" if options.driver == "host" else options.driver
    if device != "cpu" and options.shape is None:
        parser.error("--driver wants a --shape: the example's job is the host's")
    if options.all and options.shape is None:
        parser.error("--all wants a --shape; without one, python -m benchmarks runs everything")
    env = environment()
    try:
        if options.shape is None:
            results = of_engine(quick=options.quick)
        else:
            results = of_model(options.shape, device, quick=options.quick, whole=options.all)
    except UserError as error:
        sys.exit(str(error))
    write("finetune", results, env, options.json)
    if options.all and (
        failed := the_rest(options.driver, quick=options.quick, beside=options.json)
    ):
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
