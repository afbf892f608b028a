"""Serve the operator's Prometheus metrics and its liveness probe."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from windrow import metrics as names
from windrow.conditions import ConditionType as T
from windrow.conditions import Reason, get_condition, is_true
from windrow_operator.cluster_state import ClusterState
from windrow_operator.liveness import Liveness
from windrow_operator.model import CheckedPolicy, Job, Slot
from windrow_operator.slots import readiness
from windrow_operator.work_queue import in_pieces

_REASONS = frozenset(map(str, Reason))


class Metrics:
    """Counters of the operator. One registry, so that tests and processes do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._jobs = self._gauge(names.JOBS)
        self._slots = self._gauge(names.SLOTS)
        self._time_to_place = self._histogram(names.TIME_TO_PLACE)
        self._placements = self._counter(names.PLACEMENTS)
        self._placement_ends = self._counter(names.PLACEMENT_ENDS)
        self._harvested = self._counter(names.HARVESTED_SECONDS)
        self._used = self._gauge(names.POLICY_USED)
        self._quota = self._gauge(names.POLICY_QUOTA)
        self.stale = self._counter(names.STALE_WORKERS)
        self.streams = self._gauge(names.STREAMS)
        self._refused = self._counter(names.STREAMS_REFUSED)
        self._heartbeat_age = self._gauge(names.HEARTBEAT_AGE)
        self._injections = self._counter(names.INJECTED)
        self._not_injected = self._counter(names.NOT_INJECTED)
        self.webhook_seconds = self._histogram(names.WEBHOOK)
        self._leader = self._gauge(names.LEADER)
        self._pass_seconds = self._histogram(names.PASS_SECONDS)
        self._last_event = self._gauge(names.LAST_EVENT)
        self._api_requests = self._counter(names.API_REQUESTS)
        self._api_seconds = self._histogram(names.API_SECONDS)
        self._certificates = self._gauge(names.CERTIFICATE_EXPIRY)
        self._watch_missed = self._counter(names.WATCH_MISSED)
        self.liveness = Liveness()
        self._lacks = "the operator starts"  # empty: it is ready

    def _gauge(self, metric: names.Metric) -> Gauge:
        return Gauge(metric.name, metric.help, metric.labels, registry=self.registry)

    def _counter(self, metric: names.Metric) -> Counter:
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: names.Metric) -> Histogram:
        return Histogram(
            metric.name,
            metric.help,
            metric.labels,
            buckets=metric.buckets,
            registry=self.registry,
        )

    # --- admission and sidecars -------------------------------------------------------------------

    def injected(self, rule: str) -> None:
        """Count a pod that was made harvestable."""
        self._injections.labels(rule).inc()

    def not_injected(self, reason: str) -> None:
        """Count a decode pod that could not get what its policy asks for."""
        self._not_injected.labels(reason).inc()

    def refused(self, reason: str) -> None:
        """Count a sidecar that was turned away."""
        self._refused.labels(reason).inc()

    # --- jobs, slots, policies --------------------------------------------------------------------

    def status_written(self, job: Job, after: Mapping[str, Any], now: datetime) -> None:
        """Count what a new status of a job says: that it was placed, or that a placement ended."""
        before = job.status.get("conditions")
        was, is_now = is_true(before, T.PLACED), is_true(after.get("conditions"), T.PLACED)
        if is_now and not was:
            self._placements.labels(job.namespace).inc()
            waited = (now - _waits_since(job, after.get("conditions"))).total_seconds()
            self._time_to_place.labels(job.namespace).observe(max(0.0, waited))
        elif was and not is_now:
            placed = get_condition(after.get("conditions"), T.PLACED) or {}
            self._placement_ends.labels(job.namespace, _known(placed.get("reason", ""))).inc()

    def harvested(self, seconds: float, policy: CheckedPolicy, tenants: Iterable[str]) -> None:
        """Count the time that workers had a device; the jobs of `tenants` shared it."""
        sharers = list(tenants)
        for namespace in sharers:
            self._harvested.labels(namespace, policy.namespace, policy.name).inc(
                seconds / len(sharers)
            )

    async def show(self, cluster: ClusterState, views: Mapping[str, Slot], now: datetime) -> None:
        """Show what there is."""
        jobs = Tally(
            (body["metadata"]["namespace"], state_word(body)) for body in cluster.jobs.values()
        )
        slots: Tally[tuple[str, str, str]] = Tally()
        async for key in in_pieces(cluster.slots):
            if key in views:
                slots[_slot_labels(key, views[key])] += 1
        self._jobs.clear()
        for labels, count in jobs.items():
            self._jobs.labels(*labels).set(count)
        self._slots.clear()
        for where, count in slots.items():
            self._slots.labels(*where).set(count)
        beats = [slot.beat_at for slot in cluster.slots.values() if slot.attached and slot.beat_at]
        self._heartbeat_age.set((now - min(beats)).total_seconds() if beats else 0.0)
        self._used.clear()
        self._quota.clear()
        for key, policy in cluster.policies.items():
            self._used.labels(policy.namespace, policy.name).set(
                cluster.usage.today(key, now).seconds
            )
            if policy.spec is not None and policy.spec.access.gpu_seconds_per_day is not None:
                quota = policy.spec.access.gpu_seconds_per_day
                self._quota.labels(policy.namespace, policy.name).set(quota)

    # --- the operator itself ----------------------------------------------------------------------

    def leads(self, term: int) -> None:
        """Note that this replica leads, and under which term; 0: it does not."""
        self.liveness.leads(yes=bool(term))
        self._leader.set(bool(term))

    def missed(self, objects: Mapping[str, int]) -> None:
        """Note how many objects a comparison found that the watches had not reported."""
        self.liveness.compared(objects)
        for kind, count in objects.items():
            self._watch_missed.labels(kind).inc(count)

    def watched(self) -> None:
        """Note that a watch delivered something."""
        self._last_event.set_to_current_time()

    def called(self, method: str, path: str, code: int, seconds: float) -> None:
        """Count a call to the API server; `code` 0: no answer."""
        self._api_requests.labels(method, resource_of(path), str(code)).inc()
        self._api_seconds.labels(method).observe(seconds)

    def certificate(self, which: str, ends: datetime) -> None:
        """Show when a certificate ends."""
        self._certificates.labels(which).set(ends.timestamp())

    def passed(self, seconds: float) -> None:
        """Note a look of the driver at what is due."""
        self._pass_seconds.observe(seconds)

    def waits(self, lacks: str) -> None:
        """Note that the operator cannot work yet and that it waits, which is no reason to end."""
        self._lacks = lacks

    def works(self) -> None:
        """Note that the operator is at work."""
        self._lacks = ""

    def application(self, *middlewares: Middleware) -> web.Application:
        """Return the HTTP application: `/metrics`, `/healthz` and `/readyz`."""
        application = web.Application(middlewares=middlewares)
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
        stalled = self.liveness.stalled()
        return web.Response(status=503 if stalled else 200, text=stalled or "ok")


def resource_of(path: str) -> str:
    """Return the resource of a path of the API server, with the subresource: `pods/status`.

    Neither names nor namespaces, which would make a series of each.
    """
    words = path.partition("?")[0].strip("/").split("/")
    words = words[2:] if words[0] == "api" else words[3:]
    if words[:1] == ["namespaces"] and len(words) > 2:
        words = words[2:]
    return "/".join(words[:1] + words[2:3])


def _known(reason: str) -> str:
    """Return a reason as a label: a sidecar may say any word, and each would be a series."""
    return reason if reason in _REASONS else "Other"


def state_word(body: Mapping[str, Any]) -> str:
    """Return the printed state of a job object."""
    return str((body.get("status") or {}).get("state") or "Pending")


def _waits_since(job: Job, after: Iterable[Mapping[str, Any]] | None = None) -> datetime:
    """Return when a job began to wait: it was made, lost its slot, or was no longer suspended.

    A job with a queue waits for a slot since Kueue admitted it, as the conditions `after` say.
    """
    conditions = job.status.get("conditions")
    turns = [get_condition(conditions, kind) for kind in (T.PLACED, T.SUSPENDED)]
    since = [datetime.fromisoformat(turn["lastTransitionTime"]) for turn in turns if turn]
    began = max([job.created, *since]) if job.epoch else job.created
    admitted = get_condition(after, T.ADMITTED)
    if admitted is None:
        return began
    return max(began, datetime.fromisoformat(admitted["lastTransitionTime"]))


def _slot_labels(key: str, view: Slot) -> tuple[str, str, str]:
    policy = view.terms.policy.name if view.terms else ""
    return key.partition("/")[0], policy, str(readiness(view)[1])
