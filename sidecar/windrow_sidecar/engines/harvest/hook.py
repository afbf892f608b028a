"""The step hook that harvests: before each step it shows the view, decides, grants and lends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from windrow.eventlog import EventLog
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.harvest.ablation import controller_without, predictor_without
from windrow_sidecar.engines.harvest.decision_log import Decisions
from windrow_sidecar.engines.harvest.decode_page import GrantWriter, OfferReader, ViewWriter
from windrow_sidecar.engines.harvest.lending import LendingCounts, LendingManager
from windrow_sidecar.engines.harvest.marks import HarvestMarks
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.engines.harvest.stats import (
    GrantedUnits,
    HarvestRate,
    StepStatistics,
    StepStats,
    quantile,
)
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.control import EngineTraits
from windrow_sidecar.qos.lending import ChunkCounts
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.policies.base import is_for_one_step
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloStepModel, solo_models
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Grant

_DECODE = 0  # a writer of the page
# Of the tokens that a step yields, what is too small a change to judge steps by another objective.
_SAME_TOKENS = 0.05


class HarvestHook:
    """Implements `engines.hook.StepHook` over a real arena and page.

    Without a policy it grants nothing and lends nothing. `set_terms`, `throttled` and
    `worker_lives` may be called from another thread; they take effect at the next step.
    `ViewWriter`, `OfferReader` and `GrantWriter` own the page, `LendingManager` the chunks,
    `Controller` the decision: here they are called in their order.

    Args:
        arena: made by this process.
        levels: the splits that the engine can put in force.
        profile: a `LatencyProfileSpec` as a mapping; None: nothing is ever harvested.
        settings: sizes and times.
        clock: nanoseconds of CLOCK_MONOTONIC, the clock of StepFacts.
        log: marks go here.
    """

    def __init__(
        self,
        arena: Arena,
        levels: Partitioning,
        profile: Mapping[str, Any] | None,
        settings: HarvestSettings | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        log: EventLog | None = None,
    ) -> None:
        self._arena, self._page, self._clock, self._levels = arena, arena.page, clock, levels
        self._settings = settings = settings or HarvestSettings()
        solo: dict[int, SoloStepModel] = solo_models(profile) if profile else {}
        geometry = arena.geometry
        self.controller = controller_without(
            settings.without,
            levels,
            self._predictor_of(profile) if profile else None,
            pause_epoch=arena.page.pause_epoch,
            engine=EngineTraits(
                settings.layers or geometry.layers, settings.gaps, geometry.chunk_bytes
            ),
        )
        self._marks = HarvestMarks(log)
        self._views = ViewWriter(self._page)
        self._offers = OfferReader(self._page, settings, self._marks)
        self._grants = GrantWriter(self._page, levels.units, settings)
        self._lending = LendingManager(arena, settings, self._marks)
        self._stats, self._granted_units = StepStats(), GrantedUnits(clock())
        self._rate = HarvestRate(profile, solo, levels.units)
        self._decisions = Decisions(settings.run_dir) if settings.run_dir else None
        self._new_terms: list[HarvestTerms | None] = []
        self._throttled: list[float] = []  # seconds for which a CPU limit held decode up
        self._unjudged: list[tuple[int, int]] = []  # latency_us, cost_ns
        self._prefilled = False
        self._breaker = ("", 0)  # reason and trips, as last seen
        self._objective_us = 0
        self._steady_until_ns = 0  # until then the last decision stands, if facts stay the same
        self._cost_ns = 0

    @property
    def cost_us(self) -> float:
        """Time that `before_step` took of the current step."""
        return self._cost_ns / 1e3

    @property
    def request_objective_us(self) -> int:
        """The objective, where the policy judges requests and not steps; else 0."""
        terms = self.controller.terms
        return terms.objective_us if terms and terms.per_request else 0

    @property
    def is_awake(self) -> bool:
        """True where there is something to decide: a policy, or chunks that a worker holds."""
        return bool(self._new_terms) or self.controller.terms is not None or self._lending.holds_out

    @property
    def chunks_lacking(self) -> int:
        """Chunks that would have to become FREE for what the worker wants and may have."""
        return self._lending.lacking

    @property
    def live_epoch(self) -> int | None:
        """The job epoch of the only worker that lives; 0: none does; None: nobody has said."""
        return self._offers.live_epoch

    def set_profile(self, profile: Mapping[str, Any] | None) -> None:
        """Decide by another latency profile from now on. Decode's thread, between two steps.

        Args:
            profile: the profile; None: nothing is harvested until there is one.

        Raises:
            UserError: it lacks a share that decode would have beside a worker.
        """
        solo = solo_models(profile) if profile else {}
        self.controller.set_predictor(self._predictor_of(profile) if profile else None)
        self._rate = HarvestRate(profile, solo, self._levels.units)
        self._steady_until_ns = 0

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """A policy has arrived, changed or gone."""
        self._new_terms.append(terms)

    def throttled(self, seconds: float) -> None:
        """A CPU limit has kept decode from running for so long beside the worker."""
        self._throttled.append(seconds)
        self._steady_until_ns = 0

    def worker_lives(self, epoch: int) -> None:
        """The only worker that lives is of this job epoch; 0: none does."""
        self._offers.live_epoch = epoch
        self._steady_until_ns = 0

    def before_step(self, facts: StepInput) -> Grant:
        """Show the view, decide, grant.

        Between two torch steps caches are cold and every line of Python costs ten times what it
        costs warm, so a decision is kept for a while when nothing has changed that it rests on.
        """
        begin_ns = self._clock()
        if (
            begin_ns < self._steady_until_ns
            and facts.batch == self._views.newest.batch
            and not (facts.admitted_tokens or facts.waiting or facts.prefill_tokens)
            and not self._new_terms
        ):
            # What the worker heeds of decode between two decisions is that it lives.
            self._page.beat(_DECODE)
            self._views.waiting_since_ns = 0
            grant = self._grants.newest
        else:
            grant = self._decide_again(facts, begin_ns)
        self._cost_ns = self._clock() - begin_ns
        return grant

    def _decide_again(self, facts: StepInput, now_ns: int) -> Grant:
        self._judge(now_ns)
        self._prefilled = facts.prefill_tokens > 0 or facts.batch == 0
        if facts.admitted_tokens:
            self._lending.admit(now_ns, facts.admitted_tokens)
        grant = self._decide(now_ns, facts)
        keep = self.controller.is_settled and not is_for_one_step(grant)
        if keep and not self._prefilled:
            self._steady_until_ns = now_ns + self._settings.steady_ns
        return grant

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Take note; a step over the objective is judged at once, others at the next decision."""
        self._unjudged.append((latency_us, self._cost_ns))
        if latency_us > self._objective_us > 0:
            self._judge(end_ns)

    def _judge(self, now_ns: int) -> None:
        """Count and learn from the steps under the last decision. In one go: cold code is dear."""
        unjudged, self._unjudged = self._unjudged, []
        stats, controller = self._stats, self.controller
        if self._decisions and unjudged:
            self._decisions.ended([took_us for took_us, _ in unjudged], self._objective_us)
        for latency_us, cost_ns in unjudged:
            stats.add(latency_us, cost_ns, self._objective_us, controller.step_tokens)
            if not self._prefilled:
                residual = controller.observe(now_ns, latency_us)
                if residual is not None:
                    stats.predicted(residual)
        while self._throttled:
            controller.throttled(now_ns, self._throttled.pop(0))
        guard = controller.guard
        breaker = (guard.reason, guard.trips)
        if breaker != self._breaker:
            self._steady_until_ns = 0
            if self._decisions:
                self._decisions.breached(guard.reason or "two steps over the objective")
            self._breaker = breaker
            self._marks.breaker(now_ns, guard.reason)
        self._lending.size_reserve(now_ns, controller.terms, controller.in_flight_bound_us)

    def idle(self, now_ns: int) -> Grant:
        """Decode runs dry: the worker may have the device."""
        self._judge(now_ns)
        return self._decide(now_ns, None)

    def _decide(self, now_ns: int, facts: StepInput | None) -> Grant:
        """Publish the view, read the offer, plan lending, decide, publish the grant."""
        controller, lending, offers = self.controller, self._lending, self._offers
        while self._new_terms:
            taken = self._new_terms.pop(0)
            controller.set_terms(taken)
            self._marks.policy(now_ns, taken)
        if facts is not None and facts.batch and not facts.prefill_tokens:
            self._expect_tokens(facts.tokens)
        terms = controller.terms
        self._steady_until_ns = 0
        self._objective_us = controller.step_objective_us
        chunks = ChunkCounts(*self._arena.counts())
        held_until_ns = self._grants.newest.hold_admission_until_ns
        view = self._views.publish(
            facts,
            now_ns,
            chunks.free,
            objective_us=self._objective_us,
            held_until_ns=held_until_ns,
        )
        if (live := offers.live_epoch) is not None:
            lending.reclaim_unless(now_ns, live)
        offer = offers.read(now_ns)
        # Whoever waits although the batch has room waits for KV.
        held = now_ns < held_until_ns
        kv_short = view.waiting > 0 and view.batch < self._settings.max_batch and not held
        if view.waited_us and not held:
            controller.queued(now_ns, view.waited_us)
        may_hold = lending.plan(now_ns, chunks, offer, terms, kv_short=kv_short)
        grant = controller.decide(view, offer, now_ns, present=offers.present, chunks=may_hold)
        units = controller.would_units if grant.finetune_units else 0.0
        self._granted_units.set(now_ns, units)
        if self._grants.put(grant, now_ns):
            self._marks.action(now_ns, grant, view, controller.why_paused)
        if self._decisions:
            self._decisions.decided(controller.explain(now_ns, view, offer, grant))
        return grant

    def _expect_tokens(self, tokens: float) -> None:
        """Hold the steps from now on to the objective of so many tokens."""
        known = self.controller.step_tokens
        if abs(tokens - known) > _SAME_TOKENS * known or (tokens == 1.0 != known):
            self.controller.set_step_tokens(tokens)

    def close(self) -> None:
        """Revoke everything: the worker reads a pause and gives its chunks back."""
        self._arena.revoke(self._arena.geometry.chunks)
        self._grants.pause()
        if self._decisions:
            self._decisions.drain()

    def snapshot(self) -> StepStatistics:
        """Return the statistics for the agent's link; called by its thread, once a second."""
        if self._decisions:
            self._decisions.drain()
        latencies_us, costs_ns = self._stats.take()
        granted, terms = self._grants.newest, self.controller.terms
        return StepStatistics(
            steps=self._stats.steps,
            steps_over_objective=self._stats.over,
            tpot_p50_s=quantile(latencies_us, 0.5) / 1e6,
            tpot_p99_s=quantile(latencies_us, 0.99) / 1e6,
            busy_s=self._stats.busy_us / 1e6,
            decision_p50_s=quantile(costs_ns, 0.5) / 1e9,
            decision_p99_s=quantile(costs_ns, 0.99) / 1e9,
            view=self._views.newest,
            objective_us=terms.objective_us if terms else 0,
            decode_units=granted.decode_units,
            finetune_units=granted.finetune_units,
            tpot=self._stats.tpot,
            objective_ratio=self._stats.objective_ratio,
            decision=self._stats.decision,
            predictor_ratio=self._stats.predictor_ratio,
            unit_seconds=self._granted_units.seconds,
            granted_s=self._granted_units.granted_s,
            tokens_done=self._offers.tokens_done,
        )

    @property
    def lending_counts(self) -> LendingCounts:
        """Counts of chunks that moved, and how soon they came back."""
        return self._lending.moved

    def predicted_tokens_per_second(self, snapshot: StepStatistics) -> float:
        """Return what a worker would get here now; called once a second, with each new snapshot."""
        would = self.controller.headroom_units(snapshot.view)
        return self._rate.update(
            snapshot.unit_seconds, snapshot.granted_s, snapshot.tokens_done, would
        )

    def _predictor_of(self, profile: Mapping[str, Any]) -> Predictor:
        settings = self._settings
        return predictor_without(settings.without, self._levels, profile, settings.predictor)
