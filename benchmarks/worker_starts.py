"""Time from a job's assignment to its first tasklet, and CPU time of a worker's start.

The built-in engine with the demo's model and the agent are processes as in a pod; this process is
the operator. When the agent has run for a minute, a job is assigned; its figure is the time until
its first tasklet begins. Then the job is aborted, a worker waits again, and the next job is
assigned. The engine serves no request meanwhile.

The CPU time of a start is that of a worker on standby whose input is closed at once: it has loaded
everything but its job, and ends. It is forked from the agent's fork server, or started by exec.

Example: python -m benchmarks.worker_starts --json /tmp/worker-starts.json
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from windrow.eventlog import TaskletEvent, read_events
from windrow.proto import attach_pb2
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR, RunDir
from windrow_sidecar.agent.forking import ForkServer
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.agent.worker_process import WorkerDevices, make_fork_server, start_worker
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

MODEL = ROOT / "models" / "windrow-tiny"
ROWS = ROOT / "examples" / "support-tone" / "train.jsonl"
JOBS, STARTS = 15, 5
AGENT_RUNS_S = 60.0
GOAL_FIRST_TASKLET_S = 1.5
GOAL_FORKED_CPU_S, GOAL_EXEC_CPU_S = 0.5, 5.0


def main() -> int:
    """Measure; print and write the figures."""
    options = arguments(__doc__).parse_args()
    env = environment()
    jobs, starts = (2, 1) if options.quick else (JOBS, STARTS)
    forked, by_exec = asyncio.run(_cpu_of_starts(starts))
    waits = asyncio.run(_first_tasklets(jobs, 5.0 if options.quick else AGENT_RUNS_S))
    cpu_forked, spread_forked = middle(forked)
    cpu_exec, spread_exec = middle(by_exec)
    wait, spread = middle(waits)
    results = [
        Result(
            "job assigned to first tasklet, median",
            round(wait, 3),
            "s",
            "lower",
            goal=GOAL_FIRST_TASKLET_S,
            spread=round(spread, 3),
        ),
        Result("job assigned to first tasklet, longest", round(max(waits), 3), "s", "lower"),
        Result(
            "CPU of a start, forked",
            round(cpu_forked, 3),
            "s",
            "lower",
            goal=GOAL_FORKED_CPU_S,
            spread=round(spread_forked, 3),
            baseline=Baseline("by exec", round(cpu_exec, 3)),
        ),
        Result(
            "CPU of a start, by exec",
            round(cpu_exec, 3),
            "s",
            "lower",
            goal=GOAL_EXEC_CPU_S,
            spread=round(spread_exec, 3),
            baseline=Baseline("import torch alone", round(_cpu_of_torch(starts), 3)),
        ),
    ]
    write("worker-starts", results, env, options.json)
    return 0


async def _cpu_of_starts(n: int) -> tuple[list[float], list[float]]:
    """Return CPU seconds of `n` workers each, forked and by exec, in turns."""
    forked: list[float] = []
    by_exec: list[float] = []
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        settings = AgentSettings(RunDir(Path(name)))
        forks = make_fork_server(settings)
        await forks.ready()
        for _ in range(n):
            forked.append(await _cpu_of_start(settings, forks))
            by_exec.append(await _cpu_of_start(settings, None))
        await forks.close()
    return forked, by_exec


async def _cpu_of_start(settings: AgentSettings, forks: ForkServer | None) -> float:
    words = ["--run-dir", str(settings.run_dir.root), "--standby", "--served-model", str(MODEL)]
    log = settings.run_dir.root / "standby.log"
    before_s = _cpu_of_children_s()
    worker = await start_worker(settings, words, log, devices=WorkerDevices(), forks=forks)
    if code := await worker.wait():
        raise SystemExit(f"a worker ended with {code}:\n{log.read_text(encoding='utf-8')}")
    return _cpu_of_children_s() - before_s


def _cpu_of_torch(n: int) -> float:
    spent = []
    for _ in range(n):
        before_s = _cpu_of_children_s()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        spent.append(_cpu_of_children_s() - before_s)
    return statistics.median(spent)


def _cpu_of_children_s() -> float:
    """Return CPU seconds of children that have been reaped."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def _first_tasklets(jobs: int, agent_runs_s: float) -> list[float]:
    """Return seconds from the assignment of each job to the start of its first tasklet."""
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder, operator = Path(name), AttachedOperator()
        await operator.start()
        try:
            with _pod(folder, operator):
                await until(lambda: any(hello.slots for hello in operator.hellos), 120.0)
                operator.set_policy(
                    name="starts", policy="windrow", mode="harvest", objective_seconds=2.0
                )
                await asyncio.sleep(agent_runs_s)
                waits = []
                for number in range(jobs):
                    await until(lambda: _waits(folder), 120.0)
                    waits.append(await _wait_of(operator, folder, f"job-{number}"))
                return waits
        finally:
            await operator.stop()


def _waits(folder: Path) -> bool:
    """Return whether a worker waits for a job: it sleeps in a read of its input."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            reads = (path / "wchan").read_text(encoding="ascii").endswith("pipe_read")
        except OSError:
            continue
        if reads and b"--standby" in words and str(folder).encode() in words:
            return True
    return False


async def _wait_of(operator: AttachedOperator, folder: Path, uid: str) -> float:
    began_ns = time.monotonic_ns()
    operator.assign(_job(folder), uid=uid)
    start_ns = await until(lambda: _first_tasklet_ns(folder, uid), 120.0)
    operator.command(attach_pb2.JobCommand.ABORT, uid=uid)
    await until(
        lambda: any(event.kind == attach_pb2.JobEvent.STOPPED for event in operator.of(uid)), 60.0
    )
    return (start_ns - began_ns) / 1e9


def _first_tasklet_ns(folder: Path, uid: str) -> int:
    """Return when the job's first tasklet began, in nanoseconds of CLOCK_MONOTONIC; 0: none has."""
    begun = (
        event.start_ns
        for _, event in read_events(folder)
        if isinstance(event, TaskletEvent) and event.job_uid == uid
    )
    return min(begun, default=0)


def _job(folder: Path) -> dict[str, Any]:
    return {
        "model": {"name": str(MODEL)},
        "dataset": {"source": str(ROWS), "format": "chat", "evalFraction": 0.05},
        "adapter": {"type": "lora", "lora": {"rank": 8, "alpha": 16}},
        "training": {"maxSteps": 1000, "batchSize": 4, "maxSequenceLength": 256},
        "output": {"destination": str(folder / "adapters")},
    }


@contextmanager
def _pod(folder: Path, operator: AttachedOperator) -> Iterator[None]:
    (folder / "token").write_text("secret", encoding="ascii")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        ENV_RUN_DIR: str(folder),
        ENV_LOG_DIR: str(folder),
        ENV_POD_NAME: "decode-0",
        "OMP_WAIT_POLICY": "passive",
    }
    programs = (
        ["windrow_sidecar.engines.builtin", f"--model-path={MODEL}", f"--port={port}"],
        [
            "windrow_sidecar.agent",
            f"--operator-address=127.0.0.1:{operator.port}",
            f"--operator-ca={operator.cert.decode()}",
            f"--token-file={folder / 'token'}",
        ],
    )
    with (folder / "pod.log").open("ab") as log:
        running = [
            subprocess.Popen([sys.executable, "-m", *words], env=env, stdout=log, stderr=log)
            for words in programs
        ]
    try:
        yield
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
