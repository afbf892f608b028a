"""The step hook that harvests: before each step it shows the view, decides, grants and lends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from windrow.eventlog import EventLog, MarkEvent
from windrow.metrics import CHUNK_RETURN_BUCKETS_SECONDS
from windrow_sidecar._core import Arena, HarvestStep
from windrow_sidecar.engines.harvest.ablation import controller_without, predictor_without
from windrow_sidecar.engines.harvest.beside import StepsBeside
from windrow_sidecar.engines.harvest.decision_log import Decisions, Outcome
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.engines.harvest.stats import (
    BucketCounts,
    HarvestRate,
    LendingCounts,
    StepStatistics,
    StepStats,
    quantile,
)
from windrow_sidecar.engines.profile import several_batches, solo_samples, with_co_run
from windrow_sidecar.qos.control import Decided, EngineTraits
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloStepModel, solo_models
from windrow_sidecar.qos.terms import DEFERRING, HarvestTerms, in_turns
from windrow_sidecar.qos.view import Grant, Offer, View


class HarvestHook(HarvestStep):
    """Implements `engines.hook.StepHook` over a real arena and page.

    `before_step`, `after_step` and `idle` are compiled as a whole (`csrc/src/harvest_step.cpp`);
    here is what happens seldom, or in other threads. Without a policy it grants nothing and lends
    nothing. `set_terms`, `throttled` and `worker_lives` may be called from another thread; they
    take effect at the next step.

    Args:
        arena: made by this process.
        levels: the splits that the engine can put in force.
        profile: a `LatencyProfileSpec` as a mapping; None: nothing is ever harvested.
        settings: sizes and times.
        clock: nanoseconds of a simulated CLOCK_MONOTONIC, where arena and page are simulated too.
        log: marks go here.
        group: lends the chunks of all ranks of the engine; None: the arena lends its own.

    Attributes:
        policy: the name of the one in force, as the HarvestPolicy has it; "": none is.
        profile: the latency profile in force; None: there is none, or only an estimate.
    """

    def __init__(
        self,
        arena: Arena,
        levels: Partitioning,
        profile: Mapping[str, Any] | None,
        settings: HarvestSettings | None = None,
        *,
        clock: Callable[[], int] | None = None,
        log: EventLog | None = None,
        group: GroupChunks | None = None,
    ) -> None:
        self._levels, self._log = levels, log
        self._settings = settings = settings or HarvestSettings()
        solo: dict[int, SoloStepModel] = solo_models(profile) if profile else {}
        geometry, pause_epoch = arena.geometry, arena.page.pause_epoch
        self.controller = controller_without(
            settings.without,
            levels,
            self._predictor_of(profile) if profile else None,
            pause_epoch=pause_epoch,
            engine=EngineTraits(
                settings.layers or geometry.layers, settings.gaps, geometry.chunk_bytes
            ),
        )
        super().__init__(
            arena,
            clock=clock,
            group=group,
            decider=self.controller.decider,
            units=levels.units,
            pause_epoch=pause_epoch,
            chunks=geometry.chunks,
            chunk_bytes=geometry.chunk_bytes,
            slots_per_chunk=geometry.slots_per_chunk,
            max_batch=settings.max_batch,
            drain_us=settings.drain_us,
            reserve_prompts=settings.reserve == "traffic",
            keeps_reserve="reserve" not in settings.without,
            admission_window_ns=settings.admission_window_ns,
            worker_stale_ns=settings.worker_stale_ns,
            regrant_ns=settings.regrant_ns,
            steady_ns=settings.steady_ns,
            lending_every_ns=settings.lending_every_ns,
            keeps_decisions=settings.run_dir is not None,
        )
        self._stats = StepStats()
        self._returns = BucketCounts(CHUNK_RETURN_BUCKETS_SECONDS)
        self._rate = HarvestRate(profile, solo, levels.units)
        self._decisions = Decisions(settings.run_dir) if settings.run_dir else None
        self._beside = StepsBeside(levels)
        # What such steps are added to, and what they were added to at the last report.
        self._alone = _measured_alone(profile)
        self._reported: Mapping[str, Any] | None = None
        self.profile = profile
        self._new_terms: list[HarvestTerms | None] = []
        self.policy = ""
        self._throttled: list[float] = []  # seconds for which a CPU limit held decode up

    @property
    def request_objective_us(self) -> int:
        """The objective, where the policy judges requests and not steps; else 0."""
        terms = self.controller.terms
        return terms.objective_us if terms and terms.per_request else 0

    @property
    def first_token_objective_us(self) -> int:
        """Time to first token that the policy keeps; 0: none."""
        terms = self.controller.terms
        return terms.first_token_us if terms else 0

    @property
    def deferral_us(self) -> int:
        """Bound of the policy on holding requests back; 0: it holds none."""
        terms = self.controller.terms
        return terms.deferral_us if terms and terms.policy in DEFERRING else 0

    @property
    def is_awake(self) -> bool:
        """True where there is something to decide: a policy, or chunks that a worker holds."""
        return bool(self._new_terms) or self.controller.terms is not None or self._holds_out

    def set_profile(self, profile: Mapping[str, Any] | None, *, estimated: bool = False) -> None:
        """Decide by another latency profile from now on. Decode's thread, between two steps.

        What was measured beside a worker here is added to a profile that says nothing of that.

        Args:
            profile: the profile; None: nothing is harvested until there is one.
            estimated: it is no measurement, and nobody else is to have it.

        Raises:
            UserError: it lacks a share that decode would have beside a worker.
        """
        self._alone = None if estimated else _measured_alone(profile)
        if profile is not None and self._alone is profile:
            profile = with_co_run(profile, self._beside.samples, self._levels.units)
        solo = solo_models(profile) if profile else {}
        self.controller.set_predictor(self._predictor_of(profile) if profile else None)
        self._rate = HarvestRate(profile, solo, self._levels.units)
        self.profile = None if estimated else profile
        self._look_again()

    def take_profile_beside(self) -> Mapping[str, Any] | None:
        """Return the profile with the co-run part that steps beside workers make; None: no news.

        The agent's link asks, behind each snapshot. Decisions do not wait for it: they follow each
        step anyway.
        """
        self._beside.add(self._take_beside())
        measured = self._rate.basis == "measured"
        news = self._beside.news(lambda units: self._rate.at(units) if measured else 0.0)
        alone, samples = self._alone, self._beside.samples
        if alone is None or not samples or not (news or alone is not self._reported):
            return None
        self._reported = alone
        return with_co_run(alone, samples, self._levels.units, taken_at=datetime.now(UTC))

    def set_terms(self, terms: HarvestTerms | None) -> None:
        """A policy has arrived, changed or gone."""
        self._new_terms.append(terms)
        self._news()

    def throttled(self, seconds: float) -> None:
        """A CPU limit has kept decode from running for so long beside the worker."""
        self._throttled.append(seconds)
        self._news()

    def close(self) -> None:
        """Revoke everything: the worker reads a pause and gives its chunks back."""
        self._revoke_all()
        self._drain_decisions()

    def snapshot(self) -> StepStatistics:
        """Return the figures for the agent; called by its link's thread, once a second."""
        self._drain_decisions()
        latencies_us, costs_ns = self._stats.take(*self._take_measured())
        granted: Grant = self._grant
        terms = self.controller.terms
        steps, over, busy_us, _, _, _, unit_seconds, granted_s = self._counters()
        first_tokens, first_tokens_over = self.controller.decider.first_tokens
        return StepStatistics(
            steps=steps,
            steps_over_objective=over,
            tpot_p50_s=quantile(latencies_us, 0.5) / 1e6,
            tpot_p99_s=quantile(latencies_us, 0.99) / 1e6,
            busy_s=busy_us / 1e6,
            decision_p50_s=quantile(costs_ns, 0.5) / 1e9,
            decision_p99_s=quantile(costs_ns, 0.99) / 1e9,
            view=View._make(self._view),
            objective_us=terms.objective_us if terms else 0,
            decode_units=granted.decode_units,
            finetune_units=granted.finetune_units,
            tpot=self._stats.tpot,
            objective_ratio=self._stats.objective_ratio,
            decision=self._stats.decision,
            predictor_ratio=self._stats.predictor_ratio,
            unit_seconds=unit_seconds,
            granted_s=granted_s,
            tokens_done=self._tokens_done,
            first_tokens=first_tokens,
            first_tokens_over_objective=first_tokens_over,
        )

    @property
    def lending_counts(self) -> LendingCounts:
        """Counts of chunks that moved, and how soon they came back."""
        for seconds in self._take_returns():
            self._returns.add(seconds)
        _, _, _, lent, revoked, reclaimed, _, _ = self._counters()
        return LendingCounts(lent, revoked, reclaimed, self._returns)

    def predicted_tokens_per_second(self, snapshot: StepStatistics) -> float:
        """Return what a worker would get now; called once a second, with each new snapshot."""
        would = self.controller.headroom_units(snapshot.view)
        return self._rate.update(
            snapshot.unit_seconds, snapshot.granted_s, snapshot.tokens_done, would
        )

    @property
    def predicted_from(self) -> str:
        """Source of that rate (see `HarvestRate.basis`)."""
        return self._rate.basis

    # What the compiled step calls, seldom.

    def _take_throttled(self, now_ns: int) -> None:
        while self._throttled:
            self.controller.guard.throttled(now_ns, self._throttled.pop(0))

    def _take_terms(self, now_ns: int) -> None:
        while self._new_terms:
            terms = self._new_terms.pop(0)
            played = in_turns(terms) if terms and self._settings.in_turns else terms
            self.controller.set_terms(played)
            self.policy = terms.policy if terms else ""
            self._terms_of_steps()
            if terms is None:
                self._mark(now_ns, "policy", "none")
                continue
            what = f"{terms.name}: {terms.policy}, {terms.mode}, {terms.objective_us} us"
            self._mark(now_ns, "policy", what)

    def _take_step_tokens(self, tokens: float) -> None:
        self.controller.set_step_tokens(tokens)
        self._terms_of_steps()

    def _terms_of_steps(self) -> None:
        controller, terms = self.controller, self.controller.terms
        self._set_terms(
            any=terms is not None,
            harvests=terms is not None and terms.mode == "harvest",
            objective_us=controller.step_objective_us,
            token_objective_us=terms.objective_us if terms else 0,
            max_memory_percent=terms.max_memory_percent if terms else 0,
            step_tokens=controller.step_tokens,
        )

    def _mark(self, now_ns: int, what: str, detail: str) -> None:
        if self._log:
            self._log.append(MarkEvent(now_ns, what, detail))

    def _breached(self, reason: str) -> None:
        if self._decisions:
            self._decisions.breached(reason)

    def _drain_decisions(self) -> None:
        if self._decisions is None:
            return
        for entry in self._take_kept():
            if len(entry) == len(Outcome._fields):
                self._decisions.keep(Outcome._make(entry))
                continue
            at_ns, view, offer, grant, *rest = entry
            kept = Decided(at_ns, View._make(view), Offer._make(offer), Grant._make(grant), *rest)
            self._decisions.keep(kept)
        self._decisions.drain()

    def _predictor_of(self, profile: Mapping[str, Any]) -> Predictor:
        settings = self._settings
        return predictor_without(settings.without, self._levels, profile, settings.predictor)


def _measured_alone(profile: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a profile that lacks steps beside a worker and can have them; None: any other.

    Rates of a device are no steps, and where batches of one size were measured nothing is sure
    enough to be handed on.
    """
    if profile is None or profile.get("roofline") or (profile.get("coRun") or {}).get("samples"):
        return None
    return profile if several_batches(solo_samples(profile)) else None
