"""In which order the tasklets of a group run.

An order looks at the frontier and names the next tasklet; nothing else is remembered, so windows
may change from one to the next, and a plan may be made anew at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from windrow_sidecar.finetune.plan.frontier import Frontier, tasklet_of
from windrow_sidecar.finetune.plan.grain import Grain, WholeRows
from windrow_sidecar.finetune.tasklets import MicroBatch, Tasklet, Window
from windrow_sidecar.qos.view import Phase

_WHOLE = WholeRows()


Order = Callable[[Frontier, Grain], Tasklet | None]


def layer_major(at: Frontier, grain: Grain) -> Tasklet | None:
    """Every micro-batch passes a layer before any passes the next: a layer is visited twice."""
    return _layers_up(at, grain) or _losses(at, grain) or _layers_down(at)


def token_major(at: Frontier, grain: Grain) -> Tasklet | None:
    """Each window goes up through all layers and to its loss before the next one does."""
    for micro in at.group:
        if at.loss(micro) < min(micro.width, at.up(micro, at.depth - 1)):
            return _loss(at, micro, grain)
        if at.up(micro, at.depth - 1) < micro.width:
            return _window_up(at, micro, grain)
    return _layers_down(at)


def interleaved(at: Frontier, grain: Grain) -> Tasklet | None:
    """Micro-batches take turns at each layer, whatever the phase of the one that is behind."""
    behind = sorted(at.group, key=at.passed)
    for micro in behind:
        alone = _layers_up(at, grain, (micro,)) or _losses(at, grain, (micro,))
        if found := alone or _layers_down(at, (micro,)):
            return found
    return None


ORDERS: dict[str, Order] = {
    "layer-major": layer_major,
    "token-major": token_major,
    "interleaved": interleaved,
}


def unfold(order: Order, at: Frontier, grain: Grain = _WHOLE) -> Iterator[Tasklet]:
    """Yield what an order will run from here on, if nothing changes meanwhile."""
    at = at.copy()
    while (tasklet := order(at, grain)) is not None:
        at.advance(tasklet)
        yield tasklet


def next_of(order: Order, at: Frontier, grain: Grain) -> Tasklet | None:
    """Return the next tasklet; over several layers where the order goes on so and they fit."""
    made = order(at, grain)
    if made is None or not grain.fits(made.with_another_layer()):
        return made  # most often, so without a look ahead, which takes as long as ten of these
    for following in islice(unfold(order, at, grain), 1, None):
        longer = made.joined(following)
        if longer is None or not grain.fits(longer):
            break
        made = longer
    return made


def listing(order: Order, at: Frontier, grain: Grain) -> Iterator[Tasklet]:
    """Yield what `next_of` will return from here on, if nothing changes meanwhile."""
    at = at.copy()
    while (tasklet := next_of(order, at, grain)) is not None:
        at.advance(tasklet)
        yield tasklet


def _layers_up(
    at: Frontier, grain: Grain, group: tuple[MicroBatch, ...] | None = None
) -> Tasklet | None:
    for layer in range(at.depth):
        for micro in group or at.group:
            begin, limit = at.up(micro, layer), at.above(micro, layer)
            if begin < limit:
                end = min(limit, begin + grain.cut(Phase.FORWARD, micro))
                return tasklet_of(Phase.FORWARD, micro, layer, Window(begin, end))
    return None


def _window_up(at: Frontier, micro: MicroBatch, grain: Grain) -> Tasklet:
    """Move the window on its way one layer up, or let the next one in."""
    for layer in range(at.depth - 1, 0, -1):
        begin, limit = at.up(micro, layer), at.above(micro, layer)
        if begin < limit:
            return tasklet_of(Phase.FORWARD, micro, layer, Window(begin, limit))
    begin = at.up(micro, 0)
    end = min(micro.width, begin + grain.cut(Phase.FORWARD, micro))
    return tasklet_of(Phase.FORWARD, micro, 0, Window(begin, end))


def _losses(
    at: Frontier, grain: Grain, group: tuple[MicroBatch, ...] | None = None
) -> Tasklet | None:
    for micro in group or at.group:
        if at.loss(micro) < micro.width:
            return _loss(at, micro, grain)
    return None


def _loss(at: Frontier, micro: MicroBatch, grain: Grain) -> Tasklet:
    begin = at.loss(micro)
    end = min(at.up(micro, at.depth - 1), begin + grain.cut(Phase.LOSS, micro))
    return tasklet_of(Phase.LOSS, micro, at.depth, Window(begin, end))


def _layers_down(at: Frontier, group: tuple[MicroBatch, ...] | None = None) -> Tasklet | None:
    for layer in reversed(range(at.depth)):
        for micro in group or at.group:
            window = at.last_window(micro, layer)
            if window is not None:
                return tasklet_of(Phase.BACKWARD, micro, layer, window)
    return None
