"""Bring up the pod's MPS daemon in decode's own start, before any CUDA context.

A process is a client of MPS only where the daemon runs before the process first uses CUDA. So the
start of decode brings it up: SGLang's plugin in the server's first process, the built-in engine
before it loads torch, or `windrow run` before the server. Decode waits `WAIT` at most. It gets the
variables only after another process has initialised CUDA under them; in every other case it serves
without, and the reason is in its environment (`sharing.WITHOUT_MPS`) for later readers.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

from windrow.conditions import Reason
from windrow.errors import WindrowError
from windrow.rundir import ENV_MPS_WAIT, ENV_RUN_DIR, ENV_SHARING, RunDir
from windrow_sidecar.compute.mps import CONTROL, MpsDaemon
from windrow_sidecar.compute.mps_joining import DaemonNote
from windrow_sidecar.compute.mps_trial import try_client
from windrow_sidecar.compute.sharing import (
    ASKED_IN_TIME,
    PIPE_DIRECTORY,
    WITHOUT_MPS,
    Lack,
    told_lack,
)

_log = logging.getLogger(__name__)

# For the daemon's first answer and for the trial together.
WAIT: Final = timedelta(seconds=2)
_LONGEST_WAIT_S = 600.0
_LOCK_EVERY_S = 0.02
# What this process has started: its child, for as long as it lives.
_TOO_LATE: Final = Lack(
    Reason.MPS_TOO_LATE,
    "CUDA was initialised in decode's process before the daemon could be brought up",
)
_started: list[MpsDaemon] = []
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def bring_up(
    run_dir: RunDir,
    environ: Mapping[str, str],
    *,
    control: str = CONTROL,
    wait: timedelta | None = None,
    only_starts_others: bool = False,
) -> dict[str, str]:
    """Return the variables that this process is to set before it uses CUDA; never raises.

    Those that make it a client of the pod's daemon, or the one that says why there is none. None at
    all where another daemon is decode's own choice, or where an earlier process has set them.

    Args:
        run_dir: of the pod.
        environ: of this process.
        control: the daemon's program, by name or path.
        wait: how long decode waits at most; None: what the environment says, else `WAIT`.
        only_starts_others: the processes that decode are new ones, which this one starts with its
            environment; so it does not matter whether CUDA is initialised here already.
    """
    if environ.get(PIPE_DIRECTORY) or WITHOUT_MPS in environ:
        return {}
    try:
        deadline = time.monotonic() + (_wait(environ) if wait is None else wait).total_seconds()
        lack = _find_early_lack(environ, control, uses_cuda_itself=not only_starts_others)
        variables: dict[str, str] = {}
        if lack is None:
            lack, variables = _brought_up(run_dir, environ, control, deadline)
    except (WindrowError, OSError, ValueError) as error:
        lack, variables = Lack(Reason.MPS_NOT_STARTED, str(error)), {}
    if lack is None:
        return variables
    with suppress(OSError):
        run_dir.mps_note.unlink(missing_ok=True)
    say = _log.info if lack.code in (Reason.MPS_MISSING, Reason.POLICY_TEMPORAL) else _log.warning
    say("windrow: a GPU would be shared in time: %s", lack.text)
    return {WITHOUT_MPS: told_lack(lack)}


def _find_early_lack(
    environ: Mapping[str, str], control: str, *, uses_cuda_itself: bool
) -> Lack | None:
    """Return why no daemon is brought up, as far as that is known before one is."""
    if environ.get(ENV_SHARING) == "temporal":
        return ASKED_IN_TIME
    if shutil.which(control, path=environ.get("PATH")) is None:
        text = f"{CONTROL} is not on PATH in decode's container"
        return Lack(Reason.MPS_MISSING, text)
    return _TOO_LATE if uses_cuda_itself and cuda_is_initialized() else None


def _brought_up(
    run_dir: RunDir, environ: Mapping[str, str], control: str, deadline: float
) -> tuple[Lack | None, dict[str, str]]:
    daemon = MpsDaemon(run_dir.mps_folder, control=control, environ=environ)
    _started.append(daemon)
    with _alone(run_dir, deadline):
        daemon.start(within=_left(deadline))
        variables = daemon.environment
        lack = try_client({**environ, **variables}, _left(deadline).total_seconds())
        if lack is not None:
            if not daemon.alive():
                lack = Lack(Reason.MPS_NOT_STARTED, f"the daemon has ended: {lack.text}")
            daemon.abandon()
            return lack, {}
        if daemon.is_own or DaemonNote.read(run_dir) is None:
            DaemonNote.here(variables).write(run_dir)
    return None, variables


@contextmanager
def _alone(run_dir: RunDir, deadline: float) -> Iterator[None]:
    """One start of a pod's engines at a time: there is one daemon for all of them."""
    with (run_dir.root / "mps.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError("another engine of the pod is still bringing it up") from None
                time.sleep(_LOCK_EVERY_S)
        yield


def _wait(environ: Mapping[str, str]) -> timedelta:
    """Raise ValueError where the variable holds another thing than a number of seconds."""
    said = environ.get(ENV_MPS_WAIT)
    if not said:
        return WAIT
    try:
        seconds = float(said)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_WAIT_S:
        longest = f"{_LONGEST_WAIT_S:.0f}"
        raise ValueError(f"{ENV_MPS_WAIT}: {said!r} is not a number of seconds from 0 to {longest}")
    return timedelta(seconds=seconds)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.05, deadline - time.monotonic()))


def cuda_is_initialized() -> bool:
    """Return whether this process has initialised CUDA; asks libcuda only where it is loaded."""
    try:
        if "libcuda.so" not in Path("/proc/self/maps").read_text(encoding="utf-8"):
            return False
        count = ctypes.c_int()
        answer: int = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return False
    return answer != _NOT_INITIALIZED


def main() -> int:
    """Print as JSON what `bring_up` returns for the run directory of the environment."""
    root = os.environ.get(ENV_RUN_DIR)
    json.dump(bring_up(RunDir(Path(root)), os.environ) if root else {}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
