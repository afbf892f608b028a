"""Try in a process of its own whether CUDA starts as a client of an MPS daemon.

The server queues the clients of another user, so a process may hang in CUDA's initialisation
instead of failing. A trial that hangs is killed, and the process that asked has touched nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from windrow.conditions import Reason
from windrow_sidecar import _core
from windrow_sidecar.compute.sharing import Lack, find_mps_lack, green_missing

_REAPED_WITHIN_S = 0.2
# What a trial is run as; with `--stay` it remains a client until its input ends.
COMMAND = (sys.executable, "-m", "windrow_sidecar.compute.mps_trial")
STAY = "--stay"


def try_client(environ: Mapping[str, str], within_s: float) -> Lack | None:
    """Start a process with that environment; None: it became a client in time.

    A process that takes longer is killed, and is not waited for beyond a moment.
    """
    trial = subprocess.Popen(
        COMMAND,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = trial.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        end_group(trial.pid)
        with suppress(subprocess.TimeoutExpired):
            trial.communicate(timeout=_REAPED_WITHIN_S)
        return hanging(within_s)
    return read_answer(out, err)


def hanging(within_s: float) -> Lack:
    """Return what a trial that does not answer means."""
    text = f"a process under the daemon did not initialise CUDA within {within_s:.1f} s"
    return Lack(Reason.MPS_CLIENT_HANGS, text)


def read_answer(out: str, err: str) -> Lack | None:
    """Return what a trial has found, by what it wrote."""
    try:
        code, text = json.loads(out)
    except ValueError:
        last = "".join(err.strip().splitlines()[-1:]) or "it said nothing"
        return Lack(Reason.MPS_NOT_CONNECTED, f"a process under the daemon failed: {last}")
    return Lack(Reason(code), text) if code else None


def end_group(pid: int) -> None:
    """Kill a trial, which leads a process group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _found() -> Lack | None:
    try:
        if missing := green_missing("cuda"):
            return Lack(Reason.NO_GREEN_CONTEXTS, f"no green contexts: {missing}")
        return find_mps_lack("cuda", os.environ)
    except _core.Error as error:
        return Lack(Reason.MPS_NOT_CONNECTED, str(error))


def main() -> int:
    """Print `[code, text]` of what is missing, `["", ""]` where nothing is."""
    lack = _found()
    print(json.dumps([lack.code, lack.text] if lack else ["", ""]), flush=True)
    if STAY in sys.argv:
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
