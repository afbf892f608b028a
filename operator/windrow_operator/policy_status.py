"""Write the status of HarvestPolicies: slots and jobs under them, and today's usage."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timedelta

from windrow.crd import HARVEST_POLICY
from windrow_operator import policies, unprepared
from windrow_operator.cluster_state import ClusterState
from windrow_operator.events import Recorder
from windrow_operator.kube import ApiError, Body, Kube, ObjectNotFound, kind_path
from windrow_operator.metrics import Metrics
from windrow_operator.model import CheckedPolicy
from windrow_operator.reconcile import Event
from windrow_operator.work_queue import in_pieces

log = logging.getLogger(__name__)

USAGE_INTERVAL = timedelta(seconds=10)
# Pods that are selected and were not prepared are looked for so often, and so many of them.
UNPREPARED_INTERVAL = timedelta(seconds=60)
_UNPREPARED_LISTED = 50


class PolicyStatus:
    """Counts and writes.

    Args:
        cluster: what is known.
        kube: a client that may write.
        recorder: of events.
        metrics: of the process.
    """

    def __init__(
        self, cluster: ClusterState, kube: Kube, recorder: Recorder, metrics: Metrics
    ) -> None:
        self._cluster, self._kube, self._metrics = cluster, kube, metrics
        self._recorder = recorder
        # By policy key: the generation that was looked for, when, and what was found in words.
        self._unprepared: dict[str, tuple[int, datetime, str]] = {}
        self._usage_written: dict[str, datetime] = {}  # by policy key
        self._charged_at: datetime | None = None

    def charge(self, now: datetime) -> None:
        """Count the time since the last call for the jobs that were at work."""
        since = now - self._charged_at if self._charged_at else timedelta(0)
        self._charged_at = now
        for key in self._cluster.active_slots():
            live = self._cluster.slots.get(key)
            pod = self._cluster.pods.get(live.pod_uid) if live and live.attached else None
            terms = self._cluster.terms(pod, now) if pod else None
            if terms is not None:
                tenants = self._cluster.tenants(key)
                self._cluster.usage.charge(terms.policy.key, since.total_seconds(), tenants, now)
                self._metrics.harvested(since.total_seconds(), terms.policy, tenants)

    async def write(self, now: datetime) -> None:
        """Write the status of each policy that changed; one that fails is written the next time."""
        policy_counts = await self._counts()
        there = self._cluster.policy_bodies.keys()
        self._unprepared = {key: held for key, held in self._unprepared.items() if key in there}
        for key in list(self._cluster.policy_bodies):
            # Watches go on while a status is written: a policy may be gone by its turn.
            if (body := self._cluster.policy_bodies.get(key)) is None:
                continue
            policy, before = self._cluster.policies[key], body.get("status") or {}
            lacking = await self._words_of_unprepared(policy, now)
            after = policies.status_of(
                policy,
                replace(policy_counts.get(key, policies.PolicyCounts()), unprepared=lacking),
                self._cluster.usage.newest(key),
                before.get("conditions") or (),
                now,
            )
            if not self._is_due(key, before, after, now):
                continue
            path = kind_path(HARVEST_POLICY, policy.namespace, policy.name, "status")
            try:
                self._cluster.put_policy(await self._kube.replace(path, {**body, "status": after}))
                self._usage_written[key] = now
            except ObjectNotFound:
                self._cluster.drop_policy(key)
            except ApiError as error:
                # A conflict: the watch brings the newer version.
                log.info("policy %s: %s", key, error)

    async def _words_of_unprepared(self, policy: CheckedPolicy, now: datetime) -> str:
        """Return which workloads are selected and not prepared, as found within a minute."""
        if policy.spec is None:
            return ""
        generation, at, words = self._unprepared.get(policy.key, (-1, now, ""))
        if generation == policy.generation and now - at < UNPREPARED_INTERVAL:
            return words
        path = f"/api/v1/namespaces/{policy.namespace}/pods"
        query = policy.spec.selector.query(*unprepared.NOT_PREPARED)
        try:
            bodies = await self._kube.first(path, labels=query, limit=_UNPREPARED_LISTED)
        except ApiError as error:
            log.info("policy %s: its pods could not be listed: %s", policy.key, error)
            self._unprepared[policy.key] = (policy.generation, now, words)  # asked again later
            return words
        found = unprepared.unprepared(policy, bodies)
        words = unprepared.sentence(found)
        before = self._unprepared.get(policy.key)
        self._unprepared[policy.key] = (policy.generation, now, words)
        if before is None or before[2] != words:
            self._tell(policy, found)
        return words

    def _tell(self, policy: CheckedPolicy, found: list[unprepared.Unprepared]) -> None:
        for each in found:
            event = Event("NotPrepared", f"{each.workload} {each.lacks}", warning=True)
            self._recorder.put(self._cluster.policy_bodies.get(policy.key), event)
            said = f"policy {policy.name}: {each.workload} {each.lacks}"
            self._recorder.put(each.owner, Event("NotPrepared", said, warning=True))

    def _is_due(self, key: str, before: Body, after: Body, now: datetime) -> bool:
        if {**before, "usage": None} != {**after, "usage": None}:
            return True
        last = self._usage_written.get(key)
        return before != after and (last is None or now - last >= USAGE_INTERVAL)

    async def _counts(self) -> dict[str, policies.PolicyCounts]:
        """Return what every policy has under it."""
        counts: dict[str, policies.PolicyCounts] = {}
        none = policies.PolicyCounts()
        active = self._cluster.active_slots()
        policy_of_pod: dict[str, str] = {}
        async for pod in in_pieces(self._cluster.pods.values()):
            policy = self._cluster.policy_of(pod)
            if policy is not None and not pod.ending:
                policy_of_pod[pod.uid] = policy.key
                so_far = counts.get(policy.key, none)
                counts[policy.key] = replace(so_far, pods=so_far.pods + 1)
        async for live in in_pieces(self._cluster.slots.values()):
            key = policy_of_pod.get(live.pod_uid)
            if key is None or not live.attached:
                continue
            so_far, refused = counts[key], live.facts.refused
            counts[key] = replace(
                so_far,
                slots=so_far.slots + 1,
                harvesting=so_far.harvesting + (live.key in active),
                refused=so_far.refused + bool(refused),
                why_refused=so_far.why_refused or (refused and f"{live.name}: {refused}"),
            )
        return counts
