"""Store the objects of the API server that the operator watches, and mark what has changed.

They come from one listing at the start, from watches, and from the answers to our own writes; of
two versions of an object the newer one stays, so that a watch that lags behind a write cannot undo
it. What changes is marked, so that nobody has to look at everything to find it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from windrow_operator import policies, tenancy
from windrow_operator.job_index import JobIndex
from windrow_operator.model import CheckedPolicy, EffectivePolicy, Mount, Pod, key_of, version_of
from windrow_operator.pods import pod_of
from windrow_operator.usage import UsageLedger
from windrow_operator.work_queue import Changes

Body = dict[str, Any]


# Taints by which autoscalers and the control plane say that a node goes away, or has.
_GOING = (
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "node.cloudprovider.kubernetes.io/shutdown",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/out-of-service",
    "node.kubernetes.io/unreachable",
    "node.kubernetes.io/unschedulable",
)


def why_leaving(node: Mapping[str, Any]) -> str:
    """Return why no new work goes to a node, in words that follow its name; empty: it does."""
    spec = node.get("spec") or {}
    if node["metadata"].get("deletionTimestamp"):
        return "is being deleted"
    if spec.get("unschedulable"):
        return "is cordoned"
    taints = [str(taint.get("key")) for taint in spec.get("taints") or ()]
    return next((f"has the taint {key}" for key in taints if key in _GOING), "")


class WatchedObjects:
    """The store of what is watched."""

    def __init__(self, offering: Collection[str] = ()) -> None:
        self.offering = frozenset(offering)  # namespaces whose policies are offered to all jobs
        self.jobs: dict[str, Body] = {}  # by UID
        self.policies: dict[str, CheckedPolicy] = {}  # by key
        self.policy_bodies: dict[str, Body] = {}
        self.pods: dict[str, Pod] = {}  # by UID
        self.namespaces: dict[str, dict[str, str]] = {}  # labels by name
        self.priorities: dict[str, int] = {}  # value by PriorityClass
        self.patient: set[str] = set()  # PriorityClasses that do not preempt
        self.nodes: dict[str, int] = {}  # version by name
        self.leaving_nodes: dict[str, str] = {}  # by name: why no new pod goes there
        self.usage = UsageLedger()
        self.index = JobIndex()
        # Jobs by UID and pods by UID for the driver; slots by key for it and the writer of slots.
        self.changed_jobs = Changes("driver")
        self.changed_pods = Changes("driver")
        self.changed_slots = Changes("driver", "writer")
        self._living: dict[str, str] = {}  # UID by key of pods that do not end
        self._slots_of_pod: dict[str, dict[str, None]] = {}  # keys by pod UID
        self._selected: dict[str, tuple[Pod, int, CheckedPolicy | None]] = {}  # by pod UID
        self.policies_changed = 0  # how often
        self._terms: dict[str, tuple[datetime, EffectivePolicy]] = {}  # by policy key
        self.off = ""  # why nothing at all is harvested in the cluster; empty: policies decide

    def put_job(self, body: Mapping[str, Any], *, put_back: bool = False) -> None:
        """Keep a FinetuneJob unless a newer version is here; `put_back`: even then.

        What is known of its placement stays: a store that was put back ends no worker.
        """
        uid = body["metadata"]["uid"]
        known = self.jobs.get(uid)
        if known != body and (put_back or _is_newer(body, known)):
            self._mark_slot_of(known)
            self.jobs[uid] = dict(body)
            self._index_job(uid)

    def _index_job(self, uid: str) -> None:
        body = self.jobs[uid]
        self.changed_jobs.mark(uid)
        slot = (body.get("status") or {}).get("slot") or ""
        mounts = self._mounts_at(slot)
        self.changed_jobs.mark_all(self.index.put(body, self._policies_for(body), mounts))
        self._mark_slot_of(body)

    def _policies_for(self, body: Body) -> list[CheckedPolicy]:
        """Return the policies that a job may run under."""
        namespace, (spec, _) = body["metadata"]["namespace"], self.index.spec(body)
        labels, named = self.namespaces.get(namespace, {}), spec.policies if spec else ()
        return [
            policy
            for policy in self.policies.values()
            if tenancy.may_run_under(policy, namespace, labels, named)
        ]

    def _mounts_at(self, slot: str) -> frozenset[Mount]:
        """Return what the pod of a slot can write: maybe what a policy, edited since, once said."""
        uid = self._living.get(slot) or self._living.get(slot.rpartition(".")[0])
        pod = self.pods.get(uid) if uid else None
        return (pod.mounts if pod else None) or frozenset()

    def _mark_slot_of(self, job: Body | None) -> None:
        if job is not None and (slot := (job.get("status") or {}).get("slot")):
            self.changed_slots.mark(slot)

    def _policies_have_changed(self, key: str) -> None:
        self.policies_changed += 1
        self._terms.pop(key, None)
        for uid in self.jobs:  # the policies say what their destinations mean
            self._index_job(uid)
        self.changed_pods.mark_all(self.pods)
        for slots in self._slots_of_pod.values():
            self.changed_slots.mark_all(slots)

    def drop_job(self, uid: str) -> None:
        """Forget a FinetuneJob that the API server no longer has."""
        body = self.jobs.pop(uid, None)
        self.changed_jobs.mark(uid)
        self.changed_jobs.mark_all(self.index.drop(uid))
        self._mark_slot_of(body)

    def put_policy(self, body: Mapping[str, Any], *, put_back: bool = False) -> None:
        """Keep a HarvestPolicy unless a newer version is here; `put_back`: even then."""
        key = key_of(body["metadata"]["namespace"], body["metadata"]["name"])
        if not put_back and not _is_newer(body, self.policy_bodies.get(key)):
            return
        self.policy_bodies[key] = dict(body)
        self.usage.take_up(key, body.get("status") or {})
        before = self.policies.get(key)
        offered = body["metadata"]["namespace"] in self.offering
        self.policies[key] = policy = replace(policies.policy_of(body), offered=offered)
        if before != policy:
            self._policies_have_changed(key)

    def drop_policy(self, key: str) -> None:
        """Forget a HarvestPolicy."""
        self.policy_bodies.pop(key, None)
        if self.policies.pop(key, None) is not None:
            self._policies_have_changed(key)

    def put_pod(self, body: Mapping[str, Any], *, put_back: bool = False) -> Pod:
        """Keep what is needed of a decode pod unless a newer one is here; `put_back`: even then."""
        uid, version = body["metadata"].get("uid", ""), version_of(body)
        if (known := self.pods.get(uid)) is not None:
            # A new leader hears of each pod three times: by two listings, and by the watch's own.
            told_before = known.version == version > 0
            if told_before or (known.version > version and not put_back):
                return known
        pod = self.pods[uid] = pod_of(body)
        self._pod_has_changed(pod)
        return pod

    def drop_pod(self, uid: str) -> None:
        """Forget a pod that the API server no longer has."""
        pod = self.pods.pop(uid, None)
        self._selected.pop(uid, None)
        if pod is not None:
            self._pod_has_changed(replace(pod, ending=True))

    def _pod_has_changed(self, pod: Pod) -> None:
        if not pod.ending:
            self._living[pod.key] = pod.uid
        elif self._living.get(pod.key) == pod.uid:
            del self._living[pod.key]
        self.changed_pods.mark(pod.uid)
        # Slots that only the status of a job tells of (`_unknown_slot`) are looked at as well.
        self.changed_slots.mark_all(self._slots_of_pod.get(pod.uid) or [pod.key])

    def put_namespace(self, body: Mapping[str, Any]) -> None:
        """Keep the labels of a namespace."""
        name, labels = body["metadata"]["name"], body["metadata"].get("labels") or {}
        if self.namespaces.get(name) != labels:
            self.namespaces[name] = labels
            self._mark_jobs_of(name)

    def drop_namespace(self, name: str) -> None:
        """Forget a namespace."""
        if self.namespaces.pop(name, None) is not None:
            self._mark_jobs_of(name)

    def _mark_jobs_of(self, namespace: str) -> None:
        for uid, body in self.jobs.items():
            if body["metadata"]["namespace"] == namespace:
                self._index_job(uid)  # which policies admit it hangs on the namespace's labels

    def put_priority_class(self, body: Mapping[str, Any]) -> None:
        """Keep the value of a PriorityClass."""
        name = body["metadata"]["name"]
        self.priorities[name] = int(body.get("value", 0))
        self.patient.discard(name)
        if body.get("preemptionPolicy") == "Never":
            self.patient.add(name)
        self.changed_jobs.mark_all(self.jobs)

    def drop_priority_class(self, name: str) -> None:
        """Forget a PriorityClass."""
        self.priorities.pop(name, None)
        self.changed_jobs.mark_all(self.jobs)

    def put_node(self, body: Mapping[str, Any], *, put_back: bool = False) -> None:
        """Keep whether new pods go to a node, unless a newer one is here; `put_back`: even then."""
        name, version = body["metadata"]["name"], version_of(body)
        if self.nodes.get(name, -1) <= version or put_back:
            self.nodes[name] = version
            self._node_says(name, why_leaving(body))

    def drop_node(self, name: str) -> None:
        """Forget a node; its pods are ended by others."""
        self.nodes.pop(name, None)
        self._node_says(name, "")

    def _node_says(self, name: str, why: str) -> None:
        if self.leaving_nodes.get(name, "") == why:
            return  # a heartbeat, as most changes of nodes are
        if why:
            self.leaving_nodes[name] = why
        else:
            del self.leaving_nodes[name]
        for pod in self.pods.values():
            if pod.node == name:
                self._pod_has_changed(pod)

    def switch(self, off: str) -> None:
        """Harvest nothing whatever policies say, and why; empty: as they say."""
        if self.off != off:
            self.off = off
            self._terms.clear()
            self.changed_pods.mark_all(self.pods)
            for slots in self._slots_of_pod.values():
                self.changed_slots.mark_all(slots)

    def policy_of(self, pod: Pod) -> CheckedPolicy | None:
        """Return the policy that `pod` is under; None: no policy selects it."""
        known = self._selected.get(pod.uid)
        if known is None or known[0] is not pod or known[1] != self.policies_changed:
            policy = policies.select(pod, self.policies.values())
            known = self._selected[pod.uid] = (pod, self.policies_changed, policy)
        return known[2]

    def terms(self, pod: Pod, now: datetime) -> EffectivePolicy | None:
        """Return what the policy of `pod` allows now; None: no policy selects it."""
        policy = self.policy_of(pod)
        return self._terms_of(policy, now) if policy is not None else None

    def _terms_of(self, policy: CheckedPolicy, now: datetime) -> EffectivePolicy:
        known = self._terms.get(policy.key)
        if known is not None and known[0] == now:
            return known[1]
        if self.off:
            terms = EffectivePolicy(policy, "off", self.off)
        else:
            terms = policies.terms_of(policy, now, self.usage.today(policy.key, now))
        if known is not None and known[1] == terms:
            terms = known[1]  # the same object, by which it is seen that nothing has changed
        self._terms[policy.key] = (now, terms)
        return terms


def _is_newer(body: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    return known is None or version_of(body) >= version_of(known)
