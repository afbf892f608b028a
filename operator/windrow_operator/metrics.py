"""The operator's Prometheus endpoint and its liveness."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from windrow import metrics as names
from windrow_operator.cluster_state import ClusterState, LiveSlot, jobs_of, state_word

# A driver that leads takes a step every few seconds. One that waits for a slow API server does so
# for 55 s at most (four tries of ten seconds and the pauses between them), and is not hung.
LIVE_WITHIN_SECONDS = 120.0
# So many comparisons in a row that found what a watch ought to have told: it is stuck.
_STUCK_AFTER = 3


class Metrics:
    """Everything that the operator counts. One registry, so that tests and processes do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._jobs = self._gauge(names.OPERATOR_JOBS)
        self._slots = self._gauge(names.OPERATOR_SLOTS)
        self.placements = self._counter(names.OPERATOR_PLACEMENTS)
        self.lost = self._counter(names.OPERATOR_LOST)
        self.stale = self._counter(names.OPERATOR_STALE)
        self._injections = self._counter(names.OPERATOR_INJECTIONS)
        self._not_injected = self._counter(names.OPERATOR_NOT_INJECTED)
        self._refused = self._counter(names.OPERATOR_ATTACH_REFUSED)
        self._watch_missed = self._counter(names.OPERATOR_WATCH_MISSED)
        self._leader = self._gauge(names.OPERATOR_LEADER)
        self._last_event = self._gauge(names.OPERATOR_LAST_EVENT)
        self.pass_seconds = Histogram(
            names.OPERATOR_PASS_SECONDS.name,
            names.OPERATOR_PASS_SECONDS.help,
            registry=self.registry,
        )
        self._tpot = self._gauge(names.SLOT_TPOT_P99)
        self._objective = self._gauge(names.SLOT_OBJECTIVE)
        self._compute = self._gauge(names.SLOT_COMPUTE)
        self._memory = self._gauge(names.SLOT_MEMORY)
        self._tokens = self._gauge(names.SLOT_TOKENS)
        self._moved = time.monotonic()
        self._leads = False
        self._missed_in_a_row = 0
        self._lacks = "the operator starts"  # empty: it is ready

    def _gauge(self, metric: names.Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def _counter(self, metric: names.Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def injected(self, rule: str) -> None:
        """Count a pod that was made harvestable."""
        self._injections.labels(rule).inc()

    def not_injected(self, reason: str) -> None:
        """Count a decode pod that could not get what its policy asks for."""
        self._not_injected.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """Count a sidecar that was turned away."""
        self._refused.labels(reason).inc()

    def leads(self, term: int) -> None:
        """Note that this replica leads, and under which term; 0: it does not."""
        self._leads = bool(term)
        self._leader.set(self._leads)
        self.moved()

    def moved(self) -> None:
        """Note that the driver has taken a step."""
        self._moved = time.monotonic()

    def missed(self, objects: Mapping[str, int]) -> None:
        """Note how many objects a comparison found that the watches ought to have told of."""
        self._missed_in_a_row = self._missed_in_a_row + 1 if objects else 0
        for kind, count in objects.items():
            self._watch_missed.labels(kind).inc(count)

    def watched(self) -> None:
        """Note that a watch delivered something."""
        self._last_event.set_to_current_time()

    def passed(self, seconds: float, cluster: ClusterState) -> None:
        """Note a pass of the driver and what it saw."""
        self.moved()
        self.pass_seconds.observe(seconds)
        self._jobs.clear()
        for state, count in Tally(state_word(body) for body in cluster.jobs.values()).items():
            self._jobs.labels(state).set(count)
        attached = sum(live.attached for live in cluster.slots.values())
        self._slots.labels("true").set(attached)
        self._slots.labels("false").set(len(cluster.slots) - attached)

    def slot(self, live: LiveSlot, objective_seconds: float) -> None:
        """Show what a sidecar last reported."""
        if live.beat is None:
            return
        where = (live.namespace, live.name)
        self._tpot.labels(*where).set(live.beat.tpot_p99_seconds)
        self._objective.labels(*where).set(objective_seconds)
        self._compute.labels(*where, "all").set(live.beat.compute_utilization)
        self._compute.labels(*where, "decode").set(live.beat.compute_utilization_decode)
        self._memory.labels(*where).set(live.beat.memory_utilization)
        rates = (running.progress.tokens_per_second for running in jobs_of(live.beat))
        self._tokens.labels(*where).set(sum(rates))

    def forget_slot(self, live: LiveSlot) -> None:
        """Stop showing a slot that is gone."""
        where = (live.namespace, live.name)
        for gauge in (self._tpot, self._objective, self._memory, self._tokens):
            gauge.remove_by_labels(dict(zip(("namespace", "slot"), where, strict=True)))
        self._compute.remove_by_labels({"namespace": where[0], "slot": where[1]})

    def waits(self, lacks: str) -> None:
        """Note that the operator cannot work yet and that it waits, which is no reason to end."""
        self._lacks = lacks

    def works(self) -> None:
        """Note that the operator is at work."""
        self._lacks = ""

    def stalled(self) -> str:
        """Return what does not move any more and a restart would mend; empty: nothing."""
        still_s = time.monotonic() - self._moved
        if self._leads and still_s > LIVE_WITHIN_SECONDS:
            return f"the driver has taken no step for {still_s:.0f} s"
        if self._missed_in_a_row >= _STUCK_AFTER:
            return f"the watches told nothing for {self._missed_in_a_row} comparisons"
        return ""

    def application(self) -> web.Application:
        """Return the HTTP application: `/metrics`, `/healthz` and `/readyz`."""
        application = web.Application()
        application.router.add_get("/metrics", self._serve)
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/readyz", self._readiness)
        return application

    async def _serve(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _readiness(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._lacks else 200, text=self._lacks or "ok")

    async def _health(self, _: web.Request) -> web.Response:
        stalled = self.stalled()
        return web.Response(status=503 if stalled else 200, text=stalled or "ok")
