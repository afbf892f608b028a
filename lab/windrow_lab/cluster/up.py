"""The cluster that stays: `windrow up` starts it, `windrow down` ends it and nothing else.

A process of its own session holds the cluster, so that it outlives the terminal. It notes itself in
the user's state directory and holds a lock there as long as it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from windrow.errors import UserError, WindrowError
from windrow_lab.cluster.local import ClusterError, ClusterSettings, LocalCluster
from windrow_lab.machine.build import ensure_tools
from windrow_lab.machine.child_processes import descendants
from windrow_lab.machine.progress import progress_for


@dataclass(frozen=True)
class ClusterInfo:
    """A cluster that `windrow up` started.

    Attributes:
        pid: of the process that holds it.
        start_ticks: when that process started (clock ticks after boot), since pids are used again.
        kubeconfig: of a cluster administrator.
        server: URL of the API server.
        version: of Kubernetes.
        log_dir: logs of all its processes.
        directory: sockets and files of its processes and pods.
    """

    pid: int
    start_ticks: int
    kubeconfig: str
    server: str
    version: str
    log_dir: str
    directory: str

    @property
    def is_running(self) -> bool:
        """True where the process that holds the cluster is still that process."""
        return start_ticks(self.pid) == self.start_ticks


def state_directory(environment: Mapping[str, str]) -> Path:
    """Return where the state of `windrow up` is kept; it need not exist."""
    base = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME", "~"), ".local/state")
    return Path(base).expanduser() / "windrow"


def state_file(environment: Mapping[str, str]) -> Path:
    """Return the file that describes the running cluster."""
    return state_directory(environment) / "cluster.json"


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def write_state(info: ClusterInfo, environment: Mapping[str, str]) -> None:
    """Note a running cluster; a reader never sees half of it."""
    path = state_file(environment)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def running_cluster(environment: Mapping[str, str] | None = None) -> ClusterInfo | None:
    """Return the cluster that `windrow up` left running, None when there is none."""
    path = state_file(os.environ if environment is None else environment)
    try:
        info = ClusterInfo(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return info if info.is_running else None


def running_kubeconfig(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the kubeconfig of the cluster that `windrow up` left running, if any."""
    info = running_cluster(environment)
    return Path(info.kubeconfig) if info else None


_SETTINGS = TypeAdapter(ClusterSettings)
_TAIL_LINES = 20
_START_WITHIN = timedelta(seconds=180)
# Pods have three seconds, then operator and control plane follow.
_END_WITHIN = timedelta(seconds=30)


def up(settings: ClusterSettings, *, console: Console) -> ClusterInfo:
    """Start a cluster that stays, and return once it is ready.

    Logs go to `settings.log_dir`, by default to `logs` in the state directory, which is emptied
    first. Raises UserError when a cluster is up already, ClusterError with the tail of the log
    when it does not come up; nothing stays then.
    """
    refuse_second()
    ensure_tools(progress_for(console), settings.tools)
    log_dir = fresh_logs(settings.log_dir)
    text = _SETTINGS.dump_json(replace(settings, log_dir=log_dir)).decode()
    return leave_running([sys.executable, "-m", "windrow_lab.cluster.up", text], log_dir)


def refuse_second() -> None:
    """Raise UserError when a cluster is up already."""
    if (standing := running_cluster()) is not None:
        raise _already_up(standing)


def fresh_logs(log_dir: Path | None = None) -> Path:
    """Return where logs go: a folder that is there, the state directory's own emptied."""
    if log_dir is None:
        log_dir = state_directory(os.environ) / "logs"
        shutil.rmtree(log_dir, ignore_errors=True)
    log_dir = log_dir.absolute()
    log_dir.mkdir(parents=True, exist_ok=True)
    return log_dir


def leave_running(holder: Sequence[str], log_dir: Path) -> ClusterInfo:
    """Start the process that holds a cluster, and return once it has noted itself.

    Raises:
        ClusterError: it did not in time; nothing of it stays.
        UserError: another one was faster.
    """
    log = log_dir / "cluster.log"
    pid = _spawn(holder, log)
    try:
        return _await_ready(pid, log)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            _end(pid, _END_WITHIN)
        raise


def down(within: timedelta = _END_WITHIN) -> ClusterInfo | None:
    """End the cluster that `up` left running and return what it was, None when there is none.

    A holder that does not end in time is killed; its supervisor then ends the rest.
    """
    standing = running_cluster()
    if standing is not None:
        with contextlib.suppress(ProcessLookupError):
            _end(standing.pid, within, start=standing.start_ticks)
    state_file(os.environ).unlink(missing_ok=True)
    return standing


def _already_up(standing: ClusterInfo) -> UserError:
    return UserError(
        f"a cluster is up already, at {standing.server} (process {standing.pid})",
        remedy=f"Use it with KUBECONFIG={standing.kubeconfig}, or end it with `windrow down`.",
        reason="AlreadyUp",
    )


def _spawn(argv: Sequence[str], log: Path) -> int:
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        argv[0],
        list(argv),
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), write, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _await_ready(pid: int, log: Path) -> ClusterInfo:
    deadline = time.monotonic() + _START_WITHIN.total_seconds()
    while True:
        standing = running_cluster()
        if standing is not None and standing.pid == pid:
            return standing
        ended, _ = os.waitpid(pid, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            if standing is not None:
                raise _already_up(standing)
            tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
            what = "ended" if ended else "is not ready in time"
            raise ClusterError("\n".join([f"the cluster {what}; the end of {log}:", *tail]))
        time.sleep(0.05)


def _end(pid: int, within: timedelta, start: int | None = None) -> None:
    """End the holder of a cluster and wait until all below it is gone."""
    holder = os.pidfd_open(pid)
    try:
        # Looked at once more, now that the descriptor pins the process.
        if start is not None and start_ticks(pid) != start:
            return
        below = descendants(pid)
        signal.pidfd_send_signal(holder, signal.SIGTERM)
        if not select.select([holder], [], [], within.total_seconds())[0]:
            signal.pidfd_send_signal(holder, signal.SIGKILL)
        _await_gone(below, within)
    finally:
        os.close(holder)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _await_gone(pids: set[int], within: timedelta) -> None:
    deadline = time.monotonic() + within.total_seconds()
    while left := [pid for pid in pids if start_ticks(pid) is not None]:
        if time.monotonic() > deadline:
            raise WindrowError(f"processes of the cluster do not end: {left}")
        time.sleep(0.05)


@contextlib.contextmanager
def only_cluster(environment: Mapping[str, str]) -> Iterator[None]:
    """Hold the state directory, or end this process; what is noted there goes at the end."""
    directory = state_directory(environment)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("another `windrow up` holds the state directory")
        try:
            yield
        finally:
            state_file(environment).unlink(missing_ok=True)


def _exit_on_signal(signum: int, _: object) -> None:
    # Once: what cleans up is not to be interrupted.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(f"asked to end by {signal.Signals(signum).name}")


def hold(settings: ClusterSettings) -> None:
    """Hold a cluster until SIGTERM; the process that `up` leaves behind."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _exit_on_signal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with only_cluster(os.environ), LocalCluster(settings) as cluster:
        note(
            str(cluster.kubeconfig),
            cluster.server,
            cluster.version,
            str(cluster.log_dir),
            str(cluster.directory),
        )
        while True:
            signal.pause()


def note(kubeconfig: str, server: str, version: str, log_dir: str, directory: str) -> None:
    """Note the cluster that this process holds, which is ready: fields of `ClusterInfo`."""
    pid = os.getpid()
    start = start_ticks(pid)
    assert start is not None, "/proc shows this process"
    write_state(
        ClusterInfo(pid, start, kubeconfig, server, version, log_dir, directory), os.environ
    )


def main() -> None:
    """Entry point of the process."""
    try:
        hold(_SETTINGS.validate_json(sys.argv[1]))
    except WindrowError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
