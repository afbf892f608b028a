"""Decide a step's grant: policy, predictor, guard and handover together. No effects."""

from __future__ import annotations

from windrow_sidecar.qos.guard import Guard
from windrow_sidecar.qos.handover import Handover
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.policies import Context, Policy
from windrow_sidecar.qos.policies.base import alone
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Action, Grant, Offer, View

# A worker that would always have work: what `observe` and the estimate of headroom ask about.
EAGER = Offer(job_epoch=1)


class Controller:
    """Decides for one slot, step by step. One thread, but for `headroom_units`.

    `pause_epoch`: of the grant before its first (see `Handover`).

    Attributes:
        why_paused: in a few words, while the worker is paused; "" while it may run.
        would_units: what the policy would have given the worker in mode `observe`.
    """

    def __init__(
        self,
        levels: Partitioning,
        predictor: Predictor | None,
        guard: Guard | None = None,
        *,
        pause_epoch: int = 0,
    ) -> None:
        self._levels, self._predictor = levels, predictor
        self.guard = guard or Guard()
        self._handover = Handover(levels.units, pause_epoch)
        self._terms: HarvestTerms | None = None
        self._policy: Policy | None = None
        self._allowed, self._idle_units = 1, 0
        self._current, self._switched_ns = 0, 0
        self._during: tuple[int, int, int, bool, int] = (0, 0, 0, False, 0)
        self.why_paused = "no policy"
        self.would_units = 0

    @property
    def terms(self) -> HarvestTerms | None:
        """In force; None: nothing is harvested."""
        return self._terms

    @property
    def predictor(self) -> Predictor | None:
        """None without a latency profile: nothing is harvested then."""
        return self._predictor

    def set_predictor(self, predictor: Predictor) -> None:
        """Predict with this one from the next decision on."""
        self._predictor = predictor

    @property
    def in_flight_bound_us(self) -> int:
        """A quarter of the objective: so long at most after a revocation the worker still runs."""
        return self._terms.objective_us // 4 if self._terms else 0

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """Take new terms from the next decision on."""
        self._terms = terms
        self._policy = terms.make_policy() if terms and terms.mode != "off" else None
        if terms:
            self._allowed = self._levels.allowed(terms.max_compute_percent)
            self._idle_units = self._levels.idle_share(terms.max_compute_percent)
            self.guard.set_percentile(terms.percentile)

    def decide(
        self, view: View, offer: Offer, now_ns: int, *, present: bool, chunks: int = 0
    ) -> Grant:
        """What both sides do from now on.

        `present`: a worker is attached and its heart beats; `chunks`: how many it may hold.
        """
        wish = self._wish(view, offer, now_ns, present)
        handover = self._handover
        handover.grant(wish.action, wish.finetune_units, wish.decode_units, offer, present)
        split = 0 if wish.action == Action.PAUSE or view.batch == 0 else self._current
        self._during = (
            split if handover.decode_units == wish.decode_units else -1,
            view.batch,
            view.context_tokens,
            wish.finetune_units > 0 or handover.decode_units < self._levels.units,
            view.slack_us,
        )
        return wish._replace(
            decode_units=handover.decode_units, pause_epoch=handover.pause_epoch, chunks=chunks
        )

    @property
    def is_settled(self) -> bool:
        """Whether the last decision is in force as it was wished: no units are changing hands."""
        return self._during[0] >= 0

    def observe(self, now_ns: int, latency_us: int) -> float | None:
        """Judge the step that was decided last, and learn from it. Belongs after the step.

        Returns how far the step was from its prediction, relative to that; None: it ran without a
        worker, or between two partitions.
        """
        split, batch, context_tokens, harvested, slack_us = self._during
        terms = self._terms
        if terms is None or batch == 0:
            return None
        # Judged by request, a long step is no breach while every request has slack left.
        judged = not terms.per_request or slack_us <= 0
        self.guard.observe(
            now_ns,
            latency_us=latency_us,
            objective_us=terms.objective_us if judged else 0,
            harvested=harvested,
        )
        # A step between two partitions (-1) is of neither, and says nothing about them.
        if split <= 0 or self._predictor is None:
            return None
        return self._predictor.observe(
            split,
            batch=batch,
            context_tokens=context_tokens,
            latency_us=latency_us,
            objective_us=terms.objective_us,
        )

    def headroom_units(self, view: View) -> int:
        """What a worker that always has work would get at this moment; callable from any thread."""
        terms, policy, predictor = self._terms, self._policy, self._predictor
        if terms is None or policy is None or predictor is None or self.guard.reason:
            return 0
        ctx = self._context(terms, predictor, predictor.margin, view, since_ns=1 << 62)
        return policy.decide(view, EAGER, ctx).finetune_units

    def _wish(self, view: View, offer: Offer, now_ns: int, present: bool) -> Grant:
        """What policy and guard want, whatever the worker is doing right now."""
        terms, policy, predictor = self._terms, self._policy, self._predictor
        if terms is None or policy is None or predictor is None:
            self._switch_to(0, now_ns)
            self.why_paused = _why_nothing(terms, predictor)
            return Grant(Action.PAUSE, 0, self._levels.units)
        observing = terms.mode == "observe"
        if not present and not observing:
            self._switch_to(0, now_ns)
            self.why_paused = "no worker"
            return Grant(Action.PAUSE, 0, self._levels.units)
        margin = predictor.margin + self.guard.extra_margin(now_ns)
        ctx = self._context(terms, predictor, margin, view, now_ns - self._switched_ns)
        wish = policy.decide(view, EAGER if observing else offer, ctx)
        if wish.action != Action.PAUSE:
            wish = self._guarded(wish, view, ctx, now_ns)
        else:
            self.why_paused = "starving" if offer.starving and not observing else "objective"
        if wish.action == Action.PAUSE:
            self._switch_to(0, now_ns)
        elif view.batch == 0:
            # From the whole device any split is a step down, which needs no rest.
            self._switch_to(self._allowed - 1, now_ns)
        else:
            self._switch_to(self._levels.index_of(wish.finetune_units), now_ns)
        self.would_units = wish.finetune_units
        if observing:
            self.why_paused = "observe"
            return alone(ctx)
        return wish

    def _guarded(self, wish: Grant, view: View, ctx: Context, now_ns: int) -> Grant:
        """The wish, unless the guard forbids it or it passes a hard limit."""
        if not self.guard.may_run(now_ns):
            self.why_paused = "breaker" if self.guard.reason else "guard"
            return alone(ctx)
        most = self._levels.splits[self._allowed - 1].finetune_units
        if view.batch == 0:
            most = max(most, self._idle_units)
        if not 0 < wish.finetune_units <= most or wish.action != Action.GO:
            self.why_paused = "limits"
            return alone(ctx)
        self.why_paused = ""
        return wish

    def _context(
        self, terms: HarvestTerms, predictor: Predictor, margin: float, view: View, since_ns: int
    ) -> Context:
        return Context(
            self._levels,
            self._allowed,
            self._idle_units,
            predictor.predict_us(view.batch, view.context_tokens),
            margin,
            self._current,
            since_ns,
            terms.per_request,
            terms.objective_us // 4,
        )

    def _switch_to(self, index: int, now_ns: int) -> None:
        if index != self._current:
            self._current, self._switched_ns = index, now_ns


def _why_nothing(terms: HarvestTerms | None, predictor: Predictor | None) -> str:
    if terms is None:
        return "no policy"
    return "off" if predictor else "no latency profile"
