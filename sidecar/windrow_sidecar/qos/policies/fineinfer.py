"""FineInfer's deferred continuous batching: requests wait a little, finetuning uses the time.

Source: FineInfer, Alg. 1: a queued request r that has waited d_r is taken once d_r + t_f reaches
its bound, t_f being one finetune iteration; the batch decodes until it is empty, then finetune
iterations run until the next request is due.
Departures:
- `switch="tasklet"`: the worker stops at a tasklet instead of an iteration, so that t_f is the
  bound on what is in flight. `switch="iteration"` is the paper's: an iteration that has begun runs
  to its end, for as long as the bound on waiting lasts.
- Requests are held before they are admitted to decode: their prompts are computed elsewhere.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from windrow_sidecar.qos.policies.base import (
    Context,
    alone,
    decode_idle,
    has_work,
    iteration_us,
)
from windrow_sidecar.qos.view import Grant, Offer, Phase, View


class FineInfer:
    """The worker while the batch is empty and no request is due; decode alone otherwise."""

    name: ClassVar[str] = "fineinfer"

    def __init__(self, switch: Literal["tasklet", "iteration"] = "tasklet") -> None:
        self._whole_iterations = switch == "iteration"

    @property
    def option(self) -> str:
        """The variant that was asked for."""
        return "iteration" if self._whole_iterations else ""

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Hold admission until the request that has waited longest is due."""
        if not has_work(offer):
            return alone(ctx)
        hold_ns = self._hold_until_ns(view, offer, ctx)
        if view.batch > 0:
            return alone(ctx)._replace(hold_admission_until_ns=hold_ns)
        if view.waiting and not hold_ns:
            return alone(ctx)
        return decode_idle(ctx)._replace(hold_admission_until_ns=hold_ns)

    def _hold_until_ns(self, view: View, offer: Offer, ctx: Context) -> int:
        """Return when the oldest waiting request is due; 0: it is."""
        last_us = ctx.deferral_us - view.waited_us
        switch_us: float = ctx.in_flight_bound_us
        if self._whole_iterations:
            switch_us = 0 if view.batch == 0 and mid_iteration(offer) else iteration_us(offer, ctx)
        left_us = last_us - switch_us
        return view.start_ns + int(left_us * 1000) if left_us > 0 else 0


def mid_iteration(offer: Offer) -> bool:
    """Return whether the next tasklet goes on with a micro-batch that has begun."""
    return not (offer.phase in (Phase.NONE, Phase.FORWARD) and offer.layer_begin == 0)
