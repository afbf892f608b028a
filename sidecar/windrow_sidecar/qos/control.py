"""Decide a step's grant: policy, predictor, guard and handover together. No effects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from windrow_sidecar.qos.guard import Guard
from windrow_sidecar.qos.handover import Handover
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.policies import Context, Policy
from windrow_sidecar.qos.policies.base import IN_TURNS, alone, effective_units, is_for_one_step
from windrow_sidecar.qos.predictor import BEYOND_MARGIN, START_MARGIN, Predictor
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Action, Grant, Offer, View


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """Traits of the engine that policies have to know.

    Attributes:
        layers: of its model.
        gaps: it honours `Grant.gap_until_ns`.
        chunk_bytes: of its arena; 0: unknown.
    """

    layers: int = 1
    gaps: bool = False
    chunk_bytes: int = 0


class Decided(NamedTuple):
    """A decision as it was taken, and what it rested on."""

    at_ns: int
    view: View
    offer: Offer
    grant: Grant
    margin: float
    alone_us: float  # predicted, of the step without a worker
    why_paused: str
    extrapolated: bool  # batch or context lie outside of what was profiled


class DuringStep(NamedTuple):
    """Conditions of a step, to judge it by afterwards."""

    split: int = 0  # that the worker had throughout; 0: none, or not throughout
    batch: int = 0
    context_tokens: int = 0
    harvested: bool = False
    slack_us: int = 0
    settled: bool = True
    in_part: bool = False  # the worker ran for a part of the step
    predicted_us: int = 0
    phase: int = 0  # of the worker's tasklet


# Ten minutes: no step takes as long.
IMPOSSIBLE_US = 6e8
# A worker that would always have work: what `observe` and the estimate of headroom ask about.
EAGER = Offer(job_epoch=1)


class Controller:
    """Decides for one slot, step by step. One thread, but for `headroom_units`.

    This is how it reads. What engines run is `engines.harvest.compiled.CompiledController`: the
    same answers in a tenth of the time.

    `pause_epoch`: of the grant before its first (see `Handover`).

    Attributes:
        refusal: why no harvesting is possible under these terms; "" where it is.
    """

    def __init__(
        self,
        levels: Partitioning,
        predictor: Predictor | None,
        guard: Guard | None = None,
        *,
        pause_epoch: int = 0,
        handover: Handover | None = None,
        engine: EngineTraits | None = None,
    ) -> None:
        self._levels, self._predictor = levels, predictor
        self._engine = engine or EngineTraits()
        self.guard = guard or Guard()
        self._handover = handover or Handover(levels.units, pause_epoch)
        # The policy's terms, and the same of a step: with the objective for all of its tokens.
        self._stated: HarvestTerms | None = None
        self._terms: HarvestTerms | None = None
        self._step_tokens = 1.0
        self._policy: Policy | None = None
        self._margins: dict[tuple[str, int, bool], float] = {}  # learned under terms before
        self._allowed, self._idle_units = 1, 0
        self._current = 0
        self._during = DuringStep()
        self._why_paused = "no policy"
        # Of the last decision.
        self._margin, self._alone_us, self._extrapolated = 0.0, 0.0, False
        self.refusal = ""
        self._would_units = 0.0

    @property
    def why_paused(self) -> str:
        """Reason, in a few words, while the worker is paused; "" while it may run."""
        return self._why_paused

    @property
    def would_units(self) -> float:
        """Units that the policy gives the worker, averaged over the step (`observe`: would)."""
        return self._would_units

    @property
    def during(self) -> DuringStep:
        """Conditions under which the step that was decided last runs."""
        return self._during

    @property
    def terms(self) -> HarvestTerms | None:
        """Terms in force, as the policy states them; None: nothing is harvested."""
        return self._stated

    @property
    def step_tokens(self) -> float:
        """Tokens that a request is taken to get from a step: above 1 where decode speculates."""
        return self._step_tokens

    @property
    def step_objective_us(self) -> int:
        """Objective of a step, for all the tokens that it yields a request; 0 without terms."""
        return self._terms.objective_us if self._terms else 0

    @property
    def predictor(self) -> Predictor | None:
        """Predictor of steps; None without a latency profile: nothing is harvested then."""
        return self._predictor

    def set_predictor(self, predictor: Predictor | None) -> None:
        """Predict with this one from the next decision on; None: harvest nothing without one."""
        self._predictor = predictor
        self._margins.clear()
        self.refusal = self._below_decode()

    def throttled(self, now_ns: int, seconds: float) -> None:
        """Take note that a CPU limit kept decode from running so long beside the worker."""
        self.guard.throttled(now_ns, seconds)

    def queued(self, now_ns: int, waited_us: int) -> None:
        """Take note that requests have waited for a place in decode for so long without a break."""
        self.guard.queued(now_ns, waited_us)

    @property
    def in_flight_bound_us(self) -> int:
        """A quarter of a step's objective: how long after a revocation the worker may still run."""
        return self.step_objective_us // 4

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """Take new terms from the next decision on.

        The guard's record and the predictor's margin are of one objective and one algorithm: others
        begin with clean ones, and find the margin that they had before.
        """
        if terms and self._stated and _judged_by(terms) != _judged_by(self._stated):
            self.guard = type(self.guard)(self.guard.settings)
            if self._predictor is not None:
                self._margins[_judged_by(self._stated)] = self._predictor.margin
                self._predictor.margin = self._margins.get(_judged_by(terms), START_MARGIN)
        self._stated = terms
        self._terms = _of_a_step(terms, self._step_tokens)
        self._policy = terms.make_policy() if terms and terms.mode != "off" else None
        self.refusal = self._below_decode()
        if terms:
            self._allowed = self._levels.allowed(terms.max_compute_percent)
            self._idle_units = self._levels.idle_share(terms.max_compute_percent)
            self.guard.set_percentile(terms.percentile)

    def set_step_tokens(self, tokens: float) -> None:
        """Take steps to yield a request so many tokens on average, from the next decision on.

        The objective is one of a token, so a step may take so many times as long. Guard and margin
        stay: what was learned is of the same objective.
        """
        self._step_tokens = max(1.0, tokens)
        self._terms = _of_a_step(self._stated, self._step_tokens)
        self.refusal = self._below_decode()

    def decide(
        self, view: View, offer: Offer, now_ns: int, *, present: bool, chunks: int = 0
    ) -> Grant:
        """Return what both sides do from now on.

        `present`: a worker is attached and its heart beats; `chunks`: how many it may hold.
        """
        wish = self._wish(view, offer, now_ns, present)
        handover = self._handover
        handover.grant(wish.action, wish.finetune_units, wish.decode_units, offer, present)
        settled = handover.decode_units == wish.decode_units
        runs = wish.action != Action.PAUSE and view.batch > 0 and settled
        in_part = runs and is_for_one_step(wish)
        self._during = DuringStep(
            self._current if runs and not in_part else 0,
            view.batch,
            view.context_tokens,
            wish.finetune_units > 0 or handover.decode_units < self._levels.units,
            view.slack_us,
            settled,
            in_part,
            wish.predicted_us,
            offer.phase,
        )
        # By position: `_replace` takes three times as long, in cold caches more.
        return Grant(
            wish.action,
            wish.finetune_units,
            handover.decode_units,
            wish.n_tasklets,
            wish.budget_us,
            wish.window_tokens,
            wish.gap_until_ns,
            handover.pause_epoch,
            wish.hold_admission_until_ns,
            wish.predicted_us,
            chunks,
            wish.in_flight_bound_us,
        )

    @property
    def is_settled(self) -> bool:
        """True where the last decision is in force as wished: no units are changing hands."""
        return self.during.settled

    def observe(self, now_ns: int, latency_us: float) -> float | None:
        """Judge the step that was decided last, and learn from it. Belongs after the step.

        Returns how far the step was from its prediction, relative to that; None: it ran without a
        worker, or between two partitions.
        """
        during, terms = self.during, self._terms
        if terms is None or during.batch == 0:
            return None
        if not 0 < latency_us < IMPOSSIBLE_US:
            self.guard.distrust(now_ns)
            return None
        # Judged by request, a long step is no breach while every request has slack left.
        judged = not terms.per_request or during.slack_us <= 0
        self.guard.observe(
            now_ns,
            latency_us=latency_us,
            objective_us=terms.objective_us if judged else 0,
            harvested=during.harvested,
        )
        if self._predictor is None:
            return None
        if during.split > 0:
            return self._predictor.observe(
                during.split,
                batch=during.batch,
                context_tokens=during.context_tokens,
                latency_us=latency_us,
                objective_us=terms.objective_us,
                phase=during.phase,
            )
        if not during.in_part or during.predicted_us <= 0:
            return None
        expected = during.predicted_us
        residual, near = (latency_us - expected) / expected, min(1.0, expected / terms.objective_us)
        self._predictor.follow(residual, near * near)
        return residual

    def explain(self, now_ns: int, view: View, offer: Offer, grant: Grant) -> Decided:
        """Return the last decision with what it rested on."""
        return Decided(
            now_ns,
            view,
            offer,
            grant,
            self._margin,
            self._alone_us,
            self._why_paused,
            self._extrapolated,
        )

    def headroom_units(self, view: View) -> float:
        """Return what a worker that always has work would get now; callable from any thread.

        Of turns and parts of steps, as much as the worker has on average.
        """
        terms, policy, predictor = self._terms, self._policy, self._predictor
        if terms is None or policy is None or predictor is None:
            return 0.0
        if self.guard.reason or self.refusal:
            return 0.0
        ctx = self._context(terms, predictor, predictor.margin, view)
        return effective_units(policy.decide(view, EAGER, ctx), view, EAGER, ctx)

    def _wish(self, view: View, offer: Offer, now_ns: int, present: bool) -> Grant:
        """Return what policy and guard want, whatever the worker is doing right now."""
        terms, policy, predictor = self._terms, self._policy, self._predictor
        if terms is None or policy is None or predictor is None:
            self._current = 0
            self._why_paused = why_nothing(terms, predictor)
            return Grant(Action.PAUSE, 0, self._levels.units)
        observing = terms.mode == "observe"
        if not present and not observing:
            self._current = 0
            self._why_paused = "no worker"
            return Grant(Action.PAUSE, 0, self._levels.units)
        margin = predictor.margin + self.guard.extra_margin(now_ns)
        self._extrapolated = predictor.extrapolates(view.batch, view.context_tokens)
        if self._extrapolated:
            margin += BEYOND_MARGIN
        ctx = self._context(terms, predictor, margin, view, offer.phase)
        self._margin, self._alone_us = margin, ctx.solo_us[0]
        doubt = self.guard.doubt(view, offer, ctx.predicted_us, now_ns)
        if doubt or self.refusal:
            self._current = 0
            self._would_units = 0.0
            self._why_paused = doubt or "objective"
            return Grant(Action.PAUSE, 0, self._levels.units)
        wish = policy.decide(view, EAGER if observing else offer, ctx)
        if wish.action != Action.PAUSE:
            wish = self._guarded(wish, terms, view, ctx, now_ns)
        else:
            latest_ns = (view.start_ns or now_ns) + terms.deferral_us * 1000
            hold_ns = min(wish.hold_admission_until_ns, latest_ns)
            wish = wish._replace(gap_until_ns=0, hold_admission_until_ns=hold_ns)
            if offer.starving and not observing:
                self._why_paused = "starving"
            else:
                # What the guard has added to the margin may be why there is no room.
                pauses = self.guard.pauses(now_ns)
                self._why_paused = self.guard.why_paused if pauses else "objective"
        if wish.action == Action.PAUSE:
            self._current = 0
        elif wish.gap_until_ns:
            self._current = IN_TURNS
        elif view.batch == 0:
            # From the whole device any split is a step down, which needs no headroom.
            self._current = self._allowed - 1
        else:
            self._current = self._levels.index_of(wish.finetune_units, wish.decode_units)
        self._would_units = effective_units(wish, view, EAGER if observing else offer, ctx)
        if observing:
            self._why_paused = "observe"
            return alone(ctx)
        return wish

    def _guarded(
        self, wish: Grant, terms: HarvestTerms, view: View, ctx: Context, now_ns: int
    ) -> Grant:
        """The wish, unless the guard forbids it or it passes a hard limit."""
        if not self.guard.may_run(now_ns):
            self._why_paused = self.guard.why_paused
            return alone(ctx)
        most = self._levels.splits[self._allowed - 1].finetune_units
        if view.batch == 0 or wish.gap_until_ns:
            most = max(most, self._idle_units)
        # What decode alone takes of the objective is never given away, nor a longer wait.
        gap_us = max(0.0, terms.objective_us * (2 if terms.per_request else 1) - ctx.solo_us[0])
        begun_ns = view.start_ns or now_ns
        latest_gap_ns = begun_ns + int(gap_us * 1000)
        latest_hold_ns = begun_ns + terms.deferral_us * 1000
        kept = self.guard.allows(wish, most, latest_gap_ns, latest_hold_ns)
        if not kept or wish.action != Action.GO:
            self._why_paused = "limits"
            return alone(ctx)
        self._why_paused = ""
        return wish

    def _context(
        self, terms: HarvestTerms, predictor: Predictor, margin: float, view: View, phase: int = 0
    ) -> Context:
        predicted_us, solo_us = predictor.predict(view.batch, view.context_tokens, phase)
        return Context(
            self._levels,
            self._allowed,
            self._idle_units,
            predicted_us,
            margin,
            self._current,
            terms.per_request,
            terms.objective_us // 4,
            solo_us,
            self._engine.layers,
            self._engine.gaps,
            terms.deferral_us,
            self._engine.chunk_bytes,
            predictor.taught,
        )

    def _below_decode(self) -> str:
        """Return why the objective can never be kept; "" where it may be."""
        stated, predictor = self._stated, self._predictor
        if stated is None or predictor is None:
            return ""
        least_us = predictor.least_step_us
        if least_us <= self.step_objective_us:
            return ""
        several = "" if self._step_tokens == 1 else f" and {self._step_tokens:.1f} tokens"
        return (
            f"the objective of {stated.objective_us / 1000:g} ms is below the "
            f"{least_us / 1000:.1f} ms that decode alone takes for one request{several}: "
            "raise spec.objective.tpot"
        )


def _of_a_step(terms: HarvestTerms | None, tokens: float) -> HarvestTerms | None:
    """Return terms whose objective is one of a step that yields a request so many tokens."""
    if terms is None or tokens == 1:
        return terms
    return replace(terms, objective_us=round(terms.objective_us * tokens))


def _judged_by(terms: HarvestTerms) -> tuple[str, int, bool]:
    return terms.policy, terms.objective_us, terms.per_request


def why_nothing(terms: HarvestTerms | None, predictor: Predictor | None) -> str:
    """Return why nothing is harvested under these terms: there are none, or harvesting is off."""
    if terms is None:
        return "no policy"
    return "off" if predictor else "no latency profile"
