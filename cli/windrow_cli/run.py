"""`windrow run -- COMMAND`: a decode server as a child; signals, output and end are its own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from windrow.errors import UserError
from windrow.rundir import DEFAULT_RUN_DIR, ENV_MPS_WAIT, ENV_RUN_DIR, ENV_SHARING

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# What a supervisor sends. SIGKILL and SIGSTOP cannot be passed on.
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH),
)
# How long processes that the command has left behind may take to end.
_LEFT_BEHIND_S = 5.0
# The program of NVIDIA's MPS daemon, how long bringing it up may take, and the start of a process
# that does it.
_MPS_CONTROL, _MPS_WAIT_S, _MPS_START_S = "nvidia-cuda-mps-control", 2.0, 2.0
_MPS_LONGEST_S = 600.0


def run(
    command: Annotated[list[str], typer.Argument(help="the server's command line, after --")],
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help=f"directory that decode and sidecar share; default: ${ENV_RUN_DIR}, else "
            f"{DEFAULT_RUN_DIR} where that exists, else none: an ordinary server"
        ),
    ] = None,
) -> None:
    """Run a decode server with harvesting; signals, output and exit code pass through.

    Example: windrow run -- python -m sglang.launch_server --disaggregation-mode decode ...
    """
    environment = {**os.environ}
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes ours
    if run_dir is not None:
        if not run_dir.is_dir():
            raise UserError(
                f"{str(run_dir)!r} is not a directory",
                field="--run-dir",
                remedy="Name the directory that the sidecar mounts as well.",
            )
        environment[ENV_RUN_DIR] = str(run_dir)
    elif ENV_RUN_DIR not in environment and DEFAULT_RUN_DIR.is_dir():
        environment[ENV_RUN_DIR] = str(DEFAULT_RUN_DIR)
    environment |= _mps_variables(environment)
    raise SystemExit(supervise(command, environment))


def _mps_variables(environment: dict[str, str]) -> dict[str, str]:
    """Have the pod's MPS daemon brought up, so that the server's processes are its clients.

    Returns the variables that they need; none where this cannot be done, and the server runs so.
    """
    wanted = ENV_RUN_DIR in environment and environment.get(ENV_SHARING) != "temporal"
    if not wanted or shutil.which(_MPS_CONTROL, path=environment.get("PATH")) is None:
        return {}
    starter = [sys.executable, "-m", "windrow_sidecar.compute.mps_start"]
    try:
        # Of a value that is wrong the starter tells.
        asked_s = float(environment.get(ENV_MPS_WAIT) or _MPS_WAIT_S)
    except ValueError:
        asked_s = _MPS_WAIT_S
    within_s = _MPS_START_S + (min(asked_s, _MPS_LONGEST_S) if asked_s > 0 else _MPS_WAIT_S)
    try:
        done = subprocess.run(
            starter, env=environment, stdout=subprocess.PIPE, timeout=within_s, check=False
        )
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return found


def supervise(command: list[str], environment: dict[str, str]) -> int:
    """Run the command to its end; returns its exit code, or 128 plus the signal that ended it.

    Nothing that it has started outlives it, and it does not outlive this process.

    Raises:
        UserError: there is no such program, or it may not be executed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what loses its parent becomes ours
    # Waited for, not handled: a handler that comes just before a wait for the child begins would
    # run after the child's end.
    awaited = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        try:
            child = subprocess.Popen(
                command, env=environment, preexec_fn=_dying_with(os.getpid(), before)
            )
        except OSError as error:
            raise UserError(
                f"{command[0]!r} cannot be run: {error.strerror}",
                field="COMMAND",
                remedy="Give the server's command line after --.",
            ) from error
        while (code := child.poll()) is None:
            if (number := signal.sigwait(awaited)) != signal.SIGCHLD:
                child.send_signal(number)
    finally:
        _end_children()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 128 - code if code < 0 else code


def _dying_with(parent: int, signals: Iterable[int]) -> Callable[[], None]:
    """Make the child die with the launcher, also where that has died already.

    `signals`: that it blocks, as the launcher did when it began.
    """

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def _end_children() -> None:
    """Ask what is left to end, then kill it; reaps all."""
    deadline = time.monotonic() + _LEFT_BEHIND_S
    asked: set[int] = set()
    while children := _children():
        late = time.monotonic() > deadline
        for pid in children:
            if late or pid not in asked:
                asked.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _children() -> list[int]:
    """Direct children that have not been reaped."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
