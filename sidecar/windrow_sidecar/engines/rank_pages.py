"""Counters that a rank of decode leaves on its arena's page for rank 0, and rank 0's look at them.

Even counters of a page are decode's. Nobody waits for anybody: a rank adds, rank 0 reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, Inspection, Page
from windrow_sidecar.engines.rank_chunks import borrowed

# The last decision on chunks that the rank has applied; the last of its sets of empty chunks to
# which nothing of it writes any more; nanoseconds that its thread has computed decode's passes.
APPLIED, QUIET, COMPUTED_NS = 0, 2, 4


class RankMeter:
    """Adds up how long this thread has computed decode's passes, on its rank's page.

    That is processor time: a thread that waits for other ranks has none. Passes may overlap, as
    SGLang's do. One thread.

    Args:
        page: of the rank's arena; None: nobody asks.
        clock: nanoseconds of this thread's processor time.
    """

    def __init__(
        self, page: Page | None = None, clock: Callable[[], int] = time.thread_time_ns
    ) -> None:
        self._page, self._clock = page, clock
        self._since_ns = self._open = 0

    def begin(self) -> None:
        """Begin a pass."""
        if self._page is None:
            return
        if not self._open:
            self._since_ns = self._clock()
        self._open += 1

    def end(self) -> None:
        """End the oldest pass; harmless where none has begun."""
        if self._open and self._page is not None:
            now_ns = self._clock()
            self._page.add(COMPUTED_NS, now_ns - self._since_ns)
            self._since_ns = now_ns
            self._open -= 1


class RankFigures(NamedTuple):
    """Figures of one rank since its start.

    Attributes:
        computed_s: processor time of the thread that computes decode's passes.
        chunks_lent: that its worker has now, those that are asked back among them.
    """

    computed_s: float
    chunks_lent: int


class RankPages:
    """The arenas of all ranks, as rank 0 looks at them for its figures. Any one thread.

    Args:
        own: rank 0's.
        others: of the ranks from 1 on.
    """

    def __init__(self, own: Arena, others: Sequence[Inspection]) -> None:
        self._own, self._others = own, others

    def figures(self) -> list[RankFigures]:
        """Return the figures of each rank, in their order."""
        found = [(self._own.page.add(COMPUTED_NS, 0), self._own.states())]
        found += [(other.counter(COMPUTED_NS), other.states()) for other in self._others]
        return [RankFigures(ns / 1e9, len(borrowed(states))) for ns, states in found]


def look_at_others(run_dir: RunDir, ranks: int) -> list[Inspection]:
    """Return the arenas of the ranks from 1 on, which serve them in the slot's run directory.

    Raises AttachError: one cannot be looked at.
    """
    sockets = [run_dir.of_rank(rank).arena_socket() for rank in range(1, ranks)]
    return [Inspection.open(str(socket)) for socket in sockets]
