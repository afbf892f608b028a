"""Decide a step's grant: policy, predictor, guard and handover together. No effects.

`csrc/src/decision.cpp` decides; here terms come to what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from windrow_sidecar import _core
from windrow_sidecar.qos.guard import Guard
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.policies import FIGURES
from windrow_sidecar.qos.predictor import START_MARGIN, Predictor
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Grant, Offer, View


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


# A worker that would always have work: what `observe` and the estimate of headroom ask about.
EAGER = Offer(job_epoch=1)


class Controller:
    """Decides for one slot, step by step. One thread, but for `headroom_units`.

    Engine and simulator, every policy and every protection that is off: this is the only one.

    Args:
        levels: the splits of the device.
        predictor: None: nothing is harvested.
        guard: None: one of the default settings.
        pause_epoch: of the grant before its first, which the page shows: the count goes on, or a
            worker that has seen it would count as one that has seen every pause to come.
        handover: False: decode gets its units back at once, whatever the worker still runs on them.
        engine: what policies have to know of it.

    Attributes:
        decider: what decides, compiled.
        guard: the record of this objective and policy.
        refusal: why no harvesting is possible under these terms; "" where it is.
    """

    def __init__(
        self,
        levels: Partitioning,
        predictor: Predictor | None,
        guard: Guard | None = None,
        *,
        pause_epoch: int = 0,
        handover: bool = True,
        engine: EngineTraits | None = None,
    ) -> None:
        self._levels, self._predictor = levels, predictor
        traits = engine or EngineTraits()
        self.guard = guard or Guard()
        self.decider = _core.Decider(
            figures=FIGURES,
            units=levels.units,
            splits=levels.pairs,
            offered=levels.offered,
            layers=traits.layers,
            chunk_bytes=traits.chunk_bytes,
            gaps=traits.gaps,
            handover=handover,
            pause_epoch=pause_epoch,
            guard=self.guard,
            grant_type=Grant,
        )
        # The policy's terms, and the same of a step: with the objective for all of its tokens.
        self._stated: HarvestTerms | None = None
        self._terms: HarvestTerms | None = None
        self._step_tokens = 1.0
        self._margins: dict[tuple[str, int, bool], float] = {}  # learned under terms before
        self.refusal = ""
        if predictor is not None:
            self.decider.set_predictor(predictor)

    @property
    def why_paused(self) -> str:
        """Reason, in a few words, while the worker is paused; "" while it may run."""
        return self.decider.why

    @property
    def would_units(self) -> float:
        """Units that the policy gives the worker, averaged over the step (`observe`: would)."""
        return self.decider.would_units

    @property
    def during(self) -> DuringStep:
        """Conditions under which the step that was decided last runs."""
        return DuringStep._make(self.decider.during())

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
        self.decider.set_predictor(predictor)
        self._apply_terms()

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """Take new terms from the next decision on.

        The guard's record and the predictor's margin are of one objective and one algorithm: others
        begin with clean ones, and find the margin that they had before.
        """
        if terms and self._stated and _judged_by(terms) != _judged_by(self._stated):
            self.guard = self.guard.renewed()
            self.decider.set_guard(self.guard)
            if self._predictor is not None:
                self._margins[_judged_by(self._stated)] = self._predictor.margin
                self._predictor.margin = self._margins.get(_judged_by(terms), START_MARGIN)
        self._stated = terms
        if terms:
            self.guard.set_percentile(terms.percentile)
        self._apply_terms()

    def set_step_tokens(self, tokens: float) -> None:
        """Take steps to yield a request so many tokens on average, from the next decision on.

        The objective is one of a token, so a step may take so many times as long. Guard and margin
        stay: what was learned is of the same objective.
        """
        self._step_tokens = max(1.0, tokens)
        self._apply_terms()

    def decide(
        self,
        view: View,
        offer: Offer,
        now_ns: int,
        *,
        present: bool,
        chunks: int = 0,
        prompts_left: int = 0,
        first_token_waited_us: int = 0,
    ) -> Grant:
        """Return what both sides do from now on.

        `present`: a worker is attached and its heart beats; `chunks`: how many it may hold. The
        last two: see `engines.hook.StepInput`.
        """
        return self.decider.decide(
            view, offer, now_ns, present, chunks, prompts_left, first_token_waited_us
        )

    def observe(self, now_ns: int, latency_us: float) -> float | None:
        """Judge the step that was decided last, and learn from it. Belongs after the step.

        Returns how far the step was from its prediction, relative to that; None: it ran without a
        worker, or between two partitions.
        """
        return self.decider.observe(now_ns, latency_us)

    def headroom_units(self, view: View) -> float:
        """Return what a worker that always has work would get now; callable from any thread.

        Of turns and parts of steps, as much as the worker has on average.
        """
        return self.decider.headroom_units(view)

    def _apply_terms(self) -> None:
        self._terms = terms = _of_a_step(self._stated, self._step_tokens)
        predictor, levels = self._predictor, self._levels
        self.refusal = self._below_decode()
        if terms is None:
            self.decider.clear_terms()
            return
        decides = terms.mode != "off" and predictor is not None
        self.decider.set_terms(
            policy=terms.policy if decides else "",
            idle="off" if predictor else "no latency profile",
            observing=terms.mode == "observe",
            per_request=terms.per_request,
            refused=bool(self.refusal),
            objective_us=terms.objective_us,
            deferral_us=terms.deferral_us,
            first_token_us=terms.first_token_us,
            allowed=levels.allowed(terms.max_compute_percent),
            idle_units=levels.idle_share(terms.max_compute_percent),
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
