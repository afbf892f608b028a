"""Decode and worker in turns on the whole device, as a GPU without MPS shares it.

Source: temporal sharing as LLMStation's and FlexLLM's baselines have it. `unit="gap"`: each step
is begun so late that it ends at its objective, and the worker has the time before it; so it keeps
(S - t0) / S of the device. `unit="iteration"`: the worker runs whole iterations while decode is
idle, and requests wait for the end of the one that has begun, up to the bound on waiting.
An engine that cannot begin a step later gives the worker the time in which decode is idle.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from windrow_sidecar.qos.policies.base import (
    Context,
    alone,
    bound_us,
    decode_idle,
    has_work,
    in_turns,
)
from windrow_sidecar.qos.policies.fineinfer import mid_iteration
from windrow_sidecar.qos.view import Grant, Offer, View

# Shorter gaps are over before the worker has woken and a tasklet's caches are warm.
LEAST_GAP_US = 500


class Temporal:
    """Gaps before steps, or whole iterations between them."""

    name: ClassVar[str] = "temporal"

    def __init__(self, unit: Literal["gap", "iteration"] = "gap") -> None:
        self._whole_iterations = unit == "iteration"

    @property
    def option(self) -> str:
        """The variant that was asked for."""
        return "iteration" if self._whole_iterations else ""

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """The worker before the step or not at all."""
        if not has_work(offer):
            return alone(ctx)
        if view.batch == 0:
            return self._idle(view, offer, ctx)
        gap_us = bound_us(view, ctx) - ctx.solo_us[0]
        if self._whole_iterations or not ctx.gaps or not ctx.idle_units or gap_us < LEAST_GAP_US:
            return alone(ctx)
        return in_turns(view, ctx, gap_us)

    def _idle(self, view: View, offer: Offer, ctx: Context) -> Grant:
        if not self._whole_iterations:
            return decode_idle(ctx)
        left_us = ctx.deferral_us - view.waited_us
        if view.waiting and (left_us <= 0 or not mid_iteration(offer)):
            return alone(ctx)
        hold_ns = view.start_ns + max(0, left_us) * 1000
        return decode_idle(ctx)._replace(hold_admission_until_ns=hold_ns)
