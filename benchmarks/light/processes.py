"""The processes of first light: decode, the worker beside it or alone, and MPS on a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from benchmarks.harness import ROOT
from benchmarks.shapes import write_shape
from windrow.errors import WindrowError
from windrow.eventlog import TaskletEvent
from windrow.proto import agent_pb2, agent_pb2_grpc
from windrow.rundir import ENV_LOG_DIR, RunDir
from windrow_lab.figures.summary import Events, SummaryWindow, throughput
from windrow_sidecar.compute.mps import MpsDaemon

UID, EPOCH = "first-light", 1
# Loading an 8B model and its libraries, with everything compiled for the first time.
_READY_WITHIN_S = 300.0
# Between commands decode ends with its input, and leaves nothing running on a GPU.
_ENDS_BY_ITSELF_S = 5.0
_ROWS = 64
_FLUSHED_S = 1.5  # the worker writes its events once a second


class ProcessEnded(RuntimeError):
    """One of the processes ended, or is not ready in time; with the end of its log."""

    def __init__(self, what: str, log: Path) -> None:
        text = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        super().__init__(f"{what}; the end of {log}:\n{text}")


@dataclass(frozen=True)
class Plan:
    """Plan that all processes share.

    Attributes:
        folder: logs, run directory and jobs go there; a short path, for sockets lie in it.
        model: a model directory without weights.
        device: "cpu", "cuda:0".
        job: a FinetuneJob spec.
        arena_bytes, max_batch: of decode.
        kv_tokens: that its load takes at most, which the benchmark's own arms never lend.
        all_threads: decode computes on each of its cores, also where that gains little (host).
        environment: that decode and worker get besides this process's own.
    """

    folder: Path
    model: Path
    device: str
    job: Mapping[str, Any]
    arena_bytes: int
    max_batch: int
    kv_tokens: int = 0
    all_threads: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        folder: Path,
        shape: str,
        *,
        row_tokens: int,
        rows_a_step: int,
        rank: int = 16,
        **more: Any,
    ) -> Plan:
        """Return the plan of a model of that shape, and an endless job over rows of equal length.

        `more`: the other attributes.
        """
        model = write_shape(folder / "model", shape)
        job = {
            "model": {"name": str(model)},
            "dataset": {
                "source": str(_text_rows(folder, row_tokens)),
                "format": "text",
                "evalFraction": 0.0,
            },
            "adapter": {"lora": {"rank": rank, "alpha": 2 * rank, "targetModules": "all-linear"}},
            "training": {
                "maxSteps": 1_000_000,
                "batchSize": rows_a_step,
                "maxSequenceLength": row_tokens,
                "learningRate": "1e-4",
            },
            "checkpoint": {"everySteps": 1_000_000, "keep": 1},
            "output": {"destination": str(folder / "out")},
        }
        return cls(folder=folder, model=model, job=job, **more)

    @property
    def run_dir(self) -> RunDir:
        """Run directory of the pod."""
        return RunDir(self.folder)

    @property
    def environ(self) -> dict[str, str]:
        """Environment of every process."""
        return {**os.environ, **self.environment}


@contextlib.contextmanager
def mps(folder: Path, *, wanted: bool) -> Iterator[tuple[dict[str, str], str]]:
    """A private MPS daemon where one is wanted: its environment, and why there is none."""
    if not wanted:
        yield {}, "not wanted on the host"
        return
    daemon = MpsDaemon(folder / "mps")
    try:
        daemon.start()
    except WindrowError as error:
        yield {}, str(error)
        return
    try:
        yield daemon.environment, ""
    finally:
        daemon.stop()


class Decode:
    """The decode process, and its answers."""

    def __init__(self, plan: Plan) -> None:
        self._log = plan.folder / "decode.log"
        command = [sys.executable, "-m", "benchmarks.light.decode"]
        command += [f"--run-dir={plan.folder}", f"--model={plan.model}", f"--device={plan.device}"]
        command += [f"--arena-bytes={plan.arena_bytes}", f"--max-batch={plan.max_batch}"]
        command += [f"--kv-tokens={plan.kv_tokens}"]
        if plan.all_threads:
            command.append("--all-threads")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=plan.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.facts: dict[str, Any] = self._read()

    def run(self, **command: Any) -> dict[str, Any]:
        """Have one command carried out; its answer.

        Raises:
            ProcessEnded: decode has ended over it.
        """
        self.send(**command)
        return self.answer()

    def send(self, **command: Any) -> None:
        """Give a command; `answer` waits for its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return what the last command found. Raises ProcessEnded."""
        return self._read()

    def close(self) -> None:
        """End it, by the end of its input where it waits for a command."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_BY_ITSELF_S)
        _end(self._process)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise ProcessEnded("decode ended", self._log)
        found: dict[str, Any] = json.loads(line)
        return found


class _Agent(agent_pb2_grpc.AgentServicer):
    """Agent of the worker; commands nothing, and writes what happens to its log."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def Worker(self, request_iterator: Any, context: Any) -> Iterator[agent_pb2.WorkerCommand]:
        del context
        with contextlib.suppress(grpc.RpcError):
            for report in request_iterator:
                if report.WhichOneof("message") == "event":
                    event = report.event
                    with self._log.open("a") as log:
                        log.write(f"{event.kind} {event.reason} {event.detail}\n")
        yield from ()


class Worker:
    """The worker beside decode."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._log = plan, plan.folder / "worker.log"
        self._agent = grpc.server(futures.ThreadPoolExecutor(2))
        agent_pb2_grpc.add_AgentServicer_to_server(  # type: ignore[no-untyped-call]
            _Agent(self._log), self._agent
        )
        self._agent.add_insecure_port(f"unix:{plan.run_dir.agent_socket}")
        self._agent.start()
        folder = plan.run_dir.job_dir(UID)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps(job_of(plan)))
        # As the agent starts it: of the idle class, and it ends with its parent.
        command = [sys.executable, "-m", "windrow_sidecar.agent.spawn", str(os.getpid()), "--"]
        command += [sys.executable, "-m", "windrow_sidecar.finetune.worker"]
        command += ["--run-dir", str(plan.folder), "--job-uid", UID, "--epoch", str(EPOCH)]
        self._events = plan.folder / "worker-events"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**plan.environ, ENV_LOG_DIR: str(self._events)},
                stdout=log,
                stderr=log,
            )

    def await_offer(self, decode: Decode) -> None:
        """Return once it is loaded and offers a tasklet: on a GPU it loads into what decode lends.

        Raises ProcessEnded.
        """
        deadline = time.monotonic() + _READY_WITHIN_S
        while not decode.run(do="offer")["tokens"]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ProcessEnded("the worker offers nothing", self._log)
            time.sleep(0.25)

    def done_within(self, begin_ns: int, end_ns: int) -> dict[str, Any]:
        """Return what it got done between two moments (CLOCK_MONOTONIC). Raises ProcessEnded.

        Its rate is that between its first and its last optimizer step in there: 0 where fewer than
        two of them are. Besides, tasklets by phase: their time, that of queueing, tokens, units.
        """
        time.sleep(_FLUSHED_S)
        if self._process.poll() is not None:
            raise ProcessEnded("the worker ended", self._log)
        window = SummaryWindow(begin_ns, end_ns, 0.0, end_ns)
        tasklets = Events.read(self._events).tasklets
        by_phase: dict[str, list[TaskletEvent]] = defaultdict(list)
        for t in tasklets:
            if window.holds(t.end_ns):
                by_phase[t.phase].append(t)
        done = throughput(tasklets, window)
        return {
            "tokens_per_second": done.tokens_per_second,
            "optimizer_steps": done.steps,
            "tasklets": {
                phase: {
                    "count": len(ran),
                    "median_ms": statistics.median(_ms(t) for t in ran),
                    "sum_ms": sum(map(_ms, ran)),
                    "median_tokens": statistics.median(t.tokens for t in ran),
                    "median_queued_ms": statistics.median(t.queued_ns for t in ran) / 1e6,
                    "median_units": statistics.median(t.units for t in ran),
                }
                for phase, ran in by_phase.items()
            },
        }

    def close(self) -> None:
        """End it."""
        _end(self._process)
        self._agent.stop(0).wait()


def _ms(tasklet: TaskletEvent) -> float:
    return (tasklet.end_ns - tasklet.start_ns) / 1e6


def train_alone(plan: Plan, name: str, seconds: float) -> Events:
    """Run the same worker and job standalone for so long; what it did. Raises ProcessEnded."""
    folder = plan.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    job, log = folder / "job.json", folder / "worker.log"
    job.write_text(json.dumps(job_of(plan)))
    command = [sys.executable, "-m", "windrow_sidecar.finetune.worker", "--standalone"]
    command += ["--job", str(job), "--seconds", f"{seconds:g}", "--log-dir", str(folder)]
    command += ["--device", plan.device, "--random-weights", "1"]
    with log.open("ab") as out:
        status = subprocess.run(
            command, cwd=ROOT, env=plan.environ, stdout=out, stderr=out, check=False
        ).returncode
    if status:
        raise ProcessEnded(f"the worker alone ended with status {status}", log)
    return Events.read(folder)


def _text_rows(folder: Path, tokens: int) -> Path:
    """Write rows of letters that are longer than any row may be: all are cut to the same length."""
    path = folder / "rows.jsonl"
    letters = "the quick brown fox jumps over the lazy dog "
    with path.open("w") as out:
        for row in range(_ROWS):
            text = (letters[row % len(letters) :] + letters) * (tokens // len(letters) + 2)
            out.write(json.dumps({"text": text[: tokens + 8]}) + "\n")
    return path


def keep_logs(folder: Path, to: Path) -> None:
    """Copy the logs of all processes."""
    to.mkdir(parents=True, exist_ok=True)
    for log in (*folder.glob("*.log"), *folder.glob("*/worker.log")):
        shutil.copyfile(log, to / "-".join(log.relative_to(folder).parts))


def job_of(plan: Plan) -> dict[str, Any]:
    """Return the job as a worker reads it."""
    return {
        "namespace": "default",
        "name": UID,
        "uid": UID,
        "epoch": EPOCH,
        "spec": dict(plan.job),
    }


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
