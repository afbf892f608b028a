"""Decide in one call of native code what `control.Controller` decides in Python: what engines run.

Between two torch steps caches are cold, and each line of Python costs ten times what it costs warm.
So policies, predictor, guard and handover are read and changed in Python, and their twins in
`csrc/src/policies.cpp` and `csrc/src/decision.cpp` run before a step, with the figures that Python
gives them. A test holds both equal, bit for bit, over a million random views
(`tests/contract/test_compiled_decision.py`). What is learned after a step is learned in Python, and
the compiled side receives what has changed.
"""

from __future__ import annotations

from windrow_sidecar._core import Decider
from windrow_sidecar.qos import guard as of_guard
from windrow_sidecar.qos.control import Controller, Decided, DuringStep, EngineTraits, why_nothing
from windrow_sidecar.qos.guard import Guard
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.policies import base, flexllm, temporal, windrow
from windrow_sidecar.qos.predictor import BEYOND_MARGIN, Predictor
from windrow_sidecar.qos.records import CONTEXT_BITS
from windrow_sidecar.qos.solo import BATCH_FLOOR
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Grant, Offer, View


class CompiledController(Controller):
    """Decides for one slot as `Controller` does, whose doc holds; guard and handover are its own.

    It serves every policy of `policies.POLICIES`, and their options.
    """

    def __init__(
        self,
        levels: Partitioning,
        predictor: Predictor | None,
        *,
        pause_epoch: int = 0,
        engine: EngineTraits | None = None,
    ) -> None:
        super().__init__(levels, predictor, pause_epoch=pause_epoch, engine=engine)
        traits = self._engine
        self._decider = Decider(
            figures=_figures(self.guard),
            units=levels.units,
            splits=[(s.finetune_units, s.decode_units) for s in levels.splits],
            offered=levels.offered,
            layers=traits.layers,
            chunk_bytes=traits.chunk_bytes,
            gaps=traits.gaps,
            pause_epoch=pause_epoch,
            grant_type=Grant,
        )
        self._decider.use_guard(self.guard.begin_trial)
        self._told_guard = self.guard.state
        if predictor is not None:
            self._tell_predictor(predictor)
        self._tell_terms()

    def decide(
        self, view: View, offer: Offer, now_ns: int, *, present: bool, chunks: int = 0
    ) -> Grant:
        """Return what both sides do from now on; as `Controller.decide`."""
        return self._decider.decide(view, offer, now_ns, present, chunks)

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """Take new terms from the next decision on."""
        before = self.guard
        super().set_terms(terms)
        if self.guard is not before:
            self._decider.use_guard(self.guard.begin_trial)
            if self._predictor is not None:
                self._decider.learned(*self._predictor.learned)
        self._tell_terms()
        self._tell_guard()

    def set_step_tokens(self, tokens: float) -> None:
        """Take steps to yield a request so many tokens, from the next decision on."""
        super().set_step_tokens(tokens)
        self._tell_terms()

    def set_predictor(self, predictor: Predictor | None) -> None:
        """Predict with this one from the next decision on; None: harvest nothing without one."""
        super().set_predictor(predictor)
        if predictor is not None:
            self._tell_predictor(predictor)
        self._tell_terms()

    def observe(self, now_ns: int, latency_us: float) -> float | None:
        """Judge the step that was decided last, and learn from it. Belongs after the step."""
        residual = super().observe(now_ns, latency_us)
        self._tell_guard()
        if self._predictor is not None and residual is not None:
            self._decider.learned(*self._predictor.learned)
            if newest := self._predictor.records.newest:
                self._predictor.records.newest = None
                self._decider.correct(*newest)
        return residual

    def throttled(self, now_ns: int, seconds: float) -> None:
        """Take note that a CPU limit kept decode from running so long beside the worker."""
        super().throttled(now_ns, seconds)
        self._tell_guard()

    def queued(self, now_ns: int, waited_us: int) -> None:
        """Take note that requests have waited for a place in decode for so long without a break."""
        super().queued(now_ns, waited_us)
        self._tell_guard()

    def explain(self, now_ns: int, view: View, offer: Offer, grant: Grant) -> Decided:
        """Return the last decision with what it rested on."""
        of = self._decider
        return Decided(now_ns, view, offer, grant, of.margin, of.alone_us, of.why, of.extrapolated)

    def headroom_units(self, view: View) -> float:
        """Return what a worker that always has work would get; callable from any thread."""
        self._current = self._decider.current
        return super().headroom_units(view)

    @property
    def why_paused(self) -> str:
        """Reason, in a few words, while the worker is paused; "" while it may run."""
        return self._decider.why

    @property
    def would_units(self) -> float:
        """Units that the policy gives the worker, averaged over the step (`observe`: would)."""
        return self._decider.would_units

    @property
    def during(self) -> DuringStep:
        """Conditions under which the step that was decided last runs."""
        return DuringStep._make(self._decider.during())

    @property
    def is_settled(self) -> bool:
        """True where the last decision is in force as wished: no units are changing hands."""
        return self._decider.settled

    def _tell_predictor(self, predictor: Predictor) -> None:
        self._decider.set_models(predictor.models)
        self._decider.learned(*predictor.learned)
        for known in predictor.records.all_known():
            self._decider.correct(*known)
        predictor.records.newest = None

    def _tell_terms(self) -> None:
        terms, policy = self._terms, self._policy
        if terms is None or policy is None or self._predictor is None:
            self._decider.set_idle(why_nothing(terms, self._predictor))
            return
        self._decider.set_terms(
            policy=policy.name,
            option=bool(policy.option),
            observing=terms.mode == "observe",
            per_request=terms.per_request,
            refused=bool(self.refusal),
            objective_us=terms.objective_us,
            deferral_us=terms.deferral_us,
            allowed=self._allowed,
            idle_units=self._idle_units,
        )

    def _tell_guard(self) -> None:
        state = self.guard.state
        if state != self._told_guard:
            self._told_guard = state
            self._decider.set_guard(*state)


def _figures(guard: Guard) -> dict[str, float]:
    """The constants of the policies, predictor and guard, by their names in `policies.h`."""
    settings = guard.settings
    return {
        "grow_headroom": windrow.GROW_HEADROOM,
        "slack_steps": windrow.SLACK_STEPS,
        "turns_margin": windrow.TURNS_MARGIN,
        "turns_gain": windrow.TURNS_GAIN,
        "part_gain": windrow.PART_GAIN,
        "most_stretch": windrow.MOST_STRETCH,
        "least_gap_us": temporal.LEAST_GAP_US,
        "grain_tokens": flexllm.GRAIN_TOKENS,
        "most_tokens": flexllm.MOST_TOKENS,
        "passes": base.PASSES,
        "batch_floor": BATCH_FLOOR,
        "beyond_margin": BEYOND_MARGIN,
        "context_bits": CONTEXT_BITS,
        "widen_half_life_ns": settings.widen_half_life_ns,
        "stale_ns": settings.stale_ns,
        "standing_clock": settings.standing_clock,
        "longest_step_us": settings.longest_step_us,
        "offered_layers": of_guard.OFFERED_LAYERS,
        "offered_tokens": of_guard.OFFERED_TOKENS,
        "offered_bytes": of_guard.OFFERED_BYTES,
    }
