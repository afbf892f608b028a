"""Graphs on a processor: each launch runs again what a GPU would have captured.

For equality on the host, over the same addresses and in the same order of launches; nothing is
captured, so what a capture forbids is tried over the stand-in for libcuda.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from windrow_sidecar.compute.captures import Launch, NoMemory, PoolId, Run


class HostReplays:
    """Captures of a device that is a processor (see `captures.GraphCaptures`).

    Args:
        point: called where one graph ends and the next begins.

    Attributes:
        captured: how often something was captured.
        launches: of all graphs.
        starved: captures find no memory.
        current: the share that is in use.
        left: how often memory was given back.
    """

    keeps = False
    driver_bytes = node_bytes = 0

    def __init__(self, point: Callable[[], None] = lambda: None) -> None:
        self._point, self._pools = point, itertools.count(1)
        self.captured = self.launches = self.current = self.left = 0
        self.starved = False
        self._backed = 0

    def share(self) -> int:
        """Return what the test has chosen."""
        return self.current

    def pool(self) -> PoolId:
        """Return a new one."""
        return (0, next(self._pools))

    def ready(self, pool: PoolId) -> bool:
        """Take the memory again."""
        del pool
        self._backed = 1 if self.captured else 0
        return not self.starved

    def capture(self, pool: PoolId, prepare: Launch, run: Run) -> tuple[Launch, ...]:
        """Return a launch that runs all of it, and one that does nothing.

        Raises:
            NoMemory: the test says so.
        """
        del pool
        if self.starved:
            raise NoMemory
        self.captured += 1
        self._backed = 1
        prepare()

        def first() -> None:
            self.launches += 1
            run(self._point)

        def second() -> None:
            self.launches += 1

        return first, second

    def leave(self) -> int:
        """Note it."""
        left, self._backed = self._backed, 0
        self.left += 1
        return left

    def backed_bytes(self) -> int:
        """Return 1 where something was captured and not left since."""
        return self._backed

    def drop(self, forget: Launch) -> None:
        """Run it."""
        forget()

    def end(self, pool: PoolId) -> None:
        """Do nothing."""
