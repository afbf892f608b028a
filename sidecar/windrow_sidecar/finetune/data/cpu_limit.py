"""End Python code of the calling thread that computes for too long: the loops of a template.

Time that the thread computes counts, not the time that passes: a worker beside decode waits for
most of it. What runs within one call of C code is ended when that call returns.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LOOK_EVERY_S = 0.2
# A thread that has nothing to look at for so long ends.
_REST_S = 5.0


class ComputesTooLong(BaseException):
    """Raised in the thread that computes; no `except Exception` of a template's code keeps it."""


@dataclass(slots=True)
class _Watched:
    thread: int
    until_s: float  # of the thread's own clock
    ended: bool = False


class _Watch:
    """A thread that looks now and then at how long another one has computed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watched: _Watched | None = None
        self.pid = os.getpid()
        self.runs = False

    def begin(self, seconds: float) -> _Watched:
        watched = _Watched(threading.get_ident(), time.thread_time() + seconds)
        with self.lock:
            self.watched = watched
            if not self.runs:
                self.runs = True
                threading.Thread(target=self._look, name="cpu-limit", daemon=True).start()
        return watched

    def _look(self) -> None:
        rested_s = 0.0
        while True:
            time.sleep(_LOOK_EVERY_S)
            with self.lock:
                watched = self.watched
                rested_s = 0.0 if watched else rested_s + _LOOK_EVERY_S
                if rested_s >= _REST_S:
                    self.runs = False
                    return
                if watched is None or watched.ended:
                    continue
                clock = time.pthread_getcpuclockid(watched.thread)
                if time.clock_gettime(clock) >= watched.until_s:
                    watched.ended = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(watched.thread), ctypes.py_object(ComputesTooLong)
                    )


_of_thread = threading.local()


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Hold while the calling thread may compute for so long.

    Raises:
        ComputesTooLong: it has computed for longer.
    """
    watch: _Watch | None = getattr(_of_thread, "watch", None)
    if watch is None or watch.pid != os.getpid():  # no thread lives on in a fork
        watch = _of_thread.watch = _Watch()
    watched = watch.begin(seconds)
    try:
        yield
    finally:
        with watch.lock:
            watch.watched = None
        if watched.ended:
            _await_end()


def _await_end() -> None:
    """Let the exception come that is on its way, unless it has come."""
    if isinstance(_current(), ComputesTooLong):
        return
    for _ in range(100):
        time.sleep(0.001)


def _current() -> BaseException | None:
    return sys.exception()
