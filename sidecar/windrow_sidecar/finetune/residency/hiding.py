"""How many micro-batches visit a layer together, where layers take turns in memory."""

from __future__ import annotations

from collections.abc import Callable

from windrow_sidecar.finetune.plan.estimates import Estimates
from windrow_sidecar.finetune.residency.frozen import FrozenLayers
from windrow_sidecar.finetune.residency.schedule import micro_batches_to_hide
from windrow_sidecar.qos.view import Phase


def micro_batches_a_visit(
    frozen: FrozenLayers | None, estimates: Estimates, tokens: int, most: int
) -> int:
    """Return how many hide a layer's transfer behind what they compute, as both were measured.

    One until a transfer and a forward have been, and where every layer stays in memory.

    Args:
        frozen: the layers; None: they do not take turns.
        estimates: of this device.
        tokens: padded ones of a micro-batch.
        most: that a step can have.
    """
    if frozen is None or frozen.all_fit:
        return 1
    compute_us = estimates.layer_us(Phase.FORWARD, tokens)
    if not compute_us or not frozen.bytes_per_s:
        return 1
    return min(most, micro_batches_to_hide(frozen.slot_bytes, frozen.bytes_per_s, compute_us / 1e6))


def most_that_fit(wanted: int, tokens: int, capacity_tokens: Callable[[int], int]) -> int:
    """Return as many of the wanted micro-batches as fit without any becoming smaller.

    Args:
        wanted: one at least.
        tokens: of each, where there is room.
        capacity_tokens: of each, by how many there are.
    """
    tokens = min(tokens, capacity_tokens(1))
    return next((n for n in range(wanted, 1, -1) if capacity_tokens(n) >= tokens), 1)
