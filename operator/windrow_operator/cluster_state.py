"""What the operator knows at this moment: objects of the API server and what sidecars say.

A plain store without effects. Objects come from one listing at the start, from watches, and from
the answers to our own writes; of two versions of an object the newer one stays, so that a watch
that lags behind a write cannot undo it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from windrow.conditions import get_condition, is_finished
from windrow.crd import FINALIZER, SIDECAR_CONTAINER, FinetuneJobSpec, parse_job_spec
from windrow.errors import UserError
from windrow.outputs import path_of
from windrow.proto import attach_pb2 as pb
from windrow_operator import policies
from windrow_operator.health import SlotHealth
from windrow_operator.injection import (
    RUN_VOLUME,
    attached_sidecars,
    decoder_of,
    served_model,
    volume_name,
)
from windrow_operator.model import (
    ALIVE,
    STALE_AFTER,
    Base,
    CheckedPolicy,
    EffectivePolicy,
    Holder,
    Job,
    JobPlacement,
    Mount,
    Pod,
    RunState,
    SidecarState,
    Slot,
    Usage,
    key_of,
)

Body = dict[str, Any]


# Not placed before, time of creation, key: the smallest one has the destination.
_Rank = tuple[bool, str, str]


@dataclass
class LiveSlot:
    """A device as its sidecar shows it. Outlives the stream: the sidecar may come back."""

    key: str
    namespace: str
    name: str
    pod_name: str
    pod_uid: str
    node: str = ""
    facts: pb.SlotFacts = field(default_factory=pb.SlotFacts)
    beat: pb.SlotHeartbeat | None = None
    beat_at: datetime | None = None
    attached: bool = False
    lost_at: datetime | None = None

    def is_silent(self, now: datetime) -> bool:
        """Return whether the stream is open and heartbeats, once there, have ceased."""
        return self.attached and self.beat_at is not None and now - self.beat_at > STALE_AFTER

    def current_beat(self, now: datetime) -> pb.SlotHeartbeat | None:
        """Return the newest heartbeat while it still tells of now."""
        return self.beat if self.attached and not self.is_silent(now) else None


class ClusterState:
    """The store."""

    def __init__(self, started_at: datetime) -> None:
        self.started_at = started_at
        self.jobs: dict[str, Body] = {}  # by UID
        self.policies: dict[str, CheckedPolicy] = {}  # by key
        self.policy_bodies: dict[str, Body] = {}
        self.pods: dict[str, Pod] = {}  # by UID
        self.namespaces: dict[str, dict[str, str]] = {}  # labels by name
        self.priorities: dict[str, int] = {}  # value by PriorityClass
        self.patient: set[str] = set()  # PriorityClasses that do not preempt
        self.preempted: dict[str, str] = {}  # UID of a job: key of the one that is to have its slot
        self.slots: dict[str, LiveSlot] = {}  # by key
        self.runs: dict[str, JobPlacement] = {}  # newest by job UID
        self.health = SlotHealth()
        self.used: dict[str, Usage] = {}  # by policy key
        self._specs: dict[tuple[str, int], tuple[FinetuneJobSpec | None, str]] = {}
        # What a pass would otherwise look for among all objects, kept as they change.
        self._held: dict[str, dict[str, None]] = {}  # UIDs of jobs by the slot of their status
        # By each place that a destination may be (`policies.places_of`): UIDs of unfinished jobs.
        self._claims: dict[str, dict[str, _Rank]] = {}
        self._claim_of: dict[str, tuple[str, frozenset[str]]] = {}  # slot and places by job UID
        self._selected: dict[str, tuple[Pod, int, CheckedPolicy | None]] = {}  # by pod UID
        self._policies_changed = 0
        self._terms: dict[str, tuple[datetime, EffectivePolicy]] = {}  # by policy key
        self._slot_views: dict[str, tuple[tuple[object, ...], Slot]] = {}
        self._job_views: dict[str, tuple[tuple[object, ...], Job]] = {}

    def begin_term(self, now: datetime) -> None:
        """Forget what sidecars said to an earlier leader, and what it counted."""
        self.started_at = now
        self.slots.clear()
        self.runs.clear()
        self.preempted.clear()
        self.used.clear()
        self.health = SlotHealth()
        self._slot_views.clear()
        for key, body in self.policy_bodies.items():
            self._take_usage(key, body)

    # --- objects ----------------------------------------------------------------------------------

    def put_job(self, body: Mapping[str, Any]) -> None:
        """Keep a FinetuneJob unless a newer version is here."""
        uid = body["metadata"]["uid"]
        if _is_newer(body, self.jobs.get(uid)):
            self.jobs[uid] = dict(body)
            self._index_job(uid)

    def _index_jobs(self) -> None:
        """Index all of them anew: what their destinations mean stands in the policies."""
        for uid in self.jobs:
            self._index_job(uid)

    def _index_job(self, uid: str) -> None:
        self._unindex_job(uid)
        body = self.jobs[uid]
        spec, _ = self._spec(body)
        status, metadata = body.get("status") or {}, body["metadata"]
        slot, places = status.get("slot") or "", frozenset[str]()
        if slot:
            self._held.setdefault(slot, {})[uid] = None
        if spec is not None and not is_finished(status.get("conditions")):
            # What its pod has mounted may be what a policy, edited since, once said.
            live = self.slots.get(slot)
            pod = self.pods.get(live.pod_uid) if live else None
            mounts = (pod.mounts if pod else None) or ()
            places = policies.places_of(spec.output.destination, self.policies.values(), mounts)
            rank = (not status.get("epoch"), metadata["creationTimestamp"], self._job_key(uid))
            for place in places:
                self._claims.setdefault(place, {})[uid] = rank
        self._claim_of[uid] = (slot, places)

    def _unindex_job(self, uid: str) -> None:
        slot, places = self._claim_of.pop(uid, ("", frozenset[str]()))
        _drop(self._held, slot, uid)
        for place in places:
            _drop(self._claims, place, uid)

    def drop_job(self, uid: str) -> None:
        """Forget a FinetuneJob that the API server no longer has."""
        self.jobs.pop(uid, None)
        self.runs.pop(uid, None)
        self._unindex_job(uid)
        self._job_views.pop(uid, None)
        for known in [known for known in self._specs if known[0] == uid]:
            del self._specs[known]

    def put_policy(self, body: Mapping[str, Any]) -> None:
        """Keep a HarvestPolicy unless a newer version is here."""
        key = key_of(body["metadata"]["namespace"], body["metadata"]["name"])
        if not _is_newer(body, self.policy_bodies.get(key)):
            return
        self.policy_bodies[key] = dict(body)
        self._take_usage(key, body)
        before = self.policies.get(key)
        self.policies[key] = policy = policies.policy_of(body)
        if before != policy:
            self._policies_changed += 1
            self._terms.pop(key, None)
            self._index_jobs()

    def _take_usage(self, key: str, body: Mapping[str, Any]) -> None:
        usage = (body.get("status") or {}).get("usage")
        if usage and key not in self.used:
            by_namespace = {
                entry["namespace"]: float(entry["gpuSeconds"])
                for entry in usage.get("namespaces") or ()
            }
            self.used[key] = Usage(usage["day"], float(usage["gpuSeconds"]), by_namespace)

    def drop_policy(self, key: str) -> None:
        """Forget a HarvestPolicy."""
        self.policy_bodies.pop(key, None)
        if self.policies.pop(key, None) is not None:
            self._policies_changed += 1
            self._terms.pop(key, None)
            self._index_jobs()

    def put_pod(self, body: Mapping[str, Any]) -> Pod:
        """Keep what is needed of a decode pod, unless a newer version is here."""
        pod = pod_of(body)
        known = self.pods.get(pod.uid)
        if known is not None and known.version > pod.version:
            return known
        self.pods[pod.uid] = pod
        return pod

    def drop_pod(self, uid: str) -> None:
        """Forget a pod that the API server no longer has."""
        self.pods.pop(uid, None)
        self._selected.pop(uid, None)

    def put_namespace(self, body: Mapping[str, Any]) -> None:
        """Keep the labels of a namespace."""
        self.namespaces[body["metadata"]["name"]] = body["metadata"].get("labels") or {}

    def put_priority_class(self, body: Mapping[str, Any]) -> None:
        """Keep the value of a PriorityClass."""
        name = body["metadata"]["name"]
        self.priorities[name] = int(body.get("value", 0))
        self.patient.discard(name)
        if body.get("preemptionPolicy") == "Never":
            self.patient.add(name)

    def charge(
        self, policy_key: str, seconds: float, tenants: Iterable[str], now: datetime
    ) -> None:
        """Count device seconds of a slot of this policy, shared by the jobs of `tenants`."""
        usage = self.usage_today(policy_key, now)
        sharers = list(tenants)
        by_namespace = dict(usage.by_namespace)
        for namespace in sharers:
            before = by_namespace.get(namespace, 0.0)
            by_namespace[namespace] = before + seconds / len(sharers)
        self.used[policy_key] = Usage(_day(now), usage.seconds + seconds, by_namespace)

    def usage_today(self, policy_key: str, now: datetime) -> Usage:
        """Return what jobs have had under this policy today (UTC)."""
        usage = self.used.get(policy_key, Usage())
        return usage if usage.day == _day(now) else Usage(_day(now))

    def used_today(self, policy_key: str, now: datetime) -> float:
        """Return the device seconds that jobs have had under this policy today (UTC)."""
        return self.usage_today(policy_key, now).seconds

    # --- views for decisions ----------------------------------------------------------------------

    def policy_of(self, pod: Pod) -> CheckedPolicy | None:
        """Return the policy that `pod` is under; None: no policy selects it."""
        known = self._selected.get(pod.uid)
        if known is None or known[0] is not pod or known[1] != self._policies_changed:
            policy = policies.select(pod, self.policies.values())
            known = self._selected[pod.uid] = (pod, self._policies_changed, policy)
        return known[2]

    def terms(self, pod: Pod, now: datetime) -> EffectivePolicy | None:
        """Return what the policy of `pod` allows now; None: no policy selects it."""
        policy = self.policy_of(pod)
        if policy is None:
            return None
        known = self._terms.get(policy.key)
        if known is not None and known[0] == now:
            return known[1]
        terms = policies.terms_of(policy, now, self.usage_today(policy.key, now))
        if known is not None and known[1] == terms:
            terms = known[1]  # the same object, by which it is seen that nothing has changed
        self._terms[policy.key] = (now, terms)
        return terms

    def slot_views(self, now: datetime) -> dict[str, Slot]:
        """Return every known slot as placement sees it."""
        views = {key: self._unknown_slot(key) for key in self._held if key not in self.slots}
        for live in self.slots.values():
            views[live.key] = self.slot_view(live, now)
        return views

    def slot_view(self, live: LiveSlot, now: datetime) -> Slot:
        """Return a slot as placement sees it; the same object while nothing about it changes."""
        pod = self.pods.get(live.pod_uid)
        terms = self.terms(pod, now) if pod else None
        holders = self._holders_of(live)
        stamp = (
            *(live.facts, live.beat, pod, terms, live.attached, live.lost_at, live.is_silent(now)),
            *(self.health.resting(live.key, now), self.health.failed_jobs(live.key)),
            *(self.started_at, holders),
        )
        known = self._slot_views.get(live.key)
        if known is not None and all(map(_is_same, known[0], stamp)):
            return known[1]
        view = self._slot_view(live, pod, terms, holders, now)
        self._slot_views[live.key] = (stamp, view)
        return view

    def _holders_of(self, live: LiveSlot) -> tuple[Holder, ...]:
        held = self._held.get(live.key)
        running = jobs_of(live.beat) if live.beat is not None else ()
        if not held and not running:
            return ()
        uids = dict.fromkeys(sorted(held or (), key=self._job_key))
        uids |= dict.fromkeys(job.job_uid for job in running if not self._has_ended(job))
        return tuple(self._holder(uid) for uid in uids)

    def _has_ended(self, running: pb.RunningJob) -> bool:
        """Return whether the sidecar has told the end of what its last heartbeat still names."""
        run = self.runs.get(running.job_uid)
        return run is not None and run.epoch == running.epoch and run.state not in ALIVE

    def _unknown_slot(self, key: str) -> Slot:
        """Return a slot that a job is on by its status and nothing else tells of.

        After a restart of the operator its sidecar has yet to come back.
        """
        pods = {key_of(pod.namespace, pod.name) for pod in self.pods.values() if not pod.ending}
        gone = key not in pods and key.rpartition(".")[0] not in pods
        return Slot(key=key, attached=False, lost_at=self.started_at, awaited=True, pod_gone=gone)

    def _slot_view(
        self,
        live: LiveSlot,
        pod: Pod | None,
        terms: EffectivePolicy | None,
        holders: tuple[Holder, ...],
        now: datetime,
    ) -> Slot:
        beat = live.beat or pb.SlotHeartbeat()
        return Slot(
            key=live.key,
            pod_uid=live.pod_uid,
            model=live.facts.model,
            tensor_parallel=live.facts.tensor_parallel,
            engine_state=beat.engine_state if live.beat else "starting",
            breaker=beat.breaker,
            predicted_tokens_per_second=beat.predicted_tokens_per_second,
            memory_full=live.beat is not None and _is_full(beat),
            attached=live.attached,
            silent=live.is_silent(now),
            lost_at=None if live.attached else live.lost_at or self.started_at,
            awaited=not live.attached and live.lost_at is None,
            pod_gone=pod is None or pod.ending,
            resting=self.health.resting(live.key, now),
            failed_jobs=self.health.failed_jobs(live.key),
            terms=terms,
            holders=holders,
            max_jobs=max(1, live.facts.max_jobs),
            outputs=(*live.facts.output_trees, *(_outputs(pod, terms) if pod else ())),
        )

    def holders(self) -> dict[str, list[str]]:
        """Return by slot the UIDs of the jobs that have it by their status, the first one first."""
        return {key: sorted(uids, key=self._job_key) for key, uids in self._held.items()}

    def _holder(self, uid: str) -> Holder:
        body = self.jobs.get(uid)
        if body is None:
            return Holder(uid)
        spec, _ = self._spec(body)
        return Holder(uid, self._job_key(uid), Base.of(spec) if spec else None)

    def _job_key(self, uid: str) -> str:
        body = self.jobs.get(uid)
        return key_of(body["metadata"]["namespace"], body["metadata"]["name"]) if body else ""

    def job_views(self) -> list[Job]:
        """Return every job, those that should be placed first in front."""
        jobs = [self.job_view(uid) for uid in self.jobs]
        return sorted(jobs, key=lambda job: (-job.priority, job.created, job.key))

    def job_view(self, uid: str) -> Job:
        """Return one job; the same object while nothing about it changes."""
        body = self.jobs[uid]
        spec, _ = self._spec(body)
        priority_class = (spec and spec.priority_class_name) or ""
        owner = self._destination_owner(uid)
        stamp = (
            body,
            self.namespaces.get(body["metadata"]["namespace"]),
            self.priorities.get(priority_class),
            priority_class in self.patient,
            self.preempted.get(uid, ""),
            owner,
        )
        known = self._job_views.get(uid)
        if known is not None and all(map(_is_same, known[0], stamp)):
            return known[1]
        view = self._job_view(body, owner)
        self._job_views[uid] = (stamp, view)
        return view

    def _destination_owner(self, uid: str) -> str:
        """Return which unfinished job may write to the destination of `uid`: the first that came.

        A job that has been placed keeps its destination against one that is older by the clock.
        """
        _, places = self._claim_of[uid]
        claims = {k: rank for place in places for k, rank in self._claims.get(place, {}).items()}
        return min(claims, key=claims.__getitem__) if claims else uid

    def _job_view(self, body: Mapping[str, Any], owner: str) -> Job:
        metadata, status = body["metadata"], body.get("status") or {}
        spec, error = self._spec(body)
        deleted = metadata.get("deletionTimestamp")
        uid = metadata["uid"]
        priority_class = (spec and spec.priority_class_name) or ""
        return Job(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=uid,
            generation=metadata.get("generation", 0),
            created=datetime.fromisoformat(metadata["creationTimestamp"]),
            spec=spec,
            error=error,
            status=status,
            body=body,
            deleted_at=datetime.fromisoformat(deleted) if deleted else None,
            has_finalizer=FINALIZER in (metadata.get("finalizers") or ()),
            priority=self.priorities.get(priority_class, 0),
            may_preempt=priority_class in self.priorities and priority_class not in self.patient,
            preempted_by=self.preempted.get(uid, ""),
            priority_class_missing="" if priority_class in self.priorities else priority_class,
            namespace_labels=self.namespaces.get(metadata["namespace"], {}),
            destination_owner=self._named(owner, spec) if owner != uid and spec else "",
        )

    def _named(self, uid: str, other: FinetuneJobSpec) -> str:
        """Return a job's key, and its name of the destination where `other` has another."""
        spec, _ = self._spec(self.jobs[uid])
        key, mine = self._job_key(uid), other.output.destination
        if spec is None or path_of(spec.output.destination) == path_of(mine):
            return key
        return f"{key}, which reaches it by {spec.output.destination!r}"

    def _spec(self, body: Mapping[str, Any]) -> tuple[FinetuneJobSpec | None, str]:
        metadata = body["metadata"]
        known = (metadata["uid"], metadata.get("generation", 0))
        if known not in self._specs:
            try:
                self._specs[known] = (parse_job_spec(body.get("spec") or {}), "")
            except UserError as error:
                self._specs[known] = (None, str(error))
        return self._specs[known]

    # --- what sidecars say ------------------------------------------------------------------------

    def run_of(self, job: Job) -> JobPlacement | None:
        """Return what is known of the job's newest placement."""
        run = self.runs.get(job.uid)
        return run if run is not None and run.epoch == job.epoch else None

    def runs_on(self, slot: str) -> list[JobPlacement]:
        """Return the newest placements of the jobs that have `slot` by their status."""
        runs = (self.runs.get(uid) for uid in self._held.get(slot, ()))
        return [run for run in runs if run is not None and run.slot == slot]

    def expects(self, uid: str, epoch: int, slot: str) -> bool:
        """Return whether the job's newest placement is this one, so that its reports count."""
        body = self.jobs.get(uid)
        status = (body or {}).get("status") or {}
        return bool(body) and status.get("slot") == slot and status.get("epoch") == epoch

    def assign(self, uid: str, epoch: int, slot: str, now: datetime) -> None:
        """Remember that the sidecar was told to run a job."""
        checkpoint = ((self.jobs.get(uid) or {}).get("status") or {}).get("checkpoint") or {}
        self.runs[uid] = JobPlacement(
            uid,
            epoch,
            slot,
            RunState.ASSIGNED,
            since=now,
            checkpoint_before=int(checkpoint.get("step", 0)),
        )

    def stop_sent(self, uid: str, reason: str, now: datetime) -> None:
        """Remember that the sidecar was asked to stop a job."""
        run = self.runs.get(uid)
        if run is not None:
            asked = run.stop_asked_at or now
            self.runs[uid] = replace(run, stop_asked_at=asked, stop_sent_at=now, stop_reason=reason)

    def active_slots(self) -> set[str]:
        """Return the keys of slots whose worker is at work."""
        return {run.slot for run in self.runs.values() if run.state in ALIVE}

    def tenants(self, slot: str) -> list[str]:
        """Return the namespaces of the jobs whose worker is at work on a slot, one for each."""
        here = [run.uid for run in self.runs_on(slot) if run.state in ALIVE]
        return [self.jobs[uid]["metadata"]["namespace"] for uid in here if uid in self.jobs]

    def forget_unused_slots(self) -> list[LiveSlot]:
        """Drop and return slots whose pod and sidecar are gone and that no job is on."""
        gone = [
            live
            for live in self.slots.values()
            if not live.attached and live.pod_uid not in self.pods and live.key not in self._held
        ]
        for live in gone:
            del self.slots[live.key]
            self._slot_views.pop(live.key, None)
            self.health.forget(live.key)
        return gone


def _is_same(one: object, other: object) -> bool:
    """Return whether both are one object, or small values that are equal.

    Objects of the API server and messages are replaced, never changed; to compare them by what they
    hold would cost more than to make a view anew.
    """
    return one is other or (isinstance(one, (str, int, tuple, frozenset)) and one == other)


def jobs_of(beat: pb.SlotHeartbeat) -> list[pb.RunningJob]:
    """Return the jobs that a heartbeat names; sidecars from before name one at most."""
    return list(beat.jobs) or ([beat.job] if beat.HasField("job") else [])


def pod_of(body: Mapping[str, Any]) -> Pod:
    """Return what is kept of a pod object."""
    metadata, status = body["metadata"], body.get("status") or {}
    return Pod(
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name") or metadata.get("generateName", ""),
        uid=metadata.get("uid", ""),
        node=(body.get("spec") or {}).get("nodeName") or "",
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        ending="deletionTimestamp" in metadata or status.get("phase") in ("Succeeded", "Failed"),
        volumes=frozenset(v["name"] for v in (body.get("spec") or {}).get("volumes") or ()),
        mounts=_mounts_of(body),
        version=int(metadata.get("resourceVersion") or 0),
        model=served_model(body),
        sidecar=_sidecar_state(body),
    )


def _mounts_of(body: Mapping[str, Any]) -> frozenset[Mount] | None:
    """Return what the pod's sidecar, the newest of several, mounts to write."""
    spec = body.get("spec") or {}
    newest = [SIDECAR_CONTAINER, *attached_sidecars(spec)][-1]
    containers = (*(spec.get("initContainers") or ()), *(spec.get("ephemeralContainers") or ()))
    sidecar = next((each for each in containers if each["name"] == newest), None)
    if sidecar is None:
        return None
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
    namespace, found = body["metadata"].get("namespace", ""), set()
    for mount in sidecar.get("volumeMounts") or ():
        volume = volumes.get(mount["name"], {})
        claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        source = policies.source_of(namespace, claim, (volume.get("hostPath") or {}).get("path"))
        found.add(Mount(mount["mountPath"], "" if mount.get("readOnly") else source))
    return frozenset(found)


def _sidecar_state(body: Mapping[str, Any]) -> SidecarState:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    if not spec.get("containers"):
        return SidecarState()
    added = attached_sidecars(spec)
    ended: Mapping[str, Any] | None = None
    for container in status.get("ephemeralContainerStatuses") or ():
        if added and container["name"] == added[-1]:
            ended = (container.get("state") or {}).get("terminated")
    finished = ended.get("finishedAt") if ended else None
    decoder = decoder_of(body)["name"]
    return SidecarState(
        prepared=any(volume["name"] == RUN_VOLUME for volume in spec.get("volumes") or ()),
        native=any(c["name"] == SIDECAR_CONTAINER for c in spec.get("initContainers") or ()),
        decode_ready=any(
            c["name"] == decoder and c.get("ready") for c in status.get("containerStatuses") or ()
        ),
        attached=len(added),
        alive=bool(added) and ended is None,
        ended_at=datetime.fromisoformat(finished) if finished else None,
    )


def state_word(body: Mapping[str, Any]) -> str:
    """Return the printed state of a job object."""
    return str((body.get("status") or {}).get("state") or "Pending")


def is_waiting(body: Mapping[str, Any]) -> bool:
    """Return whether a job waits for a slot."""
    conditions = (body.get("status") or {}).get("conditions")
    placed = get_condition(conditions, "Placed")
    return not is_finished(conditions) and (placed is None or placed["status"] != "True")


def _outputs(pod: Pod, terms: EffectivePolicy | None) -> tuple[str, ...]:
    """Return where the policy's volumes stand that are in the pod and can be written.

    One that the policy has under the same name but of another claim, directory or path than when
    the pod was made is not.
    """
    policy = terms.policy if terms else None
    if policy is None or policy.spec is None:
        return ()
    return tuple(
        volume.mount_path
        for volume in policy.spec.sidecar.volumes
        if not volume.read_only
        and volume_name(volume) in pod.volumes
        and (pod.mounts is None or policies.mount_of(policy, volume) in pod.mounts)
    )


def _is_full(beat: pb.SlotHeartbeat) -> bool:
    known = beat.chunks_kv + beat.chunks_lent + beat.chunks_reserved + beat.chunks_free
    return known > 0 and beat.chunks_free + beat.chunks_lent == 0


def _is_newer(body: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    if known is None:
        return True
    return _version(body) >= _version(known)


def _version(body: Mapping[str, Any]) -> int:
    # Comparable since Kubernetes 1.35 (KEP-5504); etcd's revision in all versions before.
    return int(body["metadata"].get("resourceVersion") or 0)


def _day(now: datetime) -> str:
    return now.astimezone(UTC).date().isoformat()


def _drop(index: dict[str, dict[str, Any]], key: str, uid: str) -> None:
    """Remove a job from an entry of an index, and the entry with its last one."""
    if (entry := index.get(key)) is not None:
        entry.pop(uid, None)
        if not entry:
            del index[key]
