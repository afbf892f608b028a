"""Start, stop and reap one worker process, or keep one on standby."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from windrow import openmp
from windrow.outputs import make_trees
from windrow.proto import attach_pb2
from windrow.rundir import (
    ENV_COPY_RATE,
    ENV_LOG_DIR,
    ENV_ONLY_GPU,
    ENV_RUN_DIR,
    WORKER_LOG,
    RunDir,
    worker_line,
)
from windrow_sidecar.agent.fork_server import ROOM, ROOM_BYTES, ForkOrder
from windrow_sidecar.agent.forking import ComingChild, ForkServer, WorkerChild, signal_group
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.engine_facts import NOTHING_KNOWN, EngineFacts

_log = logging.getLogger(__name__)

# Ends the GPU work of a process that is about to be killed.
EndGpuWork = Callable[[int], Awaitable[None]]

_LOG_TAIL_BYTES = 2000
_REST_S = 60.0
_LOG_EVERY_S = 0.5
# Of one look: a worker that writes without end must not hold the agent up.
_MOST_LOG_BYTES = 64 * 1024


def worker_arguments(settings: AgentSettings, assign: attach_pb2.Assign) -> list[str]:
    """The worker's arguments, as the contract between agent and worker has them."""
    return [
        "--run-dir",
        str(settings.run_dir.root),
        "--slot",
        str(assign.slot),
        "--job-uid",
        assign.job_uid,
        "--epoch",
        str(assign.epoch),
    ]


def write_job(
    settings: AgentSettings, assign: attach_pb2.Assign, engine: EngineFacts = NOTHING_KNOWN
) -> Path:
    """Write a job's spec to its directory, where its worker looks for it; returns that directory.

    Raises:
        OSError: it cannot be written.
        ValueError: the spec is not JSON.
    """
    folder = settings.run_dir.job_dir(assign.job_uid)
    folder.mkdir(parents=True, exist_ok=True)
    make_trees(assign.outputs.trees, assign.outputs.mounts)
    job = {
        "namespace": assign.job_namespace,
        "name": assign.job_name,
        "uid": assign.job_uid,
        "epoch": assign.epoch,
        "spec": json.loads(assign.spec_json),
        "checkpoint": assign.checkpoint_path,
        "engine": engine.document(),
        "outputs": list(assign.outputs.trees) if assign.HasField("outputs") else None,
        "access": access_document(settings, assign.access) if assign.HasField("access") else None,
    }
    (folder / "job.json").write_text(json.dumps(job, indent=2), encoding="utf-8")
    return folder


def access_document(settings: AgentSettings, access: attach_pb2.Access) -> dict[str, object]:
    """Return what a job may read, as processes that act for it read it."""
    return {
        "readableTrees": list(access.readable_trees),
        "never": [str(settings.run_dir.root)],
        "listsSources": access.lists_sources,
        "sources": list(access.sources),
        "privateSources": access.private_sources,
        "podCredentials": access.pod_credentials,
        "servesModel": access.serves_model if access.HasField("serves_model") else None,
        "preparationSeconds": access.preparation_seconds,
    }


@dataclass(frozen=True, slots=True)
class Exit:
    """Exit status of a worker and what it means."""

    code: int  # below 0: by that signal
    log_tail: str

    def describe(self) -> str:
        """Return the exit as text for a condition's message."""
        if self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        else:
            how = f"ended with exit code {self.code}"
        return f"worker {how}; last lines of its log:\n{self.log_tail}" if self.log_tail else how


def name_of(assign: attach_pb2.Assign) -> str:
    """Return namespace/name of the job of an assignment."""
    return f"{assign.job_namespace}/{assign.job_name}"


@dataclass(frozen=True, slots=True)
class WorkerDevices:
    """Devices of the pod that a slot's workers may see, and over how many ranks they use them.

    Attributes:
        gpu: the only GPU that they see, as CUDA_VISIBLE_DEVICES names it; "": all that this
            process sees.
        cores: of the machine, that are the slot's device; none: all that this process has.
        mps: variables that make them clients of the pod's MPS daemon, and their priority there;
            none: they share in time.
        ranks: processes of a worker: as many as decode's model is cut over.
    """

    gpu: str = ""
    cores: tuple[int, ...] = ()
    mps: tuple[tuple[str, str], ...] = ()
    ranks: int = 1


class WorkerProcess:
    """A running worker. Ends with the agent, whatever happens to that."""

    def __init__(self, process: WorkerChild, logs: WorkerLogs) -> None:
        self._process, self._logs = process, logs

    @classmethod
    async def start(
        cls,
        settings: AgentSettings,
        assign: attach_pb2.Assign,
        standby: Standby | None = None,
        engine: EngineFacts = NOTHING_KNOWN,
    ) -> WorkerProcess:
        """Write the job's spec to its directory and start the worker, the waiting one if it is."""
        log = write_job(settings, assign, engine) / WORKER_LOG
        logs = WorkerLogs(settings.run_dir.of_slot(assign.slot), assign)
        process = standby.take(assign) if standby else None
        if process is None:
            process = await start_worker(
                settings,
                worker_arguments(settings, assign),
                log,
                devices=standby.devices if standby else WorkerDevices(),
                forks=standby.forks if standby else None,
            )
        return cls(process, logs)

    @property
    def pid(self) -> int:
        """Process id of the worker; 0: it is about to be forked."""
        return self._process.pid

    async def started(self) -> None:
        """Wait until it has a process id, or never will."""
        if isinstance(self._process, ComingChild):
            await self._process.started()

    def joined(self, assign: attach_pb2.Assign) -> None:
        """Add a job to those of the worker: it has a log of its own."""
        self._logs.add(assign)

    def left(self, assign: attach_pb2.Assign) -> None:
        """Remove a job that the worker no longer has; others go on."""
        self._logs.drop(assign)

    async def wait(self) -> Exit:
        """Reap it; meanwhile its logs are repeated on the agent's output.

        Returns its end as the job that it was started for may hear of it.
        """
        following = asyncio.create_task(self._logs.run())
        try:
            code = await self._process.wait()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return self.exit_of(self._logs.first, code)

    def exit_of(self, assign: attach_pb2.Assign, code: int) -> Exit:
        """Return its end as a job of it may hear of it: with last lines that are that job's."""
        return Exit(code, self._logs.tail_of(assign) if code else "")

    def terminate(self) -> None:
        """Ask it to checkpoint and end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now, and whatever it has started."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        _send(self._process, number)


class Standby:
    """Keep at most one worker that has loaded everything but its job; see `finetune.standby`.

    Args:
        settings: of the agent.
        slot: its index.
        forks: where workers are forked; none: each is started by exec.

    Attributes:
        devices: what the slot's workers are shown.
        forks: as given.
    """

    def __init__(self, settings: AgentSettings, slot: int, forks: ForkServer | None = None) -> None:
        self._settings, self._slot, self.forks = settings, slot, forks
        self.devices = WorkerDevices()
        self._process: WorkerChild | None = None
        self._order: int | None = None  # the end of a pipe whose line names its job
        self._starting = asyncio.Lock()
        self._closed = False
        self._not_before_s = 0.0  # of the loop's clock

    async def show(self, devices: WorkerDevices) -> None:
        """Show workers other devices from now on; one that waits with the old ones ends."""
        if devices != self.devices:
            self.devices = devices
            await self._end()

    async def prepare(self, served_model: str) -> None:
        """Have one from now on. Harmless when there is one; one that cannot start is done without.

        Raises OSError when no process can be started.
        """
        async with self._starting:
            if self._closed or not self._settings.standby or self._alive() or self._resting():
                return
            arguments = ["--run-dir", str(self._settings.run_dir.root), "--slot", str(self._slot)]
            arguments += ["--standby", "--served-model", served_model]
            self._hang_up()
            theirs, self._order = os.pipe()
            try:
                self._process = await start_worker(
                    self._settings,
                    arguments,
                    self._settings.run_dir.root / f"standby-{self._slot}.log",
                    devices=self.devices,
                    forks=self.forks,
                    stdin=theirs,
                )
            finally:
                os.close(theirs)

    def take(self, assign: attach_pb2.Assign) -> WorkerChild | None:
        """Give the waiting process its job; None when none waits."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None or self._order is None:
            return None
        order = {"job_uid": assign.job_uid, "epoch": assign.epoch}
        with contextlib.suppress(BrokenPipeError):  # it has just ended, which its reaping says
            os.write(self._order, json.dumps(order).encode() + b"\n")
        self._hang_up()
        return process

    async def dismiss(self) -> None:
        """End the one that waits, until another is prepared: its memory is the pod's."""
        await self._end()

    async def close(self) -> None:
        """End the one that waits, and have none any more."""
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        """End the waiting worker; nothing is lost with it."""
        async with self._starting:
            process, self._process = self._process, None
            if process is not None:
                _send(process, signal.SIGKILL)
                await process.wait()
            self._hang_up()

    def _hang_up(self) -> None:
        order, self._order = self._order, None
        if order is not None:
            os.close(order)

    def _resting(self) -> bool:
        """Return whether a worker that ended unasked must wait: it would end the same way again."""
        now_s = asyncio.get_running_loop().time()
        if self._process is not None:
            _log.warning("a waiting worker ended with exit code %s", self._process.returncode)
            self._process, self._not_before_s = None, now_s + _REST_S
        return now_s < self._not_before_s

    def _alive(self) -> bool:
        return self._process is not None and self._process.returncode is None


def _send(process: WorkerChild, number: signal.Signals) -> None:
    if isinstance(process, ComingChild):
        process.signal(number)
    else:
        signal_group(process, number)


async def start_worker(
    settings: AgentSettings,
    arguments: list[str],
    log: Path,
    *,
    devices: WorkerDevices,
    forks: ForkServer | None,
    stdin: int | None = None,
) -> WorkerChild:
    """Have a worker forked, or start it by exec where nothing forks.

    Args:
        settings: of the agent.
        arguments: of the worker.
        log: takes its output.
        devices: what it is shown.
        forks: where it is forked.
        stdin: descriptor of its standard input, still the caller's; none: it has no input.

    Raises:
        OSError: it cannot be started.
    """
    if devices.ranks > 1:
        arguments = [*arguments, "--tp", str(devices.ranks)]
    source = os.open(os.devnull, os.O_RDONLY) if stdin is None else os.dup(stdin)
    command = [sys.executable, "-m", settings.worker_module, *arguments]
    environment = worker_environment(settings, devices)

    async def start() -> asyncio.subprocess.Process:
        return await _spawn(command, log, stdin=source, environment=environment, devices=devices)

    if forks is None or forks.rests:
        try:
            return await start()
        finally:
            os.close(source)

    with log.open("ab"):
        pass  # it is read also where the worker never comes

    async def start_late() -> asyncio.subprocess.Process:
        try:
            return await start()
        except OSError as error:
            with log.open("a", encoding="utf-8") as out:
                out.write(f"cannot start a worker: {error}\n")
            raise

    async def fork() -> int:
        order = ForkOrder(arguments, environment, list(devices.cores))
        with log.open("ab") as out:
            return await forks.fork(order, source, out.fileno())

    return ComingChild(forks.ready, fork, start_late, lambda: os.close(source))


def make_fork_server(settings: AgentSettings) -> ForkServer:
    """Return a fork server of the settings' workers; its process starts with the first worker."""
    command = [sys.executable, "-m", "windrow_sidecar.agent.fork_server", settings.worker_module]
    command.append(ROOM.ljust(ROOM_BYTES, "-"))
    # numpy's library starts a thread for each core as it is imported; and libraries that ask
    # whether there is a GPU are to ask NVML, for a process that has asked CUDA cannot be forked.
    own = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    async def start(stdin: int) -> asyncio.subprocess.Process:
        return await _spawn(
            command,
            settings.run_dir.root / "fork-server.log",
            stdin=stdin,
            environment=worker_environment(settings) | own,
            devices=WorkerDevices(),
        )

    return ForkServer(start)


async def _spawn(
    command: list[str],
    log: Path,
    *,
    stdin: int,
    environment: dict[str, str],
    devices: WorkerDevices,
) -> asyncio.subprocess.Process:
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "windrow_sidecar.agent.spawn",
            str(os.getpid()),
            *(f"--core={core}" for core in devices.cores),
            "--",
            *command,
            stdin=stdin,
            stdout=out,
            stderr=out,
            env=environment,
            # A group of its own, so that Ctrl-C at a terminal reaches the agent first; the same
            # session, because niceness counts only within one (autogroup).
            process_group=0,
        )


def worker_environment(
    settings: AgentSettings, devices: WorkerDevices = WorkerDevices()
) -> dict[str, str]:
    """Return a worker's environment; a client of the pod's MPS daemon where `devices` says so."""
    own = {
        **openmp.WORKER,
        # While it loads; from its first grant on, the worker sets its threads by its level.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        ENV_RUN_DIR: str(settings.run_dir.root),
    }
    if settings.copy_rate:
        own[ENV_COPY_RATE] = str(settings.copy_rate)
    if settings.log_dir:
        own[ENV_LOG_DIR] = str(settings.log_dir)
    if devices.gpu:
        own["CUDA_VISIBLE_DEVICES"] = own[ENV_ONLY_GPU] = devices.gpu
    own |= dict(devices.mps)
    return {**os.environ, **own}


def _tail(log: Path, since: int = 0) -> str:
    """Return the last lines of a log, of those behind `since` bytes."""
    try:
        with log.open("rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, since, size - _LOG_TAIL_BYTES))
            return lines.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class WorkerLogFollower:
    """Follows one log from its present end; complete lines only, but for the last.

    Args:
        log: of the worker; it need not be there yet.
        jobs: namespace/name of those that each line is marked with.
        emit: takes each marked line.

    Attributes:
        log: as given.
        began_at: its length when it began, bytes.
    """

    def __init__(
        self, log: Path, jobs: Sequence[str], emit: Callable[[str], None] = _print
    ) -> None:
        self.log, self._jobs, self._emit = log, tuple(jobs), emit
        self._at = self.began_at = log.stat().st_size if log.exists() else 0
        self._begun = b""

    def mark(self, jobs: Sequence[str]) -> None:
        """Mark what is written from now on with these jobs."""
        self.look()
        self._jobs = tuple(jobs)

    def look(self) -> None:
        """Tell what has come since the last look."""
        try:
            with self.log.open("rb") as lines:
                lines.seek(self._at)
                fresh = lines.read(_MOST_LOG_BYTES)
        except FileNotFoundError:
            return
        self._at += len(fresh)
        *whole, self._begun = (self._begun + fresh).split(b"\n")
        for line in whole:
            self._tell(line)

    def finish(self) -> None:
        """Tell the last lines, whole or not."""
        self.look()
        if self._begun:
            self._tell(self._begun)

    def _tell(self, line: bytes) -> None:
        self._emit(worker_line(self._jobs, line.decode(errors="replace").rstrip("\r")))


class WorkerLogs:
    """The logs of a worker: one of each job, and from the second job on one of the process.

    What the process says is each job's where all of them are of one namespace, and nobody's where
    they are not.

    Args:
        run_dir: of the decode pod, as the worker's slot sees it.
        first: the job that the worker is started for.
        emit: takes each marked line.

    Attributes:
        first: as given.
    """

    def __init__(
        self, run_dir: RunDir, first: attach_pb2.Assign, emit: Callable[[str], None] = _print
    ) -> None:
        self._run_dir, self._emit, self.first = run_dir, emit, first
        self._of_process = WorkerLogFollower(run_dir.worker_log(), (), emit)
        self._of_jobs: dict[str, WorkerLogFollower] = {}  # by UID
        self._going: dict[str, str] = {}  # namespace/name of the jobs that the worker has, by UID
        self._namespaces: set[str] = set()  # that it has ever served
        self.add(first)

    def add(self, assign: attach_pb2.Assign) -> None:
        """Follow the log of a further job."""
        log = self._run_dir.job_dir(assign.job_uid) / WORKER_LOG
        if assign.job_uid not in self._of_jobs:
            self._of_jobs[assign.job_uid] = WorkerLogFollower(log, [name_of(assign)], self._emit)
        self._going[assign.job_uid] = name_of(assign)
        self._namespaces.add(assign.job_namespace)
        self._mark()

    def drop(self, assign: attach_pb2.Assign) -> None:
        """Note that the worker no longer has a job."""
        self._going.pop(assign.job_uid, None)
        self._mark()

    def _mark(self) -> None:
        mixed = len(self._namespaces) > 1
        self._of_process.mark(() if mixed else tuple(self._going.values()))

    async def run(self) -> None:
        """Follow until cancelled, then report the last lines."""
        try:
            while True:
                for follower in self._all():
                    follower.look()
                await asyncio.sleep(_LOG_EVERY_S)
        finally:
            for follower in self._all():
                follower.finish()

    def tail_of(self, assign: attach_pb2.Assign) -> str:
        """Return the last lines that are a job's."""
        log = self._of_jobs.get(assign.job_uid)
        own = _tail(log.log) if log is not None else ""
        if len(self._namespaces) > 1:
            return own
        shared = _tail(self._of_process.log, self._of_process.began_at)
        return f"{own}\n{shared}".strip()

    def _all(self) -> list[WorkerLogFollower]:
        return [*self._of_jobs.values(), self._of_process]
