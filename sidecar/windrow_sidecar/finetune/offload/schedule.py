"""Which frozen layers should be in memory, which go and which come: decisions over plain data.

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
    """What to do, in this order."""

    evict: tuple[int, ...]
    load: tuple[int, ...]


def moves(order: Sequence[int], held: Set[int], capacity: int) -> Moves:
    """Bring the nearest `capacity` layers in; what goes is the farthest, and only where it must.

    Args:
        order: see `coming`; the first is never evicted while `capacity` is 1 at least.
        held: in memory or on their way there.
        capacity: how many layers fit.
    """
    wanted = order[:capacity]
    load = tuple(layer for layer in wanted if layer not in held)
    kept = set(wanted)
    spare = [layer for layer in reversed(order) if layer in held and layer not in kept]
    too_many = max(0, len(held) + len(load) - capacity)
    return Moves(tuple(spare[:too_many]), load)


def micro_batches_to_hide(layer_bytes: int, bytes_per_s: float, compute_s: float) -> int:
    """How many micro-batches a visit must carry so that the next layer's transfer hides behind it.

    Args:
        layer_bytes: to transfer for each visit.
        bytes_per_s: of the copy.
        compute_s: of one micro-batch in one layer, forward (the shorter way).
    """
    return max(1, -int(-layer_bytes // max(1.0, bytes_per_s * compute_s)))
