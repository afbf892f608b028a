"""Try across what containers separate whether a process becomes a client of an MPS daemon.

`windrow doctor --gpu` asks it where the sidecar will run: beside decode's own daemon, where its
start has left a note, and else beside a private one, from other namespaces of PIDs and IPC, with
another `/dev/shm` and as another user. A container that may make no namespaces tries none.
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from windrow.errors import Transient
from windrow_sidecar.compute import mps_trial
from windrow_sidecar.compute.mps import MpsDaemon
from windrow_sidecar.compute.mps_joining import (
    DaemonNote,
    JoiningContainer,
    find_joining_lack,
    pid_namespace,
)
from windrow_sidecar.compute.utilization import GpuMeter

# A client that the server lets wait would wait for ever.
HANGS_AFTER_S = 12.0
_ENDS_WITHIN_S = 5.0
_NOBODY = 65534
_SHARED_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


@dataclass(frozen=True, slots=True)
class Separation:
    """One thing that containers may have apart.

    Attributes:
        what: its name.
        prefix: of the command of a process that has it so.
        user: that it runs as; None: as this process.
    """

    what: str
    prefix: tuple[str, ...] = ()
    user: int | None = None


PIDS = Separation("PID namespace", ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"))
APART = (
    PIDS,
    Separation("IPC namespace", ("unshare", "--ipc")),
    Separation("/dev/shm", ("unshare", "--mount", "sh", "-c", _SHARED_MEMORY, "sh")),
    Separation("user", user=_NOBODY),
)


@dataclass(frozen=True, slots=True)
class Tried:
    """Result of a trial.

    Attributes:
        what: was apart.
        works: whether a process became a client; None: it was not tried.
        text: what was seen.
        known: whether the daemon named it among its clients.
    """

    what: str
    works: bool | None
    text: str
    known: bool = False


@dataclass(frozen=True, slots=True)
class _Client:
    """A trial that stays: its process, and its number in this process's PID namespace."""

    process: subprocess.Popen[str]
    pid: int


def try_across(
    daemon: MpsDaemon, meter: GpuMeter | None, within_s: float = HANGS_AFTER_S
) -> list[Tried]:
    """Try each of `APART` with a daemon that this process has started.

    Args:
        daemon: that runs.
        meter: tells whose number NVML counts a client's work under; None: there is no NVML.
        within_s: after so long a process counts as one that hangs.
    """
    return [_try(daemon, apart, meter, within_s) for apart in APART]


def try_decodes_daemon(
    note: DaemonNote, daemon: MpsDaemon, within_s: float = HANGS_AFTER_S
) -> Tried:
    """Try from here to become a client of the daemon that decode's start has left a note of."""
    what = "decode's daemon"
    here = JoiningContainer.here(note, has_control=daemon.has_control)
    if lack := find_joining_lack(note, here):
        return Tried(what, works=False, text=f"{lack.text} ({lack.code})")
    shares = note.pid_namespace == pid_namespace()
    with _client(note.environment, Separation(what), within_s) as found:
        if isinstance(found, str):
            return Tried(what, works=False, text=found)
        return _known(what, daemon, found.pid, shares=shares)


def _try(daemon: MpsDaemon, apart: Separation, meter: GpuMeter | None, within_s: float) -> Tried:
    if why := _not_allowed(apart):
        return Tried(apart.what, works=None, text=why)
    pipes = [Path(folder) for folder in daemon.environment.values()]
    modes = [folder.stat().st_mode for folder in pipes]
    if apart.user is not None:  # else its files would keep it out, and not the server
        for folder in (*pipes, pipes[0].parent):
            folder.chmod(0o777)
    try:
        with _client(daemon.environment, apart, within_s) as found:
            if isinstance(found, str):
                return Tried(apart.what, works=False, text=found)
            tried = _known(apart.what, daemon, found.pid, shares=apart is not PIDS)
            if apart is not PIDS or not tried.known:
                return tried
            counted = _counted(meter, daemon, found.pid)
            ended = daemon.terminate_client(found.pid, shares_namespace=False)
            how = "its work ends by that number" if ended else "its work cannot be ended by it"
            return Tried(apart.what, works=True, text=f"{tried.text}; {how}{counted}", known=ended)
    except Transient as error:
        return Tried(apart.what, works=False, text=str(error))
    finally:
        for folder, mode in zip(pipes, modes, strict=True):
            folder.chmod(mode)


def _known(what: str, daemon: MpsDaemon, pid: int, *, shares: bool) -> Tried:
    client = daemon.find_client(pid, shares_namespace=shares)
    if client is None:
        return Tried(what, works=True, text="a client that the daemon does not name")
    return Tried(what, works=True, text=f"a client, {client.pid} of the server", known=True)


def _counted(meter: GpuMeter | None, daemon: MpsDaemon, pid: int) -> str:
    """Say whose number NVML has for a client's work."""
    if meter is None:
        return ""
    seen = set(meter.processes())
    if pid in seen:
        return "; NVML counts it as the process's own"
    whose = "the server's" if seen & set(daemon.servers()) else "nobody's that is known here"
    return f"; NVML counts it as {whose}"


def _not_allowed(apart: Separation) -> str:
    """Say why this process cannot have that apart; "": it can."""
    try:
        done = subprocess.run(
            [*apart.prefix, mps_trial.COMMAND[0], "-S", "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            user=apart.user,
            timeout=_ENDS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"not tried: {error}"
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else f"not tried: {said[-1] if said else done.returncode}"


@contextmanager
def _client(
    environment: Mapping[str, str], apart: Separation, within_s: float
) -> Iterator[_Client | str]:
    """Have a client until the block ends; a text: what kept the process from becoming one."""
    process = subprocess.Popen(
        [*apart.prefix, *mps_trial.COMMAND, mps_trial.STAY],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        user=apart.user,
    )
    try:
        yield _answer(process, within_s)
    finally:
        mps_trial.end_group(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_ENDS_WITHIN_S)


def _answer(process: subprocess.Popen[str], within_s: float) -> _Client | str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], within_s)[0]:
        return mps_trial.hanging(within_s).text
    line = process.stdout.readline()
    if not line:
        _, err = process.communicate(timeout=_ENDS_WITHIN_S)
        lack = mps_trial.read_answer("", err)
        return lack.text if lack else "it ended"
    if lack := mps_trial.read_answer(line, ""):
        return lack.text
    return _Client(process, _last_child(process.pid))


def _last_child(pid: int) -> int:
    """Return the process at the end of a chain of only children: what `unshare` has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with suppress(OSError):
        if numbers := children.read_text(encoding="ascii").split():
            return _last_child(int(numbers[0]))
    return pid
