"""FlexLLM's hybrid token scheduler: the largest window of finetune tokens that a step has room for.

Source: FlexLLM, s = argmax { f(c, s) <= S }: inference tokens c come first, then as many finetune
tokens s as keep the predicted iteration within the objective.
Departures:
- The paper profiles f offline; here f(c, s) = t0 + w(s) * (1 - t0 / t1), where the step takes t0
  alone and t1 beside the worker, and w(s) is how long s tokens take through all layers, by the
  worker's own estimate of its next tasklet (a backward counts as it is).
- Tokens run beside decode's step instead of within its kernels, so that no engine is changed; the
  split with the largest window wins. Its public code has no f: it caps s at a constant.
- Windows come in steps of 16 tokens from 16 to 512: below 16 a layer's fixed cost rules. Where a
  step has no room for 16 tokens through all layers, it runs as many of their tasklets as fit.
"""

from __future__ import annotations

from typing import ClassVar

from windrow_sidecar.qos.policies.base import (
    Context,
    alone,
    beside_us,
    bound_us,
    decode_idle,
    has_work,
    share,
    tasklet_us,
)
from windrow_sidecar.qos.view import Grant, Offer, View

GRAIN_TOKENS, MOST_TOKENS = 16, 512


class FlexLlm:
    """One window through all layers beside every step."""

    name: ClassVar[str] = "flexllm"
    option: ClassVar[str] = ""

    def decide(self, view: View, offer: Offer, ctx: Context) -> Grant:
        """Invert f for each split and take the largest window; decode alone where none fits."""
        if not has_work(offer):
            return alone(ctx)
        if view.batch == 0:
            return decode_idle(ctx)
        bound = bound_us(view, ctx)
        best, best_tokens, best_us = 0, 0, 0.0
        for index in range(1, ctx.allowed):
            run_us = beside_us(bound, ctx.solo_us[index], ctx.predicted_us[index])
            token = token_us(offer, ctx, ctx.levels.splits[index].finetune_units)
            tokens = GRAIN_TOKENS  # enough to measure what a token takes
            if token:
                grains = int(run_us / token) // GRAIN_TOKENS
                tokens = max(GRAIN_TOKENS, min(MOST_TOKENS, grains * GRAIN_TOKENS))
            if run_us > 0 and tokens >= best_tokens:
                best, best_tokens = index, tokens
                best_us = min(run_us, tokens * token) if token else run_us
        if not best:
            return alone(ctx)
        solo, beside = ctx.solo_us[best], ctx.predicted_us[best]
        step_us = solo + min(best_us, beside) * (1 - solo / beside)
        return share(ctx, best)._replace(
            window_tokens=best_tokens, budget_us=max(1, int(best_us)), predicted_us=int(step_us)
        )


def token_us(offer: Offer, ctx: Context, units: int) -> float:
    """Microseconds that a finetune token takes through all layers; 0: not known."""
    layers = max(1, offer.layer_end - offer.layer_begin)
    if not offer.tokens:
        return 0.0
    return ctx.layers * tasklet_us(offer, ctx, units) / (layers * offer.tokens)
