"""The processes that a run measures with: the load client, and the worker alone on the device."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from windrow.eventlog import EventLog
from windrow.local.devices import Device
from windrow.local.processes import Child, Keeper, ProcessCommand
from windrow.local.serving import NotReady
from windrow.local.summary import DEDICATED, Events, Throughput, load_marks, throughput

DEDICATED_S = 12.0  # of training; at least ten are promised
_WORKER_START_S = 60.0


@dataclass(frozen=True)
class LoadPlan:
    """What the load client is told."""

    seconds: float
    rate: float
    seed: int
    trace: Path | None
    cpus: Sequence[int]  # of the client


@dataclass(frozen=True)
class Load:
    """A load client at work."""

    plan: LoadPlan
    child: Child
    began_ns: int
    out: Path

    @classmethod
    def start(cls, keeper: Keeper, plan: LoadPlan, endpoints: Sequence[str], out: Path) -> Load:
        """Start the client; its answers go to `load.json`, its words to `load.log`."""
        argv = [sys.executable, "-m", "windrow.local.load", f"--seconds={plan.seconds:g}"]
        argv += [f"--rate={plan.rate:g}", f"--seed={plan.seed}", f"--json={out / 'load.json'}"]
        argv += [f"--endpoint={endpoint}" for endpoint in endpoints]
        if plan.trace is not None:
            argv.append(f"--trace={plan.trace}")
        began_ns = time.monotonic_ns()
        command = ProcessCommand(argv, log=out / "load.log", cpus=plan.cpus)
        return cls(plan, keeper.start(command), began_ns, out)

    def await_end(self, *, drain_within: timedelta, cut: bool = False) -> None:
        """Return when the last answer is in.

        What is not answered within `drain_within` after the last arrival is given up where `cut`
        is set, and raises NotReady where it is not. Failed requests are counted by the summary.
        """
        within = timedelta(seconds=self.plan.seconds) + drain_within
        try:
            log_file = str(self.out / "load.log")
            await_exit(self.child, "the load client", within, log_file, well=(0, 1))
        except NotReady:
            if not cut:
                raise

    def finish(
        self, log: EventLog, objective_ms: float, *, drain_within: timedelta, cut: bool = False
    ) -> None:
        """Return when the last answer is in, and note in `log` when the load ran.

        Raises as `await_end` does.
        """
        self.await_end(drain_within=drain_within, cut=cut)
        marks = load_marks(
            self.began_ns,
            seconds=self.plan.seconds,
            drained_ns=time.monotonic_ns(),
            objective_ms=objective_ms,
        )
        for mark in marks:
            log.append(mark)
        log.flush()


def await_exit(
    child: Child, what: str, within: timedelta, log: str, *, well: Sequence[int] = (0,)
) -> None:
    """Return when a process has ended with a status in `well`.

    Raises NotReady when it ends otherwise, or not in time: it is stopped then.
    """
    try:
        status = child.exited.result(timeout=within.total_seconds())
    except FutureTimeout:
        child.stop()
        raise NotReady(f"{what} has not ended after {within}", logs=[log]) from None
    if status not in well:
        raise NotReady(f"{what} ended with status {status}", logs=[log])


def measure_dedicated(
    keeper: Keeper, job: dict[str, Any], device: Device, out: Path, seconds: float = DEDICATED_S
) -> Throughput:
    """Train the job alone on the whole device for `seconds` and return what it got done.

    The denominator of eta: the same worker, the same rows, no decode, nothing else running.
    """
    folder = out / DEDICATED
    argv = _trainer("windrow_sidecar.finetune.worker", ["--standalone"], job, seconds, folder)
    # The same wait policy as beside decode: what differs shall be the device's sharing alone.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    command = ProcessCommand(argv, log=out / "dedicated.log", env=environment, cpus=device.cores)
    child = keeper.start(command)
    limit = timedelta(seconds=seconds + _WORKER_START_S)
    await_exit(child, "the dedicated measurement", limit, "dedicated.log")
    measured = throughput(Events.read(folder).tasklets)
    if not measured.tokens_per_second:
        raise NotReady("the dedicated measurement finished no two steps", logs=["dedicated.log"])
    return measured


def start_baseline(
    keeper: Keeper, job: dict[str, Any], device: Device, out: Path, seconds: float, *, tuned: bool
) -> Child:
    """Start a plain PEFT loop beside decode, on all of its cores.

    `tuned`: OpenMP's threads sleep where they would spin, and the loop is nice 19.
    """
    argv = _trainer(
        "windrow_sidecar.finetune.standalone.baseline", [], job, seconds, out / "baseline"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if tuned:
        environment["OMP_WAIT_POLICY"] = "passive"
    nice = 19 if tuned else 0
    return keeper.start(
        ProcessCommand(
            argv, log=out / "baseline.log", env=environment, nice=nice, cpus=device.cores
        )
    )


def _trainer(
    module: str, flags: list[str], job: dict[str, Any], seconds: float, folder: Path
) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    argv = [sys.executable, "-m", module, *flags, f"--job={manifest}", f"--seconds={seconds:g}"]
    return [*argv, f"--log-dir={folder}"]
