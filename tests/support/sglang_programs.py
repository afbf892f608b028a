"""Run programs in SGLang's environment by forking a process that has its imports.

SGLang's imports take ten seconds of CPU, which most of these programs take for little else. One
process for each process of pytest imports them and forks each program, which then runs from its
first line (`runpy`) with the arguments and the environment that it would have had.

A program whose environment differs in what libraries read as they are loaded is started by exec,
and each is with WINDROW_TESTS_START_BY_EXEC.
This file is run in SGLang's environment too, where it is the process that forks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NoReturn

ENV_OFF = "WINDROW_TESTS_START_BY_EXEC"  # as support.forked_start has it

AHEAD = (
    "sglang.srt.managers.scheduler",  # first, as where SGLang starts its scheduler
    "sglang.srt.plugins",
    "sglang.srt.runtime_context",
    "sglang.srt.models.registry",
)
LOADED_WITHIN_S = 300.0
# That every program here has, whichever test is the first.
COMMON = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Programs:
    """The process that forks, started at its first program; ended by `close`."""

    def __init__(self, python: Path, log: Path) -> None:
        self._python, self._log = python, log
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    def run(
        self, words: list[str], environment: Mapping[str, str], output: IO[bytes], timeout_s: float
    ) -> int:
        """Run a program to its end; returns its exit code, of a signal as `Popen` gives it.

        Args:
            words: the path of the program, then its arguments.
            environment: all of its environment; `COMMON` is added where it is not there.
            output: both of its streams go there.
            timeout_s: until it is killed.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        environment = COMMON | dict(environment)
        process = None if os.environ.get(ENV_OFF) else self._loaded(environment)
        if process is None:
            return subprocess.run(
                [str(self._python), *words],
                env=environment,
                stdout=output,
                stderr=output,
                timeout=timeout_s,
                check=False,
            ).returncode
        order = {"words": words, "environment": environment, "output": output.name}
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        pid = self._heard("pid", LOADED_WITHIN_S)
        assert pid is not None, self._said()
        code = self._heard("code", timeout_s)
        if code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            assert self._heard("code", LOADED_WITHIN_S) is not None, self._said()
            raise subprocess.TimeoutExpired(words, timeout_s)
        return code

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.wait(60)
            self._process.stdout.close()

    def _loaded(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """Return the process that forks; None: one with another environment is there already."""
        if self._process is None:
            self._environment = _read_at_import(environment)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [str(self._python), "-P", __file__],  # a neighbour is called requests
                    env=dict(environment),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    bufsize=0,
                )
            assert self._heard("threads", LOADED_WITHIN_S) == 1, self._said()
        return self._process if _read_at_import(environment) == self._environment else None

    def _heard(self, name: str, timeout_s: float) -> int | None:
        """Return what the process says next; None: it does not say it in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return None
        said, _, number = self._process.stdout.readline().decode().partition(" ")
        assert said == name, f"{said!r} instead of {name!r}: {self._said()}"
        return int(number)

    def _said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what may have changed while modules were loaded: all but this project's own."""
    own = ("WINDROW_", "PYTEST_")  # the plugin reads them in each process, once it is loaded there
    return {name: value for name, value in environment.items() if not name.startswith(own)}


# What follows runs in SGLang's environment.


def main() -> None:
    """Import, then fork a program for each line of standard input, one after the other."""
    # Both pipes are this process's alone: programs, and what modules print, have other streams.
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    gc.disable()
    for module in AHEAD:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what was imported stays in memory that programs share
    gc.enable()
    # A process with one thread alone can be forked safely.
    answers.write(b"threads %d\n" % len(os.listdir("/proc/self/task")))
    for line in orders:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            orders.close()
            answers.close()
            _become(order)
        answers.write(b"pid %d\n" % pid)
        _, status = os.waitpid(pid, 0)
        answers.write(b"code %d\n" % os.waitstatus_to_exitcode(status))


def _become(order: dict) -> NoReturn:
    output = os.open(order["output"], os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["words"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001, as the interpreter does
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
