"""Drivers whose n-th call goes wrong: what to test allocators, arenas and engines against.

    driver = FaultyDriver("host")
    driver.fail("map", 2)
    Arena.create(geometry, reserved_chunks=1, driver=driver)  # raises Error, nothing is left

Faults come by the number of a call, never by chance or time, so a sweep over n reaches every call.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

from windrow_sidecar._core import Driver, FaultyDriver

__all__ = ["FaultyDriver", "each_call_failing", "kill_at"]


def each_call_failing(inner: Driver | str) -> Iterator[FaultyDriver]:
    """Yield drivers whose 1st, 2nd, 3rd ... call fails, until one was used whose fault was not met.

    Use each once; the last one has let everything through.
    """
    n = 0
    while True:
        n += 1
        driver = FaultyDriver(inner)
        driver.fail_any(n)
        yield driver
        if driver.fired == 0:
            return


def kill_at(driver: FaultyDriver, call: str, n: int, pid: Callable[[], int] = os.getpid) -> None:
    """Kill a process (this one, if no other is named) just before the n-th such call."""
    driver.before(call, n, lambda: os.kill(pid(), signal.SIGKILL))
