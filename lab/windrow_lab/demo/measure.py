"""The processes that a run measures with: the load client, and the worker alone on the device."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from windrow import openmp
from windrow.eventlog import EventLog
from windrow_lab.cluster.serving import NotReady
from windrow_lab.figures.summary import DEDICATED, Events, Throughput, load_marks, throughput
from windrow_lab.load import generator
from windrow_lab.machine.devices import Device
from windrow_lab.machine.processes import Child, Keeper, ProcessCommand

DEDICATED_S = 12.0  # of training; at least ten are guaranteed
_WORKER_START_S = 60.0
_LOOP = "windrow_sidecar.finetune.standalone.baseline"


@dataclass(frozen=True)
class LoadPlan:
    """Settings of the load client."""

    seconds: float
    rate: float
    seed: int
    trace: Path | None
    cpus: Sequence[int]  # of the client
    busy: bool = False  # of the trace, a stretch that has its mean rate
    like: generator.Like = "conv"  # without a trace


@dataclass(frozen=True)
class Load:
    """A load client at work."""

    plan: LoadPlan
    child: Child
    began_ns: int
    out: Path

    @classmethod
    def start(
        cls,
        keeper: Keeper,
        plan: LoadPlan,
        endpoints: Sequence[str],
        out: Path,
        *,
        begin_ns: int = 0,
        cut: bool = False,
    ) -> Load:
        """Start the client; its answers go to `load.json`, its words to `load.log`.

        `begin_ns`: when the first request is due (0: as soon as it runs); `cut`: it hangs up at
        the end instead of waiting for the last answers.
        """
        argv = [sys.executable, "-m", "windrow_lab.load", f"--seconds={plan.seconds:g}"]
        argv += [f"--rate={plan.rate:g}", f"--seed={plan.seed}", f"--json={out / 'load.json'}"]
        argv += [f"--endpoint={endpoint}" for endpoint in endpoints]
        if plan.trace is not None:
            argv.append(f"--trace={plan.trace}")
        if plan.trace is None:
            argv.append(f"--like={plan.like}")
        if plan.busy:
            argv.append("--busy")
        if begin_ns:
            argv.append(f"--begin-at={begin_ns}")
        if cut:
            argv.append(f"--cut={plan.seconds:g}")
        began_ns = begin_ns or time.monotonic_ns()
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
    child = keeper.start(_own_worker(job, device, seconds, folder, out / "dedicated.log"))
    limit = timedelta(seconds=seconds + _WORKER_START_S)
    await_exit(child, "the dedicated measurement", limit, "dedicated.log")
    measured = throughput(Events.read(folder).tasklets)
    if not measured.tokens_per_second:
        raise NotReady("the dedicated measurement finished no two steps", logs=["dedicated.log"])
    return measured


class Trainer:
    """Trainer in a process of its own, which runs only during its turns.

    It is loaded once and then stopped between its turns (SIGSTOP), so that no turn pays for its
    start and none is disturbed by another one's.

    Args:
        keeper: starts it.
        command: of it; it writes its events below `folder`.
        folder: its own.
    """

    def __init__(self, keeper: Keeper, command: ProcessCommand, folder: Path) -> None:
        self._folder = folder
        self._log = str(command.log)
        self._child = keeper.start(command)

    def go(self) -> None:
        """Let it run."""
        self._child.signal(signal.SIGCONT)

    def halt(self) -> None:
        """Stop it where it is."""
        self._child.signal(signal.SIGSTOP)

    def finish_step(self, within: timedelta) -> None:
        """Let it run until it has finished one optimizer step more, and stop it.

        Raises NotReady when it ends, or takes longer.
        """
        before = self._steps()
        self.go()
        deadline = time.monotonic() + within.total_seconds()
        while self._steps() == before:
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise NotReady(f"no step of a trainer within {within}", logs=[self._log])
            time.sleep(0.1)
        self.halt()

    def own_bytes(self) -> int:
        """Return the most memory that it has held, without that of its libraries.

        Its copy of the weights, activations, gradients and optimizer: what a device would have to
        hold beside decode. Of a plain loop, which notes what it holds before it loads the model.
        """
        marks = [mark for _, mark in Events.read(self._folder).marks]
        before = next(int(m.detail) for m in marks if m.what == "resident-before-model")
        return status_bytes(self._child.pid, "VmHWM") - before

    def end(self) -> None:
        """End it; what it was doing is lost."""
        self._child.signal(signal.SIGKILL)
        self._child.exited.result(timeout=30)

    def _steps(self) -> int:
        logs = self._folder.glob("*.events.jsonl")
        return sum(log.read_bytes().count(b'"phase": "opt"') for log in logs)


def status_bytes(pid: int, field: str) -> int:
    """Return a size from a process's status, as `VmHWM` or `RssAnon`."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"^{field}:\s*(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise NotReady(f"process {pid} has no {field}: it has ended")
    return int(found[1]) * 1024


FOREVER_S = 1e6


def own_worker(keeper: Keeper, job: dict[str, Any], device: Device, folder: Path) -> Trainer:
    """Start our worker alone on the whole device."""
    command = _own_worker(job, device, FOREVER_S, folder, folder / "trainer.log")
    return Trainer(keeper, command, folder)


def _own_worker(
    job: dict[str, Any], device: Device, seconds: float, folder: Path, log: Path
) -> ProcessCommand:
    argv = _trainer("windrow_sidecar.finetune.worker", ["--standalone"], job, seconds, folder)
    # Its threads wait as beside decode: what differs shall be the device's sharing alone.
    return ProcessCommand(argv, log, {**os.environ, **openmp.WORKER}, cpus=device.cores)


@dataclass(frozen=True, slots=True)
class LoopForm:
    """Form of a plain PEFT loop.

    Attributes:
        passive: OpenMP's threads sleep where they would spin.
        nice: of the process.
        idle_class: it runs as SCHED_IDLE.
        units: cores that it computes on; None: all of the device.
        checkpointing: it keeps only the activations between layers.
    """

    passive: bool = True
    nice: int = 0
    idle_class: bool = False
    units: int | None = None
    checkpointing: bool = False


def plain_loop(
    keeper: Keeper, job: dict[str, Any], device: Device, folder: Path, form: LoopForm
) -> Trainer:
    """Start a plain PEFT loop on the device's cores."""
    flags = ["--idle-class"] if form.idle_class else []
    flags += ["--gradient-checkpointing"] if form.checkpointing else []
    flags += [f"--units={form.units}"] if form.units else []
    argv = _trainer(_LOOP, flags, job, FOREVER_S, folder)
    environment = {k: v for k, v in os.environ.items() if k not in openmp.WORKER}
    if form.passive:
        # At once: beside decode a loop made 1,600 tokens a second with our worker's short spin and
        # 2,300 without (EPYC, code at 1.5), since its threads share cores with each other, too.
        environment["OMP_WAIT_POLICY"] = "passive"
    command = ProcessCommand(
        argv, folder / "trainer.log", environment, nice=form.nice, cpus=device.cores
    )
    return Trainer(keeper, command, folder)


def _trainer(
    module: str, flags: list[str], job: dict[str, Any], seconds: float, folder: Path
) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    argv = [sys.executable, "-m", module, *flags, f"--job={manifest}", f"--seconds={seconds:g}"]
    return [*argv, f"--log-dir={folder}"]
