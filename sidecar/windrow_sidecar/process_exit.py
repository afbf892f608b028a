"""Run a program and end its process without freeing what it imported."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def run_to_exit(program: Callable[[], object]) -> NoReturn:
    """Run a program, then exit as the interpreter does, but leave memory to the kernel.

    The interpreter frees every object as it exits. With torch, transformers and peft imported that
    is half a second of CPU; in a process that was forked with them it is a second, since each page
    that is shared with the parent is copied first.

    A process that has loaded CUDA's driver exits in the ordinary way: the driver ends its contexts
    there, and a client of MPS that leaves work behind would harm the others.

    Args:
        program: returns what `sys.exit` takes, or raises.
    """
    code: object = 0
    try:
        code = program()
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001, as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if _has_cuda_driver():
        gc.unfreeze()  # what is frozen is never freed, and Triton's module would report leaks
        sys.exit(code)  # type: ignore[arg-type]
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(code or 0) & 0xFF)  # type: ignore[call-overload]


def _has_cuda_driver() -> bool:
    try:
        return "/libcuda.so" in Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return True
