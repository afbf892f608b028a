"""Effect on decode, and on the job that trains beside it, of making a further job ready.

A decode server under the demo's load, its sidecar, and a worker that trains one job, in blocks of
time that alternate: as it is, and while a second job's rows are read, of which there are too many
for a block. Steps are compared by batch. Needs no cluster.
Example: python -m benchmarks.joining --json /tmp/joining.json
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.disturbance import block, engine, ratios
from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from windrow.eventlog import StepEvent
from windrow.proto import attach_pb2
from windrow.rundir import ENV_RUN_DIR
from windrow_lab.machine.devices import bystanders, devices, on_cpus, usable_cores
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

MODEL = ROOT / "models" / "windrow-tiny"
ROWS = ROOT / "examples" / "support-tone" / "train.jsonl"
COPIES = 2000  # of the example's rows: more than a process reads in a block
OBJECTIVE_S = 0.03
GOAL_PERCENT = 5.0
WITHIN_S = 120.0
FIRST, FURTHER = "trains", "joins"


@dataclass(frozen=True)
class Block:
    """Measurements of a block of time."""

    steps: list[StepEvent]
    tpot_ms: list[float]  # of each answer
    trained_tokens_s: float


def main() -> None:
    """Run, compare, write."""
    options = arguments(__doc__).parse_args()
    env = environment()
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        pairs = asyncio.run(_pairs(Path(name), 1 if options.quick else 4))
    write("joining", _results(pairs), env, options.json)


async def _pairs(folder: Path, n: int) -> list[tuple[Block, Block]]:
    """Blocks without and with a job that is made ready, one after the other."""
    many = folder / "many.jsonl"
    many.write_text(ROWS.read_text() * COPIES)
    with engine(folder, **{ENV_RUN_DIR: str(folder)}) as endpoint:
        async with _sidecar(folder) as operator:
            operator.assign(_job(folder / FIRST, ROWS), FIRST)
            await until(lambda: _tokens(operator) > 0, WITHIN_S)
            pairs = []
            for epoch in range(1, n + 1):
                before = await _block(endpoint, folder, operator)
                operator.assign(_job(folder / FURTHER, many), FURTHER, epoch)
                await until(lambda: len(operator.heartbeats[-1].jobs) == 2)
                during = await _block(endpoint, folder, operator)
                if "STARTED" in operator.kinds(FURTHER):
                    raise SystemExit("the rows were read before the block was over: too few")
                operator.command(attach_pb2.JobCommand.STOP, FURTHER, epoch)
                stops = partial(_stops, operator, epoch)
                await until(stops, WITHIN_S)
                pairs.append((before, during))
            return pairs


@contextlib.asynccontextmanager
async def _sidecar(folder: Path) -> AsyncIterator[AttachedOperator]:
    """The pod's agent, attached to an operator that only assigns."""
    operator = AttachedOperator()
    await operator.start()
    (folder / "token").write_text("a-token\n")
    agent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "windrow_sidecar.agent", f"--run-dir={folder}"),
        f"--operator-address=127.0.0.1:{operator.port}",
        f"--operator-ca={operator.cert.decode()}",
        f"--token-file={folder / 'token'}",
        *("--pod-namespace=default", "--pod-name=decode-0", "--pod-uid=decode-0"),
        *("--grace-seconds=10", "--no-standby"),
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ,
    )
    try:
        await until(lambda: operator.has_engine, WITHIN_S)
        operator.set_policy(
            name="joining",
            policy="windrow",
            mode="harvest",
            objective_seconds=OBJECTIVE_S,
            percentile=99,
        )
        yield operator
    finally:
        agent.terminate()
        await agent.wait()
        await operator.stop()


def _job(out: Path, rows: Path) -> dict[str, Any]:
    return {
        "model": {"name": str(MODEL)},
        "dataset": {"source": str(rows)},
        "adapter": {"lora": {"rank": 8}},
        "training": {"maxSteps": 100_000, "batchSize": 4, "maxSequenceLength": 256},
        "output": {"destination": str(out)},
    }


def _stops(operator: AttachedOperator, times: int) -> bool:
    return operator.kinds(FURTHER).count("STOPPED") == times


async def _block(endpoint: str, folder: Path, operator: AttachedOperator) -> Block:
    others = bystanders(devices(usable_cores()))
    done, began_s = _tokens(operator), time.monotonic()
    steps = await asyncio.to_thread(_loaded, endpoint, folder, others)
    rate = (_tokens(operator) - done) / (time.monotonic() - began_s)
    answers = json.loads((folder / "load.json").read_text())
    return Block(steps, [1000 * a["tpot_s"] for a in answers if a["tpot_s"]], rate)


def _loaded(endpoint: str, folder: Path, others: list[int]) -> list[StepEvent]:
    with on_cpus(others):
        return block(endpoint, folder)


def _tokens(operator: AttachedOperator) -> int:
    """Return the tokens that the first job has trained on, as of the last heartbeat."""
    found = (job for beat in operator.heartbeats[-1:] for job in beat.jobs)
    return next((int(job.progress.tokens) for job in found if job.job_uid == FIRST), 0)


def _results(pairs: list[tuple[Block, Block]]) -> list[Result]:
    slower = [100 * (r - 1) for a, b in pairs for r in ratios(a.steps, b.steps)]
    step, step_spread = middle(slower)
    kept, kept_spread = middle([b.trained_tokens_s / a.trained_tokens_s for a, b in pairs])

    def tpot(which: int, of: Callable[[list[float]], float]) -> float:
        return round(of([ms for pair in pairs for ms in pair[which].tpot_ms]), 2)

    return [
        Result(
            "step while a further job's rows are read, against before, at equal batch",
            round(step, 2),
            "%",
            "lower",
            GOAL_PERCENT,
            round(step_spread, 2),
        ),
        *(
            Result(
                f"TPOT meanwhile, {name}",
                tpot(1, of),
                "ms",
                "lower",
                1000 * OBJECTIVE_S if name == "p99" else None,
                baseline=Baseline("before, ms", tpot(0, of)),
            )
            for name, of in (("p50", statistics.median), ("p99", _p99))
        ),
        Result(
            "tokens/s of the job that trains meanwhile, of those before",
            round(kept, 3),
            "ratio",
            "higher",
            None,
            round(kept_spread, 3),
            Baseline(
                "before, tokens/s",
                round(statistics.median(a.trained_tokens_s for a, _ in pairs), 1),
            ),
        ),
    ]


def _p99(of: list[float]) -> float:
    return sorted(of)[int(0.99 * (len(of) - 1))]


if __name__ == "__main__":
    main()
