"""The step hook that harvests: it publishes the view, decides, grants and lends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from windrow.eventlog import EventLog, MarkEvent
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.harvest.ablation import NoGuard, NoHandover, NoPredictor
from windrow_sidecar.engines.harvest.compiled import CompiledController
from windrow_sidecar.engines.harvest.decision_log import Decisions
from windrow_sidecar.engines.harvest.lending import LendingCounts, LendingManager
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.engines.harvest.stats import HarvestRate, StepStatistics, StepStats, quantile
from windrow_sidecar.engines.hook import StepInput
from windrow_sidecar.qos.control import Controller, EngineTraits
from windrow_sidecar.qos.lending import ChunkCounts
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.policies.base import is_for_one_step
from windrow_sidecar.qos.predictor import Predictor, predictor_of
from windrow_sidecar.qos.solo import SoloStepModel, solo_models
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Action, Grant, Offer, View

_NOBODY = Offer()
_DECODE = 0  # a writer of the page


class HarvestHook:
    """Implements `engines.hook.StepHook` over a real arena and page.

    Without a policy it grants nothing and lends nothing. `set_terms` and `worker_lives` may be
    called from another thread; they take effect at the next step.

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
        self._arena, self._page, self._clock, self._log = arena, arena.page, clock, log
        self._levels = levels
        self._settings = settings or HarvestSettings()
        solo: dict[int, SoloStepModel] = solo_models(profile) if profile else {}
        without = self._settings.without
        self._predictor_type = NoPredictor if "predictor" in without else Predictor
        predictor = self._predictor_of(profile) if profile else None
        geometry, pause_epoch = arena.geometry, arena.page.pause_epoch
        engine = EngineTraits(geometry.layers, self._settings.gaps, geometry.chunk_bytes)
        self.controller: Controller
        if without & {"guard", "predictor", "handover"}:
            self.controller = Controller(
                levels,
                predictor,
                NoGuard() if "guard" in without else None,
                pause_epoch=pause_epoch,
                handover=NoHandover(levels.units, pause_epoch) if "handover" in without else None,
                engine=engine,
            )
        else:
            self.controller = CompiledController(
                levels, predictor, pause_epoch=pause_epoch, engine=engine
            )
        self._lending = LendingManager(arena, self._settings, log)
        self._stats = StepStats()
        self._rate = HarvestRate(profile, solo, levels.units)
        self._new_terms: list[HarvestTerms | None] = []
        self._live_epoch: int | None = None  # None: nobody has said
        self._view = View()
        self._last_step = (0, 0)  # end_ns, latency_us
        self._granted = Grant(decode_units=levels.units, pause_epoch=arena.page.pause_epoch)
        self._published_ns, self._decided_ns, self._paused_ns = 0, clock(), 0
        self._unit_ns, self._units = 0.0, 0.0  # that the worker has
        self._tokens_done = 0
        self._present = False
        self._prefilled = False
        self._waiting_since_ns = 0  # 0: no request waits
        self._unjudged: list[tuple[int, int]] = []  # latency_us, cost_ns
        self._breaker, self._trips = "", 0
        self._decisions = Decisions(self._settings.run_dir) if self._settings.run_dir else None
        self._objective_us = 0
        self._counts = (0, 0, 0, 0)  # kv, free, reserved, lent, as the view has them
        self._steady_until_ns = 0  # until then the last decision stands, if facts stay the same
        self._cost_ns = 0

    @property
    def cost_us(self) -> float:
        """What `before_step` took of the current step."""
        return self._cost_ns / 1e3

    @property
    def request_objective_us(self) -> int:
        """The objective, where the policy judges requests and not steps; else 0."""
        terms = self.controller.terms
        return terms.objective_us if terms and terms.per_request else 0

    @property
    def is_awake(self) -> bool:
        """Whether there is anything to decide: a policy, or chunks that a worker still holds."""
        return bool(self._new_terms) or self.controller.terms is not None or self._lending.holds_out

    @property
    def chunks_lacking(self) -> int:
        """How many chunks more would have to be FREE for what the worker wants and may have."""
        return self._lending.lacking

    def set_profile(self, profile: Mapping[str, Any]) -> None:
        """Decide by another latency profile from now on. Decode's thread, between two steps.

        Raises:
            UserError: it lacks a share that decode would have beside a worker.
        """
        solo = solo_models(profile)
        self.controller.set_predictor(self._predictor_of(profile))
        self._rate = HarvestRate(profile, solo, self._levels.units)
        self._steady_until_ns = 0

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """A policy has arrived, changed or gone."""
        self._new_terms.append(terms)

    def worker_lives(self, epoch: int) -> None:
        """The only worker that lives is of this job epoch; 0: none does."""
        self._live_epoch = epoch
        self._steady_until_ns = 0

    def before_step(self, facts: StepInput) -> Grant:
        """Show the view, decide, grant.

        Between two torch steps caches are cold and every line of Python costs ten times what it
        costs warm, so a decision is kept for a while when nothing has changed that it rests on.
        """
        begin_ns = self._clock()
        if (
            begin_ns < self._steady_until_ns
            and facts.batch == self._view.batch
            and not (facts.admitted_tokens or facts.waiting or facts.prefill_tokens)
            and not self._new_terms
        ):
            # What the worker heeds of decode between two decisions is that it lives.
            self._page.beat(_DECODE)
            self._waiting_since_ns = 0
            decision = self._granted
        else:
            decision = self._decide_anew(facts, begin_ns)
        self._cost_ns = self._clock() - begin_ns
        return decision

    def _decide_anew(self, facts: StepInput, now_ns: int) -> Grant:
        self._judge(now_ns)
        self._prefilled = facts.prefill_tokens > 0 or facts.batch == 0
        if facts.admitted_tokens:
            self._lending.admit(now_ns, facts.admitted_tokens)
        decision = self._decide(now_ns, facts)
        keep = self.controller.is_settled and not is_for_one_step(decision)
        if keep and not self._prefilled:
            self._steady_until_ns = now_ns + self._settings.steady_ns
        return decision

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Take note; a step over the objective is judged at once, others at the next decision."""
        self._last_step = (end_ns, latency_us)
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
            stats.add(latency_us, cost_ns, self._objective_us)
            if not self._prefilled:
                residual = controller.observe(now_ns, latency_us)
                if residual is not None:
                    stats.predicted(residual)
        guard = controller.guard
        if guard.trips != self._trips or guard.reason != self._breaker:
            self._steady_until_ns = 0
            if self._decisions:
                self._decisions.breached(guard.reason or "two steps over the objective")
            self._trips = guard.trips
            self._mark_breaker(now_ns, guard.reason)
        self._lending.size_reserve(now_ns, controller.terms, controller.in_flight_bound_us)

    def idle(self, now_ns: int) -> Grant:
        """Decode runs dry: the worker may have the device."""
        self._judge(now_ns)
        self._waiting_since_ns = 0
        return self._decide(now_ns, None)

    def close(self) -> None:
        """Revoke everything: the worker reads a pause and gives its chunks back."""
        self._arena.revoke(self._arena.geometry.chunks)
        self._granted = Grant(pause_epoch=self._granted.pause_epoch + 1)
        self._publish(self._granted, self._clock())
        if self._decisions:
            self._decisions.drain()

    def snapshot(self) -> StepStatistics:
        """For the report of the agent's link; called by its thread, once a second."""
        if self._decisions:
            self._decisions.drain()
        latencies_us, costs_ns = self._stats.take()
        granted = self._granted
        return StepStatistics(
            steps=self._stats.steps,
            steps_over_objective=self._stats.over,
            tpot_p50_s=quantile(latencies_us, 0.5) / 1e6,
            tpot_p99_s=quantile(latencies_us, 0.99) / 1e6,
            busy_s=self._stats.busy_us / 1e6,
            decision_p50_s=quantile(costs_ns, 0.5) / 1e9,
            decision_p99_s=quantile(costs_ns, 0.99) / 1e9,
            view=self._view,
            decode_units=granted.decode_units,
            finetune_units=granted.finetune_units,
            tpot=self._stats.tpot,
            objective_ratio=self._stats.objective_ratio,
            decision=self._stats.decision,
            predictor_ratio=self._stats.predictor_ratio,
            unit_seconds=self._unit_ns / 1e9,
            tokens_done=self._tokens_done,
        )

    @property
    def lending_counts(self) -> LendingCounts:
        """How many chunks moved, and how soon they came back."""
        return self._lending.moved

    def predicted_tokens_per_second(self, snapshot: StepStatistics) -> float:
        """What a worker would get here now; called once a second, with each new snapshot."""
        would = self.controller.headroom_units(snapshot.view)
        return self._rate.update(snapshot.unit_seconds, snapshot.tokens_done, would)

    def _predictor_of(self, profile: Mapping[str, Any]) -> Predictor:
        form = self._settings.predictor
        return predictor_of(self._levels, profile, self._predictor_type, form)

    def _view_of(self, facts: StepInput | None, now_ns: int) -> View:
        """Return what the page shows of a step; None: the engine runs nothing."""
        last_end_ns, last_step_us = self._last_step
        kv, free, reserved, lent = self._counts
        if facts is None:
            step, start_ns, batch = self._view.step, now_ns, 0
            context_tokens = waiting = admitted_tokens = slack_us = waited_us = 0
        else:
            # A step that computes a prompt is work even when nobody gets a token: not idle. Nor is
            # one for which no request finds room; where requests are held back, nothing runs.
            held = facts.start_ns < self._granted.hold_admission_until_ns
            least = 0 if held and not facts.prefill_tokens else 1
            step, start_ns, batch = facts.step, facts.start_ns, facts.batch or least
            context_tokens, waiting = facts.context_tokens, facts.waiting
            admitted_tokens = facts.admitted_tokens + facts.prefill_tokens
            slack_us, waited_us = facts.slack_us, self._waited_us(facts)
        # In the order of `View`: with keywords it takes three times as long, before every step.
        return View(
            step,
            start_ns,
            last_end_ns,
            last_step_us,
            batch,
            context_tokens,
            waiting,
            admitted_tokens,
            kv,
            free,
            reserved,
            lent,
            self._objective_us,
            slack_us,
            waited_us,
        )

    def _waited_us(self, facts: StepInput) -> int:
        """How long the queue has not been empty: at least as long as its oldest request waits."""
        if not facts.waiting:
            self._waiting_since_ns = 0
            return 0
        self._waiting_since_ns = self._waiting_since_ns or facts.start_ns
        return (facts.start_ns - self._waiting_since_ns) // 1000

    def _decide(self, now_ns: int, facts: StepInput | None) -> Grant:
        while self._new_terms:
            self._take_terms(now_ns, self._new_terms.pop(0))
        terms = self.controller.terms
        self._steady_until_ns = 0
        self._objective_us = terms.objective_us if terms else 0
        free, kv, lent, reserved, draining = self._arena.counts()
        self._counts = (kv, free, reserved, lent)
        self._view = view = self._view_of(facts, now_ns)
        self._page.publish_view(view)
        offer = self._read_offer(now_ns)
        chunks = ChunkCounts(free, kv, lent, reserved, draining)
        # Whoever waits although the batch has room waits for KV.
        held = now_ns < self._granted.hold_admission_until_ns
        kv_short = view.waiting > 0 and view.batch < self._settings.max_batch and not held
        may_hold = self._lending.plan(now_ns, chunks, offer, terms, kv_short=kv_short)
        decision = self.controller.decide(
            view, offer, now_ns, present=self._present, chunks=may_hold
        )
        self._unit_ns += self._units * (now_ns - self._decided_ns)
        self._decided_ns = now_ns
        self._units = self.controller.would_units if decision.finetune_units else 0.0
        self._grant(decision, now_ns)
        if self._decisions:
            self._decisions.decided(self.controller.explain(now_ns, view, offer, decision))
        return decision

    def _read_offer(self, now_ns: int) -> Offer:
        """The worker's offer; a dead or silent worker offers nothing."""
        live = self._live_epoch
        if live is not None:
            self._lending.reclaim_unless(now_ns, live)
        offer = Offer._make(self._page.read_offer())
        present = (
            offer.job_epoch > 0
            and live in (None, offer.job_epoch)
            and self._page.heartbeat_age_ns(1) < self._settings.worker_stale_ns
        )
        if present != self._present:
            self._present = present
            what = "worker-attached" if present else "worker-gone"
            self._mark(now_ns, what, f"epoch {offer.job_epoch}")
        if not present:
            return _NOBODY
        self._tokens_done = offer.tokens_done
        return offer

    def _grant(self, new: Grant, now_ns: int) -> None:
        """Publish what changed, or what the worker has not heard for a while."""
        old = self._granted
        self._granted = new
        changed = (
            new.finetune_units != old.finetune_units
            or new.action != old.action
            or new.pause_epoch != old.pause_epoch
            or new.chunks != old.chunks
            or new.decode_units != old.decode_units
            or is_for_one_step(new)
            or is_for_one_step(old)
        )
        if not changed and now_ns - self._published_ns < self._settings.regrant_ns:
            return
        self._publish(new, now_ns)
        if new.action != old.action:
            self._mark_turn(new, now_ns)

    def _mark_turn(self, new: Grant, now_ns: int) -> None:
        """A pause or its end; a worker that starves for a moment is no event."""
        why = self.controller.why_paused
        if new.action == Action.PAUSE and why != "starving":
            self._paused_ns = now_ns
            batch, context = self._view.batch, self._view.context_tokens
            self._mark(now_ns, "pause", f"{why}: batch {batch}, {context} context tokens")
        elif new.action != Action.PAUSE and self._paused_ns:
            self._mark(now_ns, "resume", f"after {(now_ns - self._paused_ns) / 1e6:.0f} ms")
            self._paused_ns = 0

    def _publish(self, grant: Grant, now_ns: int) -> None:
        self._published_ns = now_ns
        self._page.publish_grant(grant)

    def _take_terms(self, now_ns: int, terms: HarvestTerms | None) -> None:
        self.controller.set_terms(terms)
        self._mark(
            now_ns,
            "policy",
            f"{terms.name}: {terms.policy}, {terms.mode}, {terms.objective_us} us"
            if terms
            else "none",
        )

    def _mark_breaker(self, now_ns: int, reason: str) -> None:
        if reason != self._breaker:
            self._breaker = reason
            self._mark(now_ns, "breaker" if reason else "breaker-trial", reason)

    def _mark(self, now_ns: int, what: str, detail: str) -> None:
        if self._log:
            self._log.append(MarkEvent(now_ns, what, detail))
