"""Set up the worker's process (niceness, death with the agent), then exec its command.

A program of its own, because code between fork and exec in a process with gRPC's threads can
deadlock. `python -m windrow_sidecar.agent.spawn PARENT_PID [--core=N...] -- COMMAND...`. The
affinity mask says what the device is, and the worker chooses its own share of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_NICE = 19
_FIRST_TO_GO = "1000"


def main(argv: list[str]) -> None:
    """Die with the agent, yield to decode in everything, then run the command."""
    parent, *rest = argv
    separator = rest.index("--") if "--" in rest else len(rest)
    options, command = rest[:separator], rest[separator + 1 :]
    if not command:
        sys.exit("usage: spawn PARENT_PID [--core=N...] -- COMMAND...")
    die_with(int(parent))
    narrow_to(int(option.removeprefix("--core=")) for option in options)
    os.nice(_NICE)
    # Niceness alone decides about shares of time, not about who waits: a woken thread of decode may
    # have to sit out a slice of 3 ms, at each of the 40 barriers of a step. An idle task is
    # preempted at once.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # Raising one's own score needs no right; with a read-only /proc it works as well.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO, encoding="ascii")
    os.execvp(command[0], command)


def die_with(parent: int) -> None:
    """Have the kernel end this process (SIGKILL) with its parent. The flag survives exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # It may have died before the flag was set; then nobody would ever send the signal.
    if os.getppid() != parent:
        sys.exit("the agent is gone")


def narrow_to(cores: Iterable[int]) -> None:
    """Run on these cores only; none: on all that this process has."""
    wanted = set(cores)
    # Decode may have cores that this container does not; then it stays on those that it has.
    if wanted and wanted <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
