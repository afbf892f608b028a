"""Trainers: finetune workers without grants, on given cores, which run in turns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.harness import ROOT
from benchmarks.light.processes import Decode, Plan, ProcessEnded, job_of
from windrow.eventlog import StepEvent, TaskletEvent
from windrow_lab.figures.summary import Events
from windrow_lab.machine.devices import on_cpus

# Imports of a worker in the idle class, beside others.
_READY_WITHIN_S = 120.0
# A trainer writes its events at the end of each optimizer step.
_FOR_EVER, _TOLD_WITHIN_S = "1e6", 60.0
ROWS, ROW_TOKENS = 7, 128  # 896 tokens, as a worker beside decode takes at a time


class Trainer:
    """A process of the idle class that trains; stopped until it has its turn.

    Args:
        plan: model, job and folder.
        name: of its folder.
        cpus: that it starts on.
        threads: that compute.
        floats: whether the system may move it between the cores; else one thread has the last.
    """

    def __init__(
        self, plan: Plan, name: str, cpus: Sequence[int], threads: int, *, floats: bool = False
    ) -> None:
        self._folder = plan.folder / name
        self._folder.mkdir(parents=True)
        self._log = self._folder / "worker.log"
        job = self._folder / "job.json"
        job.write_text(json.dumps(job_of(plan)))
        command = [sys.executable, "-m", "windrow_sidecar.agent.spawn", str(os.getpid()), "--"]
        command += [sys.executable, "-m", "windrow_sidecar.finetune.worker", "--standalone"]
        command += ["--job", str(job), "--seconds", _FOR_EVER, "--log-dir", str(self._folder)]
        command += ["--random-weights", "1", "--units", str(threads)]
        with self._log.open("ab") as log, on_cpus(cpus):
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=plan.environ, stdout=log, stderr=log
            )
        self._float_over = list(cpus) if floats else []

    def await_first_step(self) -> None:
        """Return once it has trained a step; it is stopped then. Raises ProcessEnded."""
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self.tasklets():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ProcessEnded("a trainer does not train", self._log)
            time.sleep(0.5)
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            if self._float_over:
                os.sched_setaffinity(int(thread.name), self._float_over)
        self.stop()

    def go(self) -> None:
        """Train."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Stand still."""
        self._process.send_signal(signal.SIGSTOP)

    def tasklets(self) -> list[TaskletEvent]:
        """Return what it has run, in order, without the step that is under way."""
        return Events.read(self._folder).tasklets

    def all_tasklets(self) -> list[TaskletEvent]:
        """Return what it has run up to now; it trains on until then. Raises ProcessEnded."""
        now_ns, deadline = time.monotonic_ns(), time.monotonic() + _TOLD_WITHIN_S
        with at_work([self]):
            while (ran := self.tasklets())[-1].end_ns < now_ns:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise ProcessEnded("a trainer does not go on", self._log)
                time.sleep(0.2)
        return ran

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class TakesTurns(Protocol):
    """Part that runs and pauses in turns."""

    def go(self) -> None:
        """Go on."""

    def stop(self) -> None:
        """Stand still."""


@contextlib.contextmanager
def at_work(trainers: Sequence[TakesTurns]) -> Iterator[None]:
    """Let these run meanwhile."""
    for trainer in trainers:
        trainer.go()
    try:
        yield
    finally:
        for trainer in trainers:
            trainer.stop()


def two_cores() -> list[int]:
    """Confine this process to two cores, decode's and a trainer's; it ends where there is one."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("decode and a trainer need a core each: this process has one")
    os.sched_setaffinity(0, cores)
    return cores


@contextlib.contextmanager
def decoding(
    *, arena_bytes: int, max_batch: int
) -> Iterator[tuple[Plan, Decode, contextlib.ExitStack]]:
    """Run decode in a process of its own until the block ends; yield its plan for trainers.

    What is put on the stack ends before decode does.
    """
    with tempfile.TemporaryDirectory(prefix="wr-") as name, contextlib.ExitStack() as ends:
        plan = plan_of(Path(name), arena_bytes=arena_bytes, max_batch=max_batch)
        decode = Decode(plan)
        ends.callback(decode.close)
        yield plan, decode, ends


def tokens_between(tasklets: Sequence[TaskletEvent], begin_ns: int, end_ns: int) -> float:
    """Tokens trained between two moments: each layer's forward or backward counts in part."""
    layers = 1 + max((t.layer for t in tasklets if t.phase == "bwd"), default=0)
    return sum(
        t.tokens * share_within(t, begin_ns, end_ns) / (2 * layers)
        for t in tasklets
        if t.phase in ("fwd", "bwd")
    )


def share_within(event: StepEvent | TaskletEvent, begin_ns: int, end_ns: int) -> float:
    """Return the share of an event's time between two moments."""
    within = min(end_ns, event.end_ns) - max(begin_ns, event.start_ns)
    return max(0, within) / max(1, event.end_ns - event.start_ns)


def plan_of(folder: Path, *, arena_bytes: int, max_batch: int) -> Plan:
    """The demo's model on the host, and a job of one micro-batch a step, so that steps are many."""
    return Plan.of(
        folder,
        "tiny",
        row_tokens=ROW_TOKENS,
        rows_a_step=ROWS,
        rank=8,
        device="cpu",
        arena_bytes=arena_bytes,
        max_batch=max_batch,
    )
