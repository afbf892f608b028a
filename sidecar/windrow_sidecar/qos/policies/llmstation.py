"""LLMStation's planner: as many tasklets beside a decode step as its objective leaves room for.

Source: LLMStation, Eq. 1: N_p <= (S - N_all * l_d0) * l_d / ((l_d - l_d0) * l_p), where a decode
layer takes l_d0 alone and l_d beside a tasklet, a tasklet takes l_p, and decode has N_all layers.
Departures:
- Eq. 1 is clamped: nothing when decode alone takes S; at most all layers have company, also where
  a tasklet costs decode nothing (l_d <= l_d0) and Eq. 1 divides by zero.
- The paper's device is not split. Where ours is, N_p is computed for every split and the split
  with the most tasklets wins, the larger share where two have as many.
- l_d0 and l_d are the predicted step over N_all: the predictor has the paper's record cache in
  front (`qos/records.py`) and the linear model behind it. l_p is the worker's own estimate; where
  it has none yet, or a tasklet takes longer than Eq. 1 leaves beside one step, the grant is in
  microseconds instead of tasklets: the worker runs a part of it.
- The memory check counts what the tasklets keep against what is free in the arena.
"""

from __future__ import annotations

from typing import ClassVar

from windrow_sidecar.qos.policies.base import (
    Context,
    alone,
    bound_us,
    decode_idle,
    has_work,
    share,
    tasklet_us,
)
from windrow_sidecar.qos.view import Grant, Offer, View


def accompanied_layers(objective: float, layers: int, solo: float, beside: float) -> int:
    """N_d: how many of decode's layers may have a tasklet beside them.

    `solo`, `beside`: microseconds of one decode layer, l_d0 and l_d.
    """
    if layers * solo >= objective:
        return 0
    if beside <= solo:
        return layers
    return min(layers, int((objective - layers * solo) / (beside - solo)))


class LlmStation:
    """Eq. 1 before every step."""

    name: ClassVar[str] = "llmstation"
    option: ClassVar[str] = ""

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Plan N_p for each split and take the best; decode alone where no tasklet fits."""
        if not has_work(offer):
            return alone(ctx)
        if view.batch == 0:
            return decode_idle(ctx)
        bound, layers = bound_us(view, ctx), ctx.layers
        best, best_tasklets, best_us = 0, 0.0, 0.0
        for index in range(1, ctx.allowed):
            solo, beside = ctx.solo_us[index] / layers, ctx.predicted_us[index] / layers
            run_us = accompanied_layers(bound, layers, solo, beside) * beside
            # Until it has been measured, a tasklet counts as faster by its units.
            units = ctx.levels.splits[index].finetune_units
            tasklets = run_us / (tasklet_us(offer, ctx, units) or 1e6 / units)
            if tasklets >= best_tasklets and run_us > 0:
                best, best_tasklets, best_us = index, tasklets, run_us
        if not best:
            return alone(ctx)
        fitting = _that_fit(view, offer, ctx)
        if not fitting:
            return alone(ctx)
        measured = tasklet_us(offer, ctx, ctx.levels.splits[best].finetune_units)
        count = min(int(best_tasklets), fitting) if measured else 0
        if not count:
            return share(ctx, best)._replace(budget_us=max(1, int(best_us)))
        return share(ctx, best)._replace(n_tasklets=count)


def _that_fit(view: View, offer: Offer, ctx: Context) -> int:
    """Return how many tasklets' memory is free, where the worker's tensors are in lent chunks."""
    if not (offer.held_chunks and ctx.chunk_bytes and offer.memory_delta_bytes > 0):
        return 1 << 30
    return max(0, view.free_chunks) * ctx.chunk_bytes // offer.memory_delta_bytes
