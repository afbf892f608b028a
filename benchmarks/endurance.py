"""Whether a long job grows or drifts: 10,000 steps of a small model, beside a plain peft loop.

Each runs in a process of its own over the same rows in the same order. Memory: the resident set
every hundred steps once everything has been touched, a line through it, and how far that rises.
Loss: means over a hundred steps, ours against peft's.
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
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, write

STEPS, EVERY = 10_000, 100
# Allocators and caches fill in the first part of a run; what is asked is whether it ever ends.
SETTLED = 0.2
ENGINES = ("windrow", "peft")
# Rounding that AdamW enlarges moves single losses; a hundred of them in the mean much less.
DRIFT_GOAL = 0.01


def resident_mib() -> float:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20


def write_job(folder: Path, steps: int) -> Path:
    """A small random Llama, rows of letters, and the job's manifest."""
    import yaml

    from windrow_sidecar.testing.models import save_random_llama

    save_random_llama(folder / "model", num_hidden_layers=2)
    rows = [{"text": f"row {i}: " + "abcdefgh"[i % 8] * (4 + i % 7)} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "model": {"name": str(folder / "model")},
        "dataset": {"source": str(folder / "rows.jsonl"), "format": "text", "evalFraction": 0},
        "adapter": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.0}},
        "training": {"maxSteps": steps, "batchSize": 2, "learningRate": "1e-3", "seed": 3},
        "output": {"destination": str(folder / "out")},
    }
    manifest: dict[str, Any] = {"apiVersion": "windrow.dev/v1alpha1", "kind": "FinetuneJob"}
    manifest |= {"metadata": {"name": "endurance", "namespace": "bench"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(manifest))
    return folder / "job.yaml"


def stepper(engine: str, job_file: Path) -> Callable[[], float]:
    """One optimizer step of an engine at a call; returns its loss."""
    from windrow.eventlog import EventLog
    from windrow_sidecar.compute.host_device import HostDevice
    from windrow_sidecar.finetune.alone.baseline import PlainLoop
    from windrow_sidecar.finetune.alone.dedicated import open_alone
    from windrow_sidecar.finetune.job import read_job
    from windrow_sidecar.finetune.stream import StepDone

    job = read_job(job_file)
    if engine == "peft":
        log = EventLog(job_file.parent / "events.jsonl", source="peft")
        loop = PlainLoop(job, log, 1, HostDevice())
        return lambda: loop.step().loss
    stream = open_alone(job).stream

    def step() -> float:
        while True:
            tasklet = stream.peek()
            assert tasklet is not None
            outcome = stream.run(tasklet)
            if isinstance(outcome, StepDone):
                return outcome.position.loss or 0.0

    return step


def run_here(engine: str, job_file: Path, steps: int) -> dict[str, list[float]]:
    """Losses of all steps, and the resident set after every hundredth."""
    step = stepper(engine, job_file)
    # Made before, so that the books are not what grows.
    losses, resident = array("d", bytes(8 * steps)), array("d", bytes(8 * (steps // EVERY)))
    for number in range(steps):
        losses[number] = step()
        if (number + 1) % EVERY == 0:
            resident[number // EVERY] = resident_mib()
    return {"losses": losses.tolist(), "resident": resident.tolist()}


def run_apart(engine: str, job_file: Path, steps: int) -> dict[str, list[float]]:
    """The same in a process of its own, on one core."""
    command = [sys.executable, "-m", "benchmarks.endurance", "--engine", engine]
    command += ["--job", str(job_file), "--steps", str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.PIPE)
    ran: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return ran


def growth_mib(resident: list[float]) -> tuple[float, float]:
    """How far the line through the settled part rises, and the noise around it, both in MiB."""
    settled = resident[int(len(resident) * SETTLED) :]
    line = statistics.linear_regression(range(len(settled)), settled)
    apart = [y - line.slope * x - line.intercept for x, y in enumerate(settled)]
    return line.slope * len(settled), 2 * statistics.pstdev(apart)


def means(losses: list[float]) -> list[float]:
    """Of each hundred."""
    return [statistics.fmean(losses[i : i + EVERY]) for i in range(0, len(losses), EVERY)]


def compare(ran: dict[str, dict[str, list[float]]], steps: int) -> list[Result]:
    """Growth and drift."""
    ours, theirs = means(ran["windrow"]["losses"]), means(ran["peft"]["losses"])
    drift = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    grown, noise = growth_mib(ran["windrow"]["resident"])
    beside = growth_mib(ran["peft"]["resident"])[0]
    # A page more or less is no growth, where the noise is smaller than that.
    goal = max(noise, 0.1)
    of = f"over {steps:,} steps"
    return [
        Result(
            f"growth of memory {of}", grown, "MiB", "lower", goal, noise, Baseline("peft", beside)
        ),
        Result(f"largest drift of the loss {of}", max(drift), "ratio", "lower", DRIFT_GOAL),
        Result("drift of the loss, last hundred", drift[-1], "ratio", "lower", DRIFT_GOAL),
        Result(
            "loss, last hundred",
            ours[-1],
            "nats",
            "lower",
            None,
            None,
            Baseline("peft", theirs[-1]),
        ),
        Result(
            "loss, first hundred", ours[0], "nats", "lower", None, None, Baseline("peft", theirs[0])
        ),
    ]


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, help=f"how many (default {STEPS})")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run both, or one of them for the other process."""
    asked = options()
    steps: int = asked.steps or (500 if asked.quick else STEPS)
    if asked.engine:
        print(json.dumps(run_here(asked.engine, asked.job, steps)))
        return
    env: dict[str, Any] = environment()
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder), steps)
        ran = {engine: run_apart(engine, job, steps) for engine in ENGINES}
    write("endurance", compare(ran, steps), env, asked.json)


if __name__ == "__main__":
    main()
