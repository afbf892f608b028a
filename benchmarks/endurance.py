"""Growth and drift of a long job: 10,000 steps of a small model, beside a plain peft loop.

Ours is the whole run as a user has it, `worker --standalone`: runner, ledger, event log, metrics,
held-out evaluations and checkpoints between the steps. The loop trains on the same rows in the same
order. Each runs in a process of its own. Memory: the resident set as the run goes on, a line
through it once everything has been touched, and how far that rises; and beside it what the C heap
and Python have handed out and not taken back, which pages that are touched once more do not raise.
Loss: means over a hundred steps, ours against peft's. A plot of both is left beside FILE (.svg).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from benchmarks.engine.drawing import Panel, Points, draw
from benchmarks.harness import (
    DRIVER_HELP,
    ROOT,
    Baseline,
    Result,
    arguments,
    environment,
    write,
)
from windrow.errors import UserError
from windrow_sidecar.compute.finding import find_device

STEPS, EVERY = 10_000, 100
# Evaluations and checkpoints over the whole run, each so often.
BETWEEN = 40
# Allocators and caches fill in the first part of a run; what is asked is whether it ever ends.
SETTLED = 0.2
# Rounding that AdamW enlarges moves single losses; a hundred of them in the mean much less.
DRIFT_GOAL = 0.01


@dataclass(frozen=True, slots=True)
class EnduranceRun:
    """One engine's run.

    Attributes:
        losses: of each step.
        memory: (step, MiB of the resident set or the device), as it went on.
        heap: (seconds, MiB that the C heap has handed out).
        blocks: (seconds, thousands of blocks that Python has).
    """

    losses: list[float]
    memory: Points
    heap: Points = ()
    blocks: Points = ()

    def means(self) -> list[float]:
        """Losses, of each hundred."""
        return [statistics.fmean(self.losses[i : i + EVERY]) for i in range(0, self.steps, EVERY)]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.losses)


def resident_mib(pid: int | str = "self") -> float:
    """Return the resident memory of a process, now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20


def write_job(folder: Path, steps: int) -> Path:
    """A small random Llama, rows of letters, and the job's manifest."""
    import yaml

    from windrow_sidecar.testing.models import save_random_llama

    save_random_llama(folder / "model", num_hidden_layers=2)
    rows = [{"text": f"row {i}: " + "abcdefgh"[i % 8] * (4 + i % 7)} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    often = max(1, steps // BETWEEN)
    spec = {
        "model": {"name": str(folder / "model")},
        "dataset": {"source": str(folder / "rows.jsonl"), "format": "text", "evalFraction": 0.1},
        "adapter": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.0}},
        "training": {
            "maxSteps": steps,
            "batchSize": 2,
            "learningRate": "1e-3",
            "seed": 3,
            "evalEverySteps": often,
        },
        "checkpoint": {"everySteps": often, "keep": 2},
        "output": {"destination": str(folder / "out")},
    }
    manifest: dict[str, Any] = {"apiVersion": "windrow.dev/v1alpha1", "kind": "FinetuneJob"}
    manifest |= {"metadata": {"name": "endurance", "namespace": "bench"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest))
    return folder / "job.yaml"


def run_ours(job_file: Path, device: str) -> EnduranceRun:
    """The worker, to the end of the job; its memory at each word that it says of its progress."""
    notes = job_file.parent / "allocators.jsonl"
    command = [sys.executable, "-m", "benchmarks.engine.accounting", str(notes), "--standalone"]
    command += ["--job", str(job_file), "--device", device]
    command += ["--units", "1"] if device == "cpu" else []
    memory: dict[int, float] = {}
    with subprocess.Popen(command, cwd=ROOT, env=_environ(), stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            step = json.loads(line).get("progress", {}).get("step", 0)
            if step and worker.poll() is None:
                memory[step] = resident_mib(worker.pid)
    if worker.returncode:
        sys.exit(f"the worker ended with {worker.returncode}")
    folder = job_file.parent / "out"
    kept = list(folder.glob(".windrow/*/checkpoints/step-*"))
    if len(kept) != 2 or not (folder / "adapter_model.safetensors").is_file():
        sys.exit(f"the run left {len(kept)} checkpoints and no whole adapter")
    (metrics,) = folder.glob(".windrow/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    if device != "cpu":  # what it holds there, which the host's resident set does not show
        memory = {line["step"]: line["memory_bytes"] / 2**20 for line in steps[::EVERY]}
    noted = [json.loads(line) for line in notes.read_text().splitlines()]
    begun = noted[0][0]
    return EnduranceRun(
        [line["loss"] for line in steps],
        sorted(memory.items()),
        heap=[(at - begun, n_bytes / 2**20) for at, n_bytes, _ in noted],
        blocks=[(at - begun, blocks / 1e3) for at, _, blocks in noted],
    )


def loop_here(job_file: Path, steps: int, device: str) -> EnduranceRun:
    """The plain loop, in this process."""
    from windrow.eventlog import EventLog
    from windrow_sidecar.finetune.job.assembly import read_job
    from windrow_sidecar.finetune.standalone.baseline import PlainLoop

    log = EventLog(job_file.parent / "events.jsonl", source="peft")
    on = find_device(device)
    loop = PlainLoop(read_job(job_file), log, 1, on)
    losses, memory = [0.0] * steps, []
    for number in range(steps):
        losses[number] = loop.step().loss
        if (number + 1) % EVERY == 0:
            held = resident_mib() if device == "cpu" else on.peak_bytes() / 2**20
            memory.append((number + 1, held))
    return EnduranceRun(losses, memory)


def run_loop(job_file: Path, steps: int, device: str) -> EnduranceRun:
    """The same in a process of its own, on one core."""
    command = [sys.executable, "-m", "benchmarks.endurance", "--loop", str(job_file)]
    command += ["--steps", str(steps), "--driver", device]
    done = subprocess.run(command, cwd=ROOT, env=_environ(), check=True, stdout=subprocess.PIPE)
    losses, memory = json.loads(done.stdout.splitlines()[-1])
    return EnduranceRun(losses, [(step, held) for step, held in memory])


def settled(held: Points) -> Points:
    """The part where everything has been touched."""
    return [(at, value) for at, value in held if at >= SETTLED * held[-1][0]]


def growth(held: Points) -> tuple[float, float]:
    """Return how far the line through the settled part rises, and the noise around it.

    Medians (Theil and Sen's line): what is asked is whether memory grows with the steps. A single
    rise is no growth: CPython's table of interned strings doubles once, by 3.7 MiB, wherever names
    of files have left enough traces in it (at step 9,372 of 10,000 or 30,000, and not again).
    """
    points = settled(held)
    slope = statistics.median((d - b) / (c - a) for (a, b), (c, d) in combinations(points, 2))
    level = statistics.median(value - slope * at for at, value in points)
    apart = statistics.median(abs(value - slope * at - level) for at, value in points)
    return slope * (points[-1][0] - points[0][0]), 2 * 1.4826 * apart


def largest_rise(held: Points) -> float:
    """Return the largest rise between two readings of the settled part."""
    return max(after - before for (_, before), (_, after) in pairwise(settled(held)))


def compare(ours: EnduranceRun, theirs: EnduranceRun) -> list[Result]:
    """Growth and drift."""
    our_means, their_means = ours.means(), theirs.means()
    drift = [abs(a - b) / b for a, b in zip(our_means, their_means, strict=True)]
    grown, noise = growth(ours.memory)
    beside = growth(theirs.memory)[0]
    of = f"over {ours.steps:,} steps"
    loop = [Baseline("peft", value) for value in (beside, their_means[-1], their_means[0])]
    return [
        Result(f"growth of memory {of}", grown, "MiB", "lower", _goal(noise), noise, loop[0]),
        Result(f"largest drift of the loss {of}", max(drift), "ratio", "lower", DRIFT_GOAL),
        Result("drift of the loss, last hundred", drift[-1], "ratio", "lower", DRIFT_GOAL),
        Result("loss, last hundred", our_means[-1], "nats", "lower", baseline=loop[1]),
        Result("loss, first hundred", our_means[0], "nats", "lower", baseline=loop[2]),
        Result(f"largest single rise of memory {of}", largest_rise(ours.memory), "MiB", "lower"),
        *_in_use(ours, of),
    ]


def _in_use(ours: EnduranceRun, of: str) -> list[Result]:
    """Return what each part keeps, whatever the resident set says."""
    results = []
    for what, held, unit in (
        ("the C heap has handed out", ours.heap, "MiB"),
        ("Python has handed out", ours.blocks, "thousand blocks"),
    ):
        if held:
            grown, noise = growth(held)
            name = f"growth of what {what} {of}"
            results.append(Result(name, grown, unit, "lower", _goal(noise), noise))
    return results


def _goal(noise: float) -> float:
    """A page more or less is no growth, where the noise is smaller than that."""
    return max(noise, 0.1)


def plot(ours: EnduranceRun, theirs: EnduranceRun, to: Path) -> None:
    """Draw memory and loss of both."""
    runs = {"windrow": ours, "peft": theirs}
    losses = {
        name: [(EVERY * (n + 1), mean) for n, mean in enumerate(ran.means())]
        for name, ran in runs.items()
    }
    panels = [
        Panel("memory above its start, MiB", {name: _above(ran) for name, ran in runs.items()}),
        Panel(f"loss, means of {EVERY} steps, nats", losses),
    ]
    draw(panels, f"{ours.steps:,} steps", to)


def _above(ran: EnduranceRun) -> Points:
    start = ran.memory[0][1]
    return [(step, held - start) for step, held in ran.memory]


def _environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, help=f"how many (default {STEPS})")
    parser.add_argument("--driver", default="host", help=DRIVER_HELP)
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run both, or the loop for the other process."""
    asked = options()
    steps: int = asked.steps or (500 if asked.quick else STEPS)
    try:
        device = find_device(asked.driver).name
    except UserError as error:
        sys.exit(str(error))
    if asked.loop:
        ran = loop_here(asked.loop, steps, device)
        print(json.dumps([ran.losses, ran.memory]))
        return
    env: dict[str, Any] = environment()
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), steps)
        ours, theirs = run_ours(job, device), run_loop(job, steps, device)
    write("endurance", compare(ours, theirs), env, asked.json)
    if asked.json:
        plot(ours, theirs, asked.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
