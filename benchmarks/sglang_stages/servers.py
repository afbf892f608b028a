"""Start SGLang stock, with the plugin, and the sidecar beside it; end them by their own ids."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.sglang_stages.streams import Heard, ask, is_up
from windrow.eventlog import StepEvent, TaskletEvent, read_events
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR
from windrow_sidecar.testing.attached_operator import AttachedOperator

_TROUBLE = re.compile(
    r"harvesting is off|Traceback|Scheduler hit|[A-Z]\w*Error\b|CUDA error|out of memory|FAILED"
)


class StageFailed(RuntimeError):
    """A stage did not show what it is for; with the lines of logs that say why.

    Attributes:
        lines: of each: the log, the number of the line from 1, and its text.
    """

    def __init__(self, why: str, logs: Iterable[Path]) -> None:
        self.lines = [line for log in logs for line in trouble_in(log)]
        super().__init__(why)


def trouble_in(log: Path, most: int = 3) -> list[dict[str, Any]]:
    """Return the last lines of a log that report an error; its last line where none does."""
    if not log.exists():
        return []
    lines, harmless, found = log.read_text(errors="replace").splitlines(), False, []
    for n, text in enumerate(lines):
        # Without a warm-up SGLang may ask itself before it listens; it serves all the same.
        if text.startswith("["):
            harmless = "post-warmup freeze_gc failed" in text
        if not harmless and _TROUBLE.search(text):
            found.append(n)
    found = found or [len(lines) - 1]
    return [
        {"log": log.name, "line": n + 1, "text": lines[n][:300]} for n in found[-most:] if n >= 0
    ]


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Bench:
    """Surroundings that every stage runs in.

    Attributes:
        python: of the environment that has SGLang.
        model: a checkpoint.
        device: "cuda", or "cpu" to see that everything runs.
        out: for logs and JSON.
        requests, context, generate: of the load: in flight, tokens of a prompt and of an answer.
        kv_tokens: of the arena.
        row_tokens: of the job's rows.
        seconds, lead_s: of a measured load, and of what is not counted before.
        up_within_s: for a server's start.
        patience: by how much longer all that is waited for may take.
        server_options: more of SGLang's.
    """

    python: Path
    model: Path
    device: str
    out: Path
    requests: int
    context: int
    generate: int
    kv_tokens: int
    row_tokens: int
    seconds: float
    lead_s: float
    up_within_s: float
    server_options: tuple[str, ...] = ()
    patience: float = 1.0

    @property
    def load(self) -> dict[str, Any]:
        """The arguments of `streams.play` for this load."""
        return {
            "requests": self.requests,
            "context": self.context,
            "generate": self.generate,
            "lead_s": self.lead_s,
            "seconds": self.seconds,
        }

    def words(self, port: int) -> list[str]:
        """Return the command line of a decode instance."""
        options = [
            f"--model-path={self.model}",
            f"--port={port}",
            f"--device={self.device}",
            "--host=127.0.0.1",
            "--page-size=16",
            "--disaggregation-mode=decode",
            "--disaggregation-transfer-backend=fake",
            "--disaggregation-decode-retraction-backup=cpu_tensor",
            f"--max-running-requests={self.requests}",
            f"--max-total-tokens={self.kv_tokens}",
            "--num-reserved-decode-tokens=64",
            f"--context-length={self.context + self.generate + 64}",
            "--disable-radix-cache",
            "--sampling-backend=pytorch",
            "--stream-interval=1",
            "--random-seed=1",
            "--skip-server-warmup",
            *self.server_options,
        ]
        if self.device == "cpu":
            options += ["--dtype=float32", "--attention-backend=torch_native"]
            options += ["--disable-cuda-graph", "--sleep-on-idle"]
        return [str(self.python), "-m", "sglang.launch_server", *options]


@dataclass
class Process:
    """A process with a group and a log of its own."""

    log: Path
    popen: subprocess.Popen[bytes]

    @classmethod
    def start(cls, log: Path, words: list[str], environment: Mapping[str, str]) -> Process:
        """Start it; what it says is added to the log."""
        with log.open("ab") as out:
            popen = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
            )
        return cls(log, popen)

    @property
    def lives(self) -> bool:
        """True while it runs."""
        return self.popen.poll() is None

    def end(self, within_s: float = 15.0) -> None:
        """Ask it to end, then kill its group."""
        if self.lives:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(within_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def says(self, text: str) -> bool:
        """Return whether its log has the text."""
        return text in self.log.read_text(errors="replace")


@dataclass
class Pod:
    """One server, and with the plugin its sidecar and the operator that this process plays."""

    bench: Bench
    name: str
    server: Process
    port: int
    run_dir: Path | None = None
    agent: Process | None = None
    operator: AttachedOperator = field(default_factory=AttachedOperator)
    assigned: bool = False

    @classmethod
    async def start(
        cls,
        bench: Bench,
        name: str,
        *options: str,
        plugin: bool,
        environment: Mapping[str, str] | None = None,
    ) -> Pod:
        """Start it and wait until it serves. Raises StageFailed."""
        port, env = free_port(), {"SGLANG_USE_CPU_ENGINE": "1"} if bench.device == "cpu" else {}
        env |= environment or {}
        log = bench.out / f"{name}.log"
        # What an earlier start left there explains no failure of this one.
        for old in (log, bench.out / f"{name}-agent.log"):
            old.unlink(missing_ok=True)
        run_dir: Path | None = None
        words = [*bench.words(port), *options]
        operator = AttachedOperator()
        if plugin:
            run_dir = bench.out / f"run-{name}"
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.mkdir(parents=True)
            env |= {ENV_RUN_DIR: str(run_dir), ENV_LOG_DIR: str(run_dir), ENV_POD_NAME: "decode-0"}
            await operator.start()
        pod = cls(bench, name, Process.start(log, words, env), port, run_dir, operator=operator)
        try:
            if run_dir is not None:
                pod.agent = _start_agent(bench, name, run_dir, operator)
            await pod.until(lambda: is_up_now(pod), bench.up_within_s, "the server is up")
            pod.require_lending()
            await pod.first_answer()
        except BaseException:
            await pod.close()
            raise
        return pod

    @property
    def lives(self) -> bool:
        """True while its server runs."""
        return self.server.lives

    @property
    def logs(self) -> list[Path]:
        """Logs of its processes, and of workers."""
        workers = [*self.run_dir.rglob("worker*.log")] if self.run_dir else []
        return [self.server.log, *([self.agent.log] if self.agent else []), *workers]

    def failed(self, why: str) -> StageFailed:
        """Return the error with the lines that say why."""
        return StageFailed(why, self.logs)

    def require_lending(self) -> None:
        """Raise StageFailed where the plugin is to lend and does not."""
        if self.run_dir is not None and not self.server.says("can be lent"):
            raise self.failed("the plugin lends nothing")

    async def first_answer(self) -> None:
        """Have one request answered: SGLang compiles kernels when they are first called.

        Raises StageFailed where it is refused, or takes longer than a server's start may.
        """
        heard = Heard()
        asked = asyncio.create_task(ask(self.port, heard, context=32, generate=16, seed=1))
        try:
            await self.until(asked.done, self.bench.up_within_s, "the first answer is whole")
            await asked
        except (RuntimeError, OSError) as error:
            if isinstance(error, StageFailed):
                raise
            raise self.failed(f"the first request failed: {error}") from error
        finally:
            asked.cancel()

    async def until(self, condition: Callable[[], Any], within_s: float, what: str) -> None:
        """Wait for a condition. Raises StageFailed where it does not come, or the server ends."""
        within_s *= self.bench.patience
        end_s = time.monotonic() + within_s
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            if not self.server.lives:
                raise self.failed(f"the server ended with {self.server.popen.returncode}: {what}")
            if time.monotonic() > end_s:
                raise self.failed(f"not within {within_s:.0f} s: {what}")
            await asyncio.sleep(0.25)

    def harvest(self, objective_ms: float) -> None:
        """Have a policy with that objective in force."""
        self.operator.set_policy(
            name="chat",
            policy="windrow",
            mode="harvest",
            objective_seconds=objective_ms / 1000,
            percentile=99,
        )

    def events(self, begin_s: float, end_s: float) -> tuple[list[StepEvent], list[TaskletEvent]]:
        """Return the decode steps and tasklets that began in that time (CLOCK_MONOTONIC)."""
        assert self.run_dir is not None
        found = [event for _, event in read_events(self.run_dir)]
        within = (begin_s * 1e9, end_s * 1e9)
        steps = [e for e in found if isinstance(e, StepEvent)]
        tasklets = [e for e in found if isinstance(e, TaskletEvent)]
        return (
            [e for e in steps if within[0] <= e.start_ns < within[1]],
            [e for e in tasklets if within[0] <= e.start_ns < within[1]],
        )

    async def close(self) -> None:
        """End the sidecar first: it ends the worker's GPU work before it kills the worker."""
        if self.agent is not None:
            self.agent.end(30)
        self.server.end()
        if self.run_dir is not None:
            await self.operator.stop()


async def is_up_now(pod: Pod) -> bool:
    """Return whether the pod's server answers."""
    return await is_up(pod.port)


def _start_agent(bench: Bench, name: str, run_dir: Path, operator: AttachedOperator) -> Process:
    (run_dir / "token").write_text("secret")
    words = [sys.executable, "-m", "windrow_sidecar.agent"]
    words += [f"--operator-address=127.0.0.1:{operator.port}", f"--token-file={run_dir / 'token'}"]
    words += [f"--operator-ca={operator.cert.decode()}"]
    env = {ENV_RUN_DIR: str(run_dir), ENV_LOG_DIR: str(run_dir), ENV_POD_NAME: "decode-0"}
    return Process.start(bench.out / f"{name}-agent.log", words, env)
