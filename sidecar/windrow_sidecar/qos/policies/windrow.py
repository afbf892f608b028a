"""Our own policy: whatever gives the worker most within the objective, picked at each decision.

It compares what the other policies do, by the worker's own speed on each number of units:
- a share of the units throughout (Harli's pairs), the largest that is feasible;
- where decode keeps all units, a larger share for a part of the step (LLMStation, FlexLLM);
- with `turns`, turns on the whole device (gaps before steps), where a loose objective leaves more
  time between steps than any share is worth beside them.

Where it departs from `harli.py`, and why:
- It takes the largest feasible share of the worker instead of the largest predicted latency: the
  worker's units are what is to be gained, latency is only the price.
- It picks at every decision, and a decision holds for 80 ms at most, so that units return to the
  worker soon after a burst; to keep a batch at the edge from switching to and fro, growing needs
  headroom, while shrinking is immediate (decode comes first).
- Only a step beside a share throughout says what a worker costs. As long as too few have
  (`Context.taught`), and once in twenty steps from then on, it takes a share that is feasible,
  though a part of the step were worth more by a prediction that nobody has tried.
- With a per-request objective it spends what running requests have saved in fast steps.
"""

from __future__ import annotations

import math
from typing import ClassVar

from windrow_sidecar.qos.policies.base import (
    IN_TURNS,
    Context,
    alone,
    beside_us,
    decode_idle,
    has_work,
    in_turns,
    share,
    tasklet_us,
)
from windrow_sidecar.qos.policies.temporal import LEAST_GAP_US
from windrow_sidecar.qos.view import Grant, Offer, View

# Below the bound by this much before the worker's share may grow: less would leave a step that
# varies by 1.5% over its bound more often than once in a hundred, and units that go to and fro.
GROW_HEADROOM = 0.02
# Slack is spent over so many steps at least, so that one step never takes all of it.
SLACK_STEPS = 16
# Turns stretch every step to the bound, while under a share most steps stay well below it: a margin
# that covers 95% of residuals would let 5% of steps pass the objective. Twice it covers 99.9% of
# residuals that fall like a normal distribution's (1.645 and 3.29 sigma).
TURNS_MARGIN = 2.0
# By so much turns must beat a share before they are worth it. Longer steps keep requests for
# longer, so the batch grows and decode idles less than it would beside a share.
TURNS_GAIN = 1.25
# A part of a step ends the share in its middle, and a grant for each step costs a decision: by so
# much it must be worth more than a share that stands.
PART_GAIN = 1.02
# No step is stretched further than this, whatever the objective: the worker has three quarters of
# the device then, and what more it could get would cost every reader of tokens more.
MOST_STRETCH = 4.0


class Windrow:
    """The most work for the worker within the objective."""

    name: ClassVar[str] = "windrow"

    def __init__(self, *, turns: bool = False) -> None:
        self._turns = turns

    @property
    def option(self) -> str:
        """The variant that was asked for."""
        return "turns" if self._turns else ""

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Pick shares, a part of a step or turns; everything for the worker when decode idles."""
        if not has_work(offer):
            return alone(ctx)
        if view.batch == 0:
            return decode_idle(ctx)
        budget_us = _budget_us(view, ctx)
        beside, beside_worth = _beside(budget_us / (1 + ctx.margin), offer, ctx)
        gap_us = _gap_us(budget_us, view, ctx) if self._turns else 0.0
        if gap_us:
            worth = _speed(offer, ctx, ctx.idle_units) * gap_us / (gap_us + ctx.solo_us[0])
            wanted = 1.0 if ctx.current == IN_TURNS else TURNS_GAIN
            if worth > wanted * beside_worth:
                return in_turns(view, ctx, gap_us)
        return beside


def _beside(bound_us: float, offer: Offer, ctx: Context) -> tuple[Grant, float]:
    """The largest share, or a larger one for a part of the step; and what it is worth."""
    index = _largest_share(bound_us, ctx)
    best = share(ctx, index) if index else alone(ctx)
    worth = _speed(offer, ctx, best.finetune_units)
    if index and not ctx.taught:
        return best, worth
    for larger in range(ctx.allowed - 1, index, -1):
        split = ctx.levels.splits[larger]
        if split.decode_units < ctx.levels.units:
            continue  # decode would keep to the fewer units when the worker has stopped
        run_us = beside_us(bound_us, ctx.solo_us[larger], ctx.predicted_us[larger])
        if run_us < max(LEAST_GAP_US, tasklet_us(offer, ctx, split.finetune_units)):
            continue
        step_us = min(bound_us, ctx.predicted_us[larger])
        part_worth = _speed(offer, ctx, split.finetune_units) * run_us / step_us
        if part_worth > PART_GAIN * worth:
            # Tasklets that fill it: what is left behind the last whole one is lost.
            filling_us = run_us / math.ceil(run_us / max(1, ctx.in_flight_bound_us))
            best = share(ctx, larger)._replace(
                budget_us=int(run_us),
                predicted_us=int(step_us),
                in_flight_bound_us=max(1, int(filling_us)),
            )
            worth = part_worth
    return best, worth


def _largest_share(bound_us: float, ctx: Context) -> int:
    """Index of the largest feasible split, growing only with headroom; 0: none."""
    grow_bound_us = bound_us * (1 - GROW_HEADROOM)
    predicted = ctx.predicted_us
    current = ctx.allowed if ctx.current == IN_TURNS else ctx.current
    for index in range(ctx.allowed - 1, 0, -1):
        if predicted[index] <= (bound_us if index <= current else grow_bound_us):
            return index
    return 0


def _gap_us(budget_us: float, view: View, ctx: Context) -> float:
    """Return how long the worker may run before the step; 0: too short, or a prompt comes."""
    if not ctx.gaps or not ctx.idle_units or view.waiting or view.admitted_tokens:
        return 0.0
    step_us = min(budget_us / (1 + TURNS_MARGIN * ctx.margin), MOST_STRETCH * ctx.solo_us[0])
    gap_us = step_us - ctx.solo_us[0]
    return gap_us if gap_us >= LEAST_GAP_US else 0.0


def _speed(offer: Offer, ctx: Context, units: int) -> float:
    """Return how fast the worker is on so many units; comparable within one decision.

    By its own estimates where it has one for the device and for these units, else by the units.
    """
    if not units:
        return 0.0
    whole_us = tasklet_us(offer, ctx, ctx.idle_units)
    here_us = tasklet_us(offer, ctx, units)
    return ctx.idle_units * whole_us / here_us if whole_us and here_us else units


def _budget_us(view: View, ctx: Context) -> float:
    """Return this step's budget: the objective, moved by slack or debt of judged requests."""
    objective = view.objective_us
    if not ctx.per_request:
        return objective
    change = view.slack_us / SLACK_STEPS
    return objective + max(-objective / 2, min(objective, change))
