"""Decide which frozen layers are loaded and which are evicted next: plain data.

A group of micro-batches climbs the layers and comes down again, so the layer that is needed last is
known (Belady's rule is exact here): what goes is what is farthest in the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

# One layer computes while the next one comes.
LEAST_LAYERS = 2


def coming(depth: int, layer: int, *, up: bool, returns: bool = True) -> tuple[int, ...]:
    """Return all layers in the order of their next visit, from the one that runs now.

    Args:
        depth: number of layers.
        layer: runs now.
        up: whether on the way up (forward).
        returns: whether a backward follows; an evaluation begins at the bottom again.
    """
    above, below = range(layer + 1, depth), range(layer - 1, -1, -1)
    if not up:
        return (layer, *below, *above)
    return (layer, *above, *(below if returns else range(layer)))


@dataclass(frozen=True, slots=True)
class Moves:
    """Layers to evict, then layers to load, in this order."""

    evict: tuple[int, ...]
    load: tuple[int, ...]


def moves(order: Sequence[int], held: Set[int], capacity: int) -> Moves:
    """Return which layers to load and evict so that the next `capacity` layers are in memory.

    Args:
        order: see `coming`; the first is never evicted while `capacity` is 1 at least.
        held: in memory or on their way there.
        capacity: how many layers fit.
    """
    return _moves(order, order[:capacity], held, capacity)


def next_moves(order: Sequence[int], held: Set[int], capacity: int) -> Moves:
    """Return the moves that bring no more than the first layer and the one after it.

    A pass that begins at the bottom again whenever it is through needs most what it has just left:
    loading further ahead would take the place of layers that stay else, and with L layers of which
    K fit read nearly L a pass. So it reads L - K + 2 at most.

    Args:
        order: see `coming`.
        held: in memory or on their way there.
        capacity: how many layers fit.
    """
    return _moves(order, order[: min(capacity, LEAST_LAYERS)], held, capacity)


def _moves(order: Sequence[int], wanted: Sequence[int], held: Set[int], capacity: int) -> Moves:
    load = tuple(layer for layer in wanted if layer not in held)
    kept = set(wanted)
    spare = [layer for layer in reversed(order) if layer in held and layer not in kept]
    too_many = max(0, len(held) + len(load) - capacity)
    return Moves(tuple(spare[:too_many]), load)


def micro_batches_to_hide(layer_bytes: int, bytes_per_s: float, compute_s: float) -> int:
    """Return how many micro-batches of one visit compute for as long as a transfer takes.

    Args:
        layer_bytes: to transfer for each visit.
        bytes_per_s: of the copy.
        compute_s: of one micro-batch in one layer, forward (the shorter way).
    """
    return max(1, -int(-layer_bytes // max(1.0, bytes_per_s * compute_s)))
