"""Orders in which the tasklets of a group may run, and the lookahead over one of them.

An order looks at the progress and names the next tasklet; nothing else is remembered, so windows
may change from one to the next, and a plan may be remade at any moment.

Between two tasklets the caches hold the layer that has just run, so finding one of them costs four
times what the next costs right behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from windrow_sidecar.finetune.engine.group_progress import GroupProgress, tasklet_of
from windrow_sidecar.finetune.engine.sizing import TaskletSizing, WholeRows
from windrow_sidecar.finetune.tasklets import MicroBatch, Tasklet, TokenWindow
from windrow_sidecar.qos.view import Phase

_WHOLE = WholeRows()


Order = Callable[[GroupProgress, TaskletSizing], Tasklet | None]


def layer_major(at: GroupProgress, sizing: TaskletSizing) -> Tasklet | None:
    """Run every micro-batch through a layer before the next layer: each layer is visited twice."""
    return _layers_up(at, sizing) or _losses(at, sizing) or _layers_down(at)


def token_major(at: GroupProgress, sizing: TaskletSizing) -> Tasklet | None:
    """Run each token window through all layers and its loss before the next window."""
    for micro in at.group:
        if at.loss(micro) < min(micro.width, at.up(micro, at.depth - 1)):
            return _loss(at, micro, sizing)
        if at.up(micro, at.depth - 1) < micro.width:
            return _window_up(at, micro, sizing)
    return _layers_down(at)


def interleaved(at: GroupProgress, sizing: TaskletSizing) -> Tasklet | None:
    """Alternate between micro-batches at each layer, whatever phase each of them is in."""
    behind = sorted(at.group, key=at.passed)
    for micro in behind:
        alone = _layers_up(at, sizing, (micro,)) or _losses(at, sizing, (micro,))
        if found := alone or _layers_down(at, (micro,)):
            return found
    return None


ORDERS: dict[str, Order] = {
    "layer-major": layer_major,
    "token-major": token_major,
    "interleaved": interleaved,
}


def unfold(order: Order, at: GroupProgress, sizing: TaskletSizing = _WHOLE) -> Iterator[Tasklet]:
    """Yield the tasklets that an order runs from here on, one layer each."""
    at = at.copy()
    while (tasklet := order(at, sizing)) is not None:
        at.note(tasklet, tasklet.layer)
        yield tasklet


def next_of(order: Order, at: GroupProgress, sizing: TaskletSizing) -> Tasklet | None:
    """Return the next tasklet; it spans several layers where order and sizing allow that."""
    return next(listing(order, at, sizing), None)


def listing(order: Order, at: GroupProgress, sizing: TaskletSizing) -> Iterator[Tasklet]:
    """Yield the tasklets that `next_of` returns from here on, if nothing changes meanwhile."""
    at, made = at.copy(), None
    while (found := order(at, sizing)) is not None:
        if made is not None:
            longer = made.joined(found)
            if longer is not None and sizing.fits(longer):
                at.note(found, found.layer)
                made = longer
                continue
            yield made
        made = _stretched(found, at.layers_behind(found), sizing)
        # An order names what may run; what runs is checked before it does.
        at.note_all(made)
    if made is not None:
        yield made


def _stretched(tasklet: Tasklet, most: int, sizing: TaskletSizing) -> Tasklet:
    """Return a tasklet with as many of the `most` layers behind it as fit, found by halving."""
    fitting, step = 0, 1
    made = tasklet
    while fitting < most and step:
        more = min(most, fitting + step)
        longer = tasklet.with_further(more)
        if sizing.fits(longer):
            fitting, made, step = more, longer, 2 * step
        elif step == 1:
            break
        else:
            most, step = more - 1, max(1, (more - 1 - fitting) // 2)
    return made


def _layers_up(
    at: GroupProgress, sizing: TaskletSizing, group: tuple[MicroBatch, ...] | None = None
) -> Tasklet | None:
    """Run the lowest layer that may run; of several micro-batches there, the first."""
    lowest: tuple[int, int, int] | None = None
    for micro in group or at.group:
        found = at.lowest_to_run(micro)
        if found is not None and (lowest is None or found[0] < lowest[0]):
            lowest, of = found, micro
    if lowest is None:
        return None
    layer, begin, limit = lowest
    end = min(limit, begin + sizing.cut(Phase.FORWARD, of))
    return tasklet_of(Phase.FORWARD, of, layer, TokenWindow(begin, end))


def _window_up(at: GroupProgress, micro: MicroBatch, sizing: TaskletSizing) -> Tasklet:
    """Move the window on its way one layer up, or let the next one in."""
    for layer in range(at.depth - 1, 0, -1):
        begin, limit = at.up(micro, layer), at.above(micro, layer)
        if begin < limit:
            return tasklet_of(Phase.FORWARD, micro, layer, TokenWindow(begin, limit))
    begin = at.up(micro, 0)
    end = min(micro.width, begin + sizing.cut(Phase.FORWARD, micro))
    return tasklet_of(Phase.FORWARD, micro, 0, TokenWindow(begin, end))


def _losses(
    at: GroupProgress, sizing: TaskletSizing, group: tuple[MicroBatch, ...] | None = None
) -> Tasklet | None:
    for micro in group or at.group:
        if at.loss(micro) < micro.width:
            return _loss(at, micro, sizing)
    return None


def _loss(at: GroupProgress, micro: MicroBatch, sizing: TaskletSizing) -> Tasklet:
    begin = at.loss(micro)
    end = min(at.up(micro, at.depth - 1), begin + sizing.cut(Phase.LOSS, micro))
    return tasklet_of(Phase.LOSS, micro, at.depth, TokenWindow(begin, end))


def _layers_down(at: GroupProgress, group: tuple[MicroBatch, ...] | None = None) -> Tasklet | None:
    """Run the highest layer back that has run up; of several micro-batches there, the first."""
    highest: tuple[int, TokenWindow] | None = None
    for micro in group or at.group:
        found = at.highest_window(micro)
        if found is not None and (highest is None or found[0] > highest[0]):
            highest, of = found, micro
    return None if highest is None else tasklet_of(Phase.BACKWARD, of, *highest)


# As many as are found at once. What is learned of tasklets meanwhile changes only what follows.
AHEAD = 8


class Lookahead:
    """Find the next tasklets of an order ahead of time, and keep those that are still valid.

    Args:
        order: of the tasklets.
        progress: of the group; others move it, and say so.
    """

    def __init__(self, order: Order, progress: GroupProgress) -> None:
        self._order, self._progress = order, progress
        self._sizing: TaskletSizing | None = None
        self._found: deque[Tasklet] = deque()

    def peek(self, sizing: TaskletSizing) -> Tasklet | None:
        """Return the next one; None: the group is through. Another sizing begins a new plan."""
        if sizing is not self._sizing and sizing != self._sizing:
            self._sizing = sizing
            self._found.clear()
        if not self._found:
            self._found.extend(islice(listing(self._order, self._progress, sizing), AHEAD))
        return self._found[0] if self._found else None

    def ran(self, tasklet: Tasklet) -> None:
        """Note that a tasklet has run; the plan goes on if it was the next, else it is remade."""
        if self._found and self._found[0] is tasklet:
            self._found.popleft()
        else:
            self._found.clear()

    def forget(self) -> None:
        """Remake the plan: other code has moved the progress."""
        self._found.clear()
