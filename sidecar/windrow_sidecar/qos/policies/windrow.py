"""Our own policy: Harli's test of feasibility, picked anew at each decision, with hysteresis.

Where it departs from `harli.py`, and why:
- It takes the largest feasible share of the worker instead of the largest predicted latency: the
  worker's units are what is to be gained, latency is only the price.
- It picks at every decision, and a decision stands for 80 ms at most, so that units return to the
  worker soon after a burst; to keep a batch at the edge from switching to and fro, growing needs
  headroom and a rest since the last switch, while shrinking is immediate (decode comes first).
- With a per-request objective it spends what running requests have saved in fast steps.
"""

from __future__ import annotations

from typing import ClassVar

from windrow_sidecar.qos.policies.base import Context, alone, decode_idle, has_work, share
from windrow_sidecar.qos.view import Grant, Offer, View

# Below the bound by this much before the worker's share may grow: half of the predictor's starting
# margin, several times what one more request changes.
GROW_HEADROOM = 0.04
# Two to five steps of a busy decode: a switch costs each side about one affinity call a thread and
# cold caches, so it has to pay off over more than one step.
REST_NS = 20_000_000
# Slack is spent over so many steps at least, so that one step never takes all of it.
SLACK_STEPS = 16


class Windrow:
    """Largest feasible share of the worker at each decision."""

    name: ClassVar[str] = "windrow"

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Pick the share; decode alone when none fits, everything for the worker when idle."""
        if not has_work(offer):
            return alone(ctx)
        if view.batch == 0:
            return decode_idle(ctx)
        bound_us = _budget_us(view, ctx) / (1 + ctx.margin)
        grow_bound_us = bound_us * (1 - GROW_HEADROOM) if ctx.since_switch_ns >= REST_NS else 0.0
        predicted, current = ctx.predicted_us, ctx.current
        for index in range(ctx.allowed - 1, 0, -1):
            if predicted[index] <= (bound_us if index <= current else grow_bound_us):
                return share(ctx, index)
        return alone(ctx)


def _budget_us(view: View, ctx: Context) -> float:
    """What this step may take: the objective, moved by slack or debt where requests are judged."""
    objective = view.objective_us
    if not ctx.per_request:
        return objective
    change = view.slack_us / SLACK_STEPS
    return objective + max(-objective / 2, min(objective, change))
