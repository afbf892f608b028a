"""The next few tasklets of a group, found together.

Between two tasklets the caches hold the layer that has just run, so finding one of them costs four
times what the next costs right behind it.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from windrow_sidecar.finetune.plan.frontier import Frontier
from windrow_sidecar.finetune.plan.grain import Grain
from windrow_sidecar.finetune.plan.orders import Order, listing
from windrow_sidecar.finetune.tasklets import Tasklet

# As many as are found at once. What is learned of tasklets meanwhile changes only what follows.
AHEAD = 8


class Ahead:
    """What an order will run next, as far as the frontier allows it.

    Args:
        order: of the tasklets.
        frontier: of the group; others move it, and say so.
    """

    def __init__(self, order: Order, frontier: Frontier) -> None:
        self._order, self._frontier = order, frontier
        self._grain: Grain | None = None
        self._found: deque[Tasklet] = deque()

    def peek(self, grain: Grain) -> Tasklet | None:
        """Return the next one; None: the group is through. Another grain begins a new plan."""
        if grain != self._grain:
            self._grain = grain
            self._found.clear()
        if not self._found:
            self._found.extend(islice(listing(self._order, self._frontier, grain), AHEAD))
        return self._found[0] if self._found else None

    def ran(self, tasklet: Tasklet) -> None:
        """That one has run; the plan goes on if it was the next, else it is made anew."""
        if self._found and self._found[0] is tasklet:
            self._found.popleft()
        else:
            self._found.clear()

    def forget(self) -> None:
        """Others have moved the frontier: make the plan anew."""
        self._found.clear()
