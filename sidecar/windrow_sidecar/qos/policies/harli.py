"""Harli's scheduler: the feasible pair whose predicted latency comes closest to the objective.

Source: Harli, section on the QoS-guaranteed scheduler. Its 45 pairs are `levels.pair_levels`; a
device that has fewer gives those it has. Departures: equal predictions go to the larger share of
the worker (the paper names no rule), and an idle decode leaves the device to the worker.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from windrow_sidecar.qos.policies.base import (
    Context,
    alone,
    bound_us,
    decode_idle,
    has_work,
    share,
)
from windrow_sidecar.qos.view import Grant, Offer, View


class Harli:
    """The paper's rule. It keeps an allocation that is still valid; `repick="step"` does not."""

    name: ClassVar[str] = "harli"

    def __init__(self, repick: Literal["invalid", "step"] = "invalid") -> None:
        self._keep_valid = repick == "invalid"

    @property
    def option(self) -> str:
        """The variant that was asked for."""
        return "" if self._keep_valid else "step"

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Pick a pair; (all, 0) when the worker starves or nothing is feasible."""
        if not has_work(offer):
            return alone(ctx)
        if view.batch == 0:
            return decode_idle(ctx)
        bound = bound_us(view, ctx)
        predicted = ctx.predicted_us
        if self._keep_valid and 0 < ctx.current < ctx.allowed and predicted[ctx.current] <= bound:
            return share(ctx, ctx.current)
        best = 0
        for index in range(1, ctx.allowed):
            # Splits come by growing share of the worker, so ">=" gives it the tie.
            if predicted[index] <= bound and (not best or predicted[index] >= predicted[best]):
                best = index
        return share(ctx, best) if best else alone(ctx)
