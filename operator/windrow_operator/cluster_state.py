"""Knowledge of the operator at this moment: watched objects and sidecars' reports.

A plain store without effects. Views of slots and jobs are remade only where something about them
has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from windrow.crd import ANNOTATION_GPU_ACCESS, FINALIZER, FinetuneJobSpec
from windrow.outputs import path_of
from windrow.proto import attach_pb2 as pb
from windrow_operator import policies, tenancy
from windrow_operator.health import SlotHealth
from windrow_operator.injection import volume_name
from windrow_operator.job_index import queue_of
from windrow_operator.model import (
    ALIVE,
    STALE_AFTER,
    Base,
    EffectivePolicy,
    Holder,
    Job,
    JobPlacement,
    Pod,
    QueueAdmission,
    RunState,
    Slot,
    key_of,
)
from windrow_operator.objects import WatchedObjects

Body = dict[str, Any]


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
    stale_after: timedelta = STALE_AFTER  # longer where the sidecar reports seldom
    attached: bool = False
    lost_at: datetime | None = None
    overstates: bool = False  # it claimed more than its hardware can do
    sidecar_version: str = ""
    promise: float = 0.0  # predicted tokens a second, smoothed over the last minutes

    def is_silent(self, now: datetime) -> bool:
        """Return whether the stream is open and heartbeats, once there, have ceased."""
        return self.attached and self.beat_at is not None and now - self.beat_at > self.stale_after

    def current_beat(self, now: datetime) -> pb.SlotHeartbeat | None:
        """Return the newest heartbeat while it still tells of now."""
        return self.beat if self.attached and not self.is_silent(now) else None


class ClusterState(WatchedObjects):
    """The store."""

    def __init__(self, started_at: datetime, offering: Collection[str] = ()) -> None:
        super().__init__(offering)
        self.started_at = started_at
        self.preempted: dict[str, str] = {}  # UID of a job: key of the one that is to have its slot
        # UID of a job: the placement that is to end for a better slot, and why.
        self.moving: dict[str, tuple[int, str]] = {}
        self.admissions: dict[str, QueueAdmission] = {}  # by job UID
        self.slots: dict[str, LiveSlot] = {}  # by key
        self.runs: dict[str, JobPlacement] = {}  # newest by job UID
        self.health = SlotHealth()
        self._slot_views: dict[str, tuple[tuple[object, ...], Slot]] = {}
        self._job_views: dict[str, tuple[tuple[object, ...], Job]] = {}

    def begin_term(self, now: datetime) -> None:
        """Forget what sidecars said to an earlier leader, and what it counted."""
        self.started_at = now
        self.slots.clear()
        self._slots_of_pod.clear()
        self.runs.clear()
        self.preempted.clear()
        self.moving.clear()
        self.admissions.clear()
        self.usage.clear()
        self.health = SlotHealth()
        self._slot_views.clear()
        for key, body in self.policy_bodies.items():
            self.usage.take_up(key, body.get("status") or {})
        self.changed_jobs.mark_all(self.jobs)

    def drop_job(self, uid: str) -> None:
        """Forget a FinetuneJob that the API server no longer has."""
        super().drop_job(uid)
        self.runs.pop(uid, None)
        self._job_views.pop(uid, None)
        self.moving.pop(uid, None)
        self.admissions.pop(uid, None)

    # --- views for decisions ----------------------------------------------------------------------

    def pass_time(self, now: datetime) -> None:
        """Mark what has changed by the clock alone: hours, quotas, rests, silence."""
        stale = set()
        for policy in self.policies.values():
            known = self._terms.get(policy.key)
            if known is not None and self._terms_of(policy, now) is not known[1]:
                stale.add(policy.key)
        for live in self.slots.values():
            view = self._slot_views.get(live.key)
            if view is None:
                continue
            terms = view[1].terms
            if (terms and terms.policy.key in stale) or live.is_silent(now) != view[1].silent:
                self.changed_slots.mark(live.key)
        if stale:
            self.changed_pods.mark_all(self.pods)
        for key in self.health.known():
            view = self._slot_views.get(key)
            if view is not None and view[1].resting != self.health.resting(key, now):
                self.changed_slots.mark(key)

    def slot_views(self, now: datetime) -> dict[str, Slot]:
        """Return every known slot as placement sees it."""
        keys = [*(key for key in self.index.held if key not in self.slots), *self.slots]
        views = ((key, self.slot_of(key, now)) for key in keys)
        return {key: view for key, view in views if view is not None}

    def slot_of(self, key: str, now: datetime) -> Slot | None:
        """Return a slot as placement sees it; None: nothing tells of it."""
        live = self.slots.get(key)
        if live is not None:
            return self.slot_view(live, now)
        return self._unknown_slot(key) if key in self.index.held else None

    def slot_view(self, live: LiveSlot, now: datetime) -> Slot:
        """Return a slot as placement sees it; the same object while nothing about it changes."""
        pod = self.pods.get(live.pod_uid)
        terms = self.terms(pod, now) if pod else None
        holders = self._holders_of(live)
        stamp = (
            *(live.facts, live.beat, pod, terms, live.attached, live.lost_at, live.is_silent(now)),
            *(self.health.resting(live.key, now), self.health.failed_jobs(live.key)),
            *(self.started_at, holders, self._node_leaving(live, pod)),
        )
        known = self._slot_views.get(live.key)
        if known is not None and all(map(_is_same, known[0], stamp)):
            return known[1]
        view = self._slot_view(live, pod, terms, holders, now)
        self._slot_views[live.key] = (stamp, view)
        return view

    def _node_leaving(self, live: LiveSlot, pod: Pod | None) -> str:
        return self.leaving_nodes.get(pod.node if pod else live.node, "")

    def _holders_of(self, live: LiveSlot) -> tuple[Holder, ...]:
        held = self.index.held.get(live.key)
        running = jobs_of(live.beat) if live.beat is not None else ()
        if not held and not running:
            return ()
        uids = dict.fromkeys(sorted(held or (), key=self._job_key))
        uids |= dict.fromkeys(job.job_uid for job in running if not self._has_ended(job))
        return tuple(self._holder(uid) for uid in uids)

    def _has_ended(self, running: pb.RunningJob) -> bool:
        """Return whether the sidecar reported the end of what its last heartbeat still names."""
        run = self.runs.get(running.job_uid)
        return run is not None and run.epoch == running.epoch and run.state not in ALIVE

    def _unknown_slot(self, key: str) -> Slot:
        """Return a slot that a job is on by its status and nothing else tells of.

        After a restart of the operator its sidecar has yet to come back.
        """
        gone = key not in self._living and key.rpartition(".")[0] not in self._living
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
            node=live.node,
            model=live.facts.model,
            tensor_parallel=live.facts.tensor_parallel,
            ranks=max(1, live.facts.ranks),
            unseen_device=_unseen(live, pod),
            sharing=live.facts.sharing,
            sharing_code=live.facts.sharing_code,
            sharing_reason=live.facts.sharing_reason,
            refused=live.facts.refused,
            off=beat.off,
            engine_state=beat.engine_state if live.beat else "starting",
            breaker=beat.breaker,
            predicted_tokens_per_second=live.promise,
            predicted_from=beat.predicted_from,
            overstates=live.overstates,
            memory_full=live.beat is not None and _is_full(beat),
            attached=live.attached,
            silent=live.is_silent(now),
            lost_at=None if live.attached else live.lost_at or self.started_at,
            awaited=not live.attached and live.lost_at is None,
            pod_gone=pod is None or pod.ending,
            node_leaving=self._node_leaving(live, pod),
            resting=self.health.resting(live.key, now),
            failed_jobs=self.health.failed_jobs(live.key),
            terms=terms,
            holders=holders,
            max_jobs=max(1, live.facts.max_jobs),
            outputs=(*live.facts.output_trees, *(_outputs(pod, terms) if pod else ())),
        )

    def holds_a_job(self, pod: Pod) -> bool:
        """Return whether a job is on a device of `pod`, by the job's status."""
        # A slot's name is its pod's, or that with the number of the device.
        held = self.index.held
        return pod.key in held or any(key in held for key in self._slots_of_pod.get(pod.uid, ()))

    def _holder(self, uid: str) -> Holder:
        body = self.jobs.get(uid)
        if body is None:
            return Holder(uid)
        spec, _ = self.index.spec(body)
        return Holder(uid, self._job_key(uid), Base.of(spec) if spec else None)

    def _job_key(self, uid: str) -> str:
        body = self.jobs.get(uid)
        return key_of(body["metadata"]["namespace"], body["metadata"]["name"]) if body else ""

    def job_views(self, uids: Iterable[str] | None = None) -> list[Job]:
        """Return these jobs (None: all), those that should be placed first in front."""
        wanted = self.jobs if uids is None else (uid for uid in uids if uid in self.jobs)
        jobs = [self.job_view(uid) for uid in wanted]
        return sorted(jobs, key=lambda job: (-job.priority, job.created, job.key))

    def job_view(self, uid: str) -> Job:
        """Return one job; the same object while nothing about it changes."""
        body = self.jobs[uid]
        spec, _ = self.index.spec(body)
        priority_class = (spec and spec.priority_class_name) or ""
        owner = self.index.destination_owner(uid)
        stamp = (
            body,
            self.namespaces.get(body["metadata"]["namespace"]),
            self.priorities.get(priority_class),
            priority_class in self.patient,
            self.preempted.get(uid, ""),
            self.moving.get(uid),
            self.admissions.get(uid),
            owner,
        )
        known = self._job_views.get(uid)
        if known is not None and all(map(_is_same, known[0], stamp)):
            return known[1]
        view = self._job_view(body, owner)
        self._job_views[uid] = (stamp, view)
        return view

    def _job_view(self, body: Body, owner: str) -> Job:
        metadata, status = body["metadata"], body.get("status") or {}
        spec, error = self.index.spec(body)
        deleted = metadata.get("deletionTimestamp")
        uid = metadata["uid"]
        priority_class = (spec and spec.priority_class_name) or ""
        epoch, moves = self.moving.get(uid, (0, ""))
        return Job(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=uid,
            generation=metadata.get("generation", 0),
            created=datetime.fromisoformat(metadata["creationTimestamp"]),
            spec=spec,
            error="" if error is None else str(error),
            error_field="" if error is None else error.field,
            error_remedy="" if error is None else error.remedy,
            status=status,
            body=body,
            deleted_at=datetime.fromisoformat(deleted) if deleted else None,
            has_finalizer=FINALIZER in (metadata.get("finalizers") or ()),
            priority=self.priorities.get(priority_class, 0),
            may_preempt=priority_class in self.priorities and priority_class not in self.patient,
            preempted_by=self.preempted.get(uid, ""),
            moves=moves if epoch == int(status.get("epoch") or 0) else "",
            priority_class_missing="" if priority_class in self.priorities else priority_class,
            namespace_labels=self.namespaces.get(metadata["namespace"], {}),
            queue=queue_of(body),
            admission=self.admissions.get(uid),
            destination_owner=self._named(owner, body, spec) if owner != uid and spec else "",
        )

    def _named(self, uid: str, asks: Body, other: FinetuneJobSpec) -> str:
        """Return a job in words for the author of the job `asks`: no other tenant's name.

        Of one's own namespace its key, and its name of the destination where `other` has another.
        """
        spec, _ = self.index.spec(self.jobs[uid])
        key, mine = self._job_key(uid), other.output.destination
        if self.jobs[uid]["metadata"]["namespace"] != asks["metadata"]["namespace"]:
            return "a job of another namespace"
        if spec is None or path_of(spec.output.destination) == path_of(mine):
            return f"job {key}"
        return f"job {key}, which reaches it by {spec.output.destination!r}"

    # --- what sidecars say ------------------------------------------------------------------------

    def put_slot(self, live: LiveSlot) -> None:
        """Keep a slot that its sidecar, or an object of before, tells of."""
        self.slots[live.key] = live
        self._slots_of_pod.setdefault(live.pod_uid, {})[live.key] = None
        self.changed_slots.mark(live.key)

    def slots_of(self, pod_uid: str) -> list[LiveSlot]:
        """Return the known slots of a pod."""
        found = (self.slots[key] for key in self._slots_of_pod.get(pod_uid, ()))
        return [live for live in found if live.pod_uid == pod_uid]

    def put_admission(self, uid: str, admission: QueueAdmission | None) -> bool:
        """Keep what Kueue says of a job; return whether that is news."""
        if self.admissions.get(uid) == admission:
            return False
        self.admissions.pop(uid, None)
        if admission is not None:
            self.admissions[uid] = admission
        self.changed_jobs.mark(uid)
        return True

    def put_run(self, run: JobPlacement) -> None:
        """Keep what is known of a placement."""
        self.runs[run.uid] = run
        self.changed_jobs.mark(run.uid)

    def run_of(self, job: Job) -> JobPlacement | None:
        """Return what is known of the job's newest placement."""
        run = self.runs.get(job.uid)
        return run if run is not None and run.epoch == job.epoch else None

    def runs_on(self, slot: str) -> list[JobPlacement]:
        """Return the newest placements of the jobs that have `slot` by their status."""
        runs = (self.runs.get(uid) for uid in self.index.held.get(slot, ()))
        return [run for run in runs if run is not None and run.slot == slot]

    def expects(self, uid: str, epoch: int, slot: str) -> bool:
        """Return whether the job's newest placement is this one, so that its reports count."""
        body = self.jobs.get(uid)
        status = (body or {}).get("status") or {}
        return bool(body) and status.get("slot") == slot and status.get("epoch") == epoch

    def assign(self, uid: str, epoch: int, slot: str, now: datetime) -> None:
        """Remember that the sidecar has the order to run a job."""
        checkpoint = ((self.jobs.get(uid) or {}).get("status") or {}).get("checkpoint") or {}
        step = int(checkpoint.get("step", 0))
        self.put_run(
            JobPlacement(uid, epoch, slot, RunState.ASSIGNED, since=now, checkpoint_before=step)
        )

    def stop_sent(self, uid: str, reason: str, now: datetime) -> None:
        """Remember that the sidecar was asked to stop a job."""
        run = self.runs.get(uid)
        if run is not None:
            asked = run.stop_asked_at or now
            self.put_run(replace(run, stop_asked_at=asked, stop_sent_at=now, stop_reason=reason))

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
            if not live.attached
            and live.pod_uid not in self.pods
            and live.key not in self.index.held
        ]
        for live in gone:
            del self.slots[live.key]
            self._slots_of_pod.pop(live.pod_uid, None)
            self._slot_views.pop(live.key, None)
            self.health.forget(live.key)
            self.changed_slots.mark(live.key)
        return gone


def _is_same(one: object, other: object) -> bool:
    """Return whether both are one object, or small values that are equal.

    Objects of the API server and messages are replaced, never changed; to compare them by what they
    hold would cost more than to remake a view.
    """
    return one is other or (isinstance(one, (str, int, tuple, frozenset)) and one == other)


def jobs_of(beat: pb.SlotHeartbeat) -> list[pb.RunningJob]:
    """Return the jobs that a heartbeat names; sidecars from before name one at most."""
    return list(beat.jobs) or ([beat.job] if beat.HasField("job") else [])


def _outputs(pod: Pod, terms: EffectivePolicy | None) -> tuple[str, ...]:
    """Return where jobs may write on the policy's volumes that are in the pod and can be written.

    `{namespace}` means that of the job, where each has a folder of its own. One that the policy has
    under the same name but of another claim, directory or path than when the pod was made is not.
    """
    policy = terms.policy if terms else None
    if policy is None or policy.spec is None:
        return ()
    return tuple(
        tenancy.tree_of(policy, volume)
        for volume in policy.spec.sidecar.volumes
        if not volume.read_only
        and volume_name(volume) in pod.volumes
        and (pod.mounts is None or policies.mount_of(policy, volume) in pod.mounts)
    )


def _unseen(live: LiveSlot, pod: Pod | None) -> str:
    """Return why a slot's sidecar does not see its device, with what it was given; "": it does."""
    unseen = live.facts.unseen_device
    access = pod.annotations.get(ANNOTATION_GPU_ACCESS, "") if pod else ""
    return f"{unseen}; GPU access {access}" if unseen and access else unseen


def _is_full(beat: pb.SlotHeartbeat) -> bool:
    known = beat.chunks_kv + beat.chunks_lent + beat.chunks_reserved + beat.chunks_free
    return known > 0 and beat.chunks_free + beat.chunks_lent == 0
