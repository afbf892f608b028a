"""What the operator knows at this moment: objects of the API server and what sidecars say.

A plain store without effects. Objects come from one listing at the start, from watches, and from
the answers to our own writes; of two versions of an object the newer one stays, so that a watch
that lags behind a write cannot undo it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from windrow.conditions import get_condition, is_finished
from windrow.crd import FINALIZER, SIDECAR_CONTAINER, FinetuneJobSpec, parse_job_spec
from windrow.errors import UserError
from windrow.outputs import path_of
from windrow.proto import attach_pb2 as pb
from windrow_operator import policies
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
    Pod,
    RunState,
    SidecarState,
    Slot,
    key_of,
)

Body = dict[str, Any]
# Of a place that jobs write to: by what the job comes before others, and its UID.
Owner = tuple[tuple[bool, str, str], str]


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
        self.slots: dict[str, LiveSlot] = {}  # by key
        self.runs: dict[str, JobPlacement] = {}  # newest by job UID
        self.used: dict[str, tuple[str, float]] = {}  # policy key: day, device seconds
        self._places: dict[str, frozenset[str]] = {}  # by destination, under the present policies
        self._specs: dict[tuple[str, int], tuple[FinetuneJobSpec | None, str]] = {}

    # --- objects ----------------------------------------------------------------------------------

    def put_job(self, body: Mapping[str, Any]) -> None:
        """Keep a FinetuneJob unless a newer version is here."""
        uid = body["metadata"]["uid"]
        if _is_newer(body, self.jobs.get(uid)):
            self.jobs[uid] = dict(body)

    def drop_job(self, uid: str) -> None:
        """Forget a FinetuneJob that the API server no longer has."""
        self.jobs.pop(uid, None)
        self.runs.pop(uid, None)
        for known in [known for known in self._specs if known[0] == uid]:
            del self._specs[known]

    def put_policy(self, body: Mapping[str, Any]) -> None:
        """Keep a HarvestPolicy unless a newer version is here."""
        key = key_of(body["metadata"]["namespace"], body["metadata"]["name"])
        if not _is_newer(body, self.policy_bodies.get(key)):
            return
        self.policy_bodies[key] = dict(body)
        usage = (body.get("status") or {}).get("usage")
        if usage and key not in self.used:
            self.used[key] = (usage["day"], float(usage["gpuSeconds"]))
        self.policies[key] = policies.policy_of(body)
        self._places.clear()

    def drop_policy(self, key: str) -> None:
        """Forget a HarvestPolicy."""
        self.policy_bodies.pop(key, None)
        self.policies.pop(key, None)
        self._places.clear()

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

    def put_priority_class(self, body: Mapping[str, Any]) -> None:
        """Keep the value of a PriorityClass."""
        self.priorities[body["metadata"]["name"]] = int(body.get("value", 0))

    def charge(self, policy_key: str, seconds: float, now: datetime) -> None:
        """Count device seconds that a job held a slot of this policy."""
        day = _day(now)
        self.used[policy_key] = (day, self.used_today(policy_key, now) + seconds)

    def used_today(self, policy_key: str, now: datetime) -> float:
        """Return the device seconds that jobs have had under this policy today (UTC)."""
        day, seconds = self.used.get(policy_key, ("", 0.0))
        return seconds if day == _day(now) else 0.0

    # --- views for decisions ----------------------------------------------------------------------

    def terms(self, pod: Pod, now: datetime) -> EffectivePolicy | None:
        """Return what the policy of `pod` allows now; None: no policy selects it."""
        policy = policies.select(pod, self.policies.values())
        if policy is None:
            return None
        return policies.terms_of(policy, now, self.used_today(policy.key, now))

    def slot_views(self, now: datetime) -> dict[str, Slot]:
        """Return every known slot as placement sees it."""
        holders = self.holders()
        unknown = {key: self._unknown_slot(key) for key in holders if key not in self.slots}
        known = {key: self._slot_view(live, holders, now) for key, live in self.slots.items()}
        return {**unknown, **known}

    def _unknown_slot(self, key: str) -> Slot:
        """Return a slot that a job is on by its status and nothing else tells of.

        After a restart of the operator its sidecar has yet to come back.
        """
        pods = {key_of(pod.namespace, pod.name) for pod in self.pods.values() if not pod.ending}
        gone = key not in pods and key.rpartition(".")[0] not in pods
        return Slot(key=key, attached=False, lost_at=self.started_at, pod_gone=gone)

    def _slot_view(self, live: LiveSlot, holders: Mapping[str, list[str]], now: datetime) -> Slot:
        pod = self.pods.get(live.pod_uid)
        beat = live.beat or pb.SlotHeartbeat()
        held = dict.fromkeys(holders.get(live.key, ()))
        held |= dict.fromkeys(running.job_uid for running in jobs_of(beat))
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
            pod_gone=pod is None or pod.ending,
            terms=self.terms(pod, now) if pod else None,
            holders=tuple(self._holder(uid) for uid in held),
            max_jobs=max(1, live.facts.max_jobs),
            outputs=(
                *live.facts.output_trees,
                *(_outputs(pod, self.terms(pod, now)) if pod else ()),
            ),
        )

    def holders(self) -> dict[str, list[str]]:
        """Return by slot the UIDs of the jobs that have it by their status, the first one first."""
        held: dict[str, list[str]] = {}
        for uid, body in self.jobs.items():
            slot = (body.get("status") or {}).get("slot")
            if slot:
                held.setdefault(slot, []).append(uid)
        for uids in held.values():
            uids.sort(key=self._job_key)
        return held

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
        owners = self._destination_owners()
        jobs = [self._job_view(body, owners) for body in self.jobs.values()]
        return sorted(jobs, key=lambda job: (-job.priority, job.created, job.key))

    def job_view(self, uid: str) -> Job:
        """Return one job."""
        return self._job_view(self.jobs[uid], self._destination_owners())

    def _job_view(self, body: Mapping[str, Any], owners: Mapping[str, Owner]) -> Job:
        metadata, status = body["metadata"], body.get("status") or {}
        spec, error = self._spec(body)
        deleted = metadata.get("deletionTimestamp")
        uid = metadata["uid"]
        priority_class = (spec and spec.priority_class_name) or ""
        places = self._places_of(spec.output.destination) if spec else ()
        others = (owners[place] for place in places if place in owners)
        owner = min((rank for rank in others if rank[1] != uid), default=None)
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
            priority_class_missing="" if priority_class in self.priorities else priority_class,
            namespace_labels=self.namespaces.get(metadata["namespace"], {}),
            destination_owner=self._named(owner[1], spec) if owner and spec else "",
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

    def _places_of(self, destination: str) -> frozenset[str]:
        if destination not in self._places:
            known = self.policies.values()
            self._places[destination] = policies.places_of(destination, known)
        return self._places[destination]

    def _destination_owners(self) -> dict[str, Owner]:
        """Return which unfinished job may write to each place: the first that came.

        A job that has been placed keeps its destination against one that is older by the clock.
        """
        owners: dict[str, Owner] = {}
        for uid, body in self.jobs.items():
            spec, _ = self._spec(body)
            status, metadata = body.get("status") or {}, body["metadata"]
            if spec is None or is_finished(status.get("conditions")):
                continue
            rank = (not status.get("epoch"), metadata["creationTimestamp"], self._job_key(uid))
            for place in self._places_of(spec.output.destination):
                if place not in owners or rank < owners[place][0]:
                    owners[place] = (rank, uid)
        return owners

    # --- what sidecars say ------------------------------------------------------------------------

    def run_of(self, job: Job) -> JobPlacement | None:
        """Return what is known of the job's newest placement."""
        run = self.runs.get(job.uid)
        return run if run is not None and run.epoch == job.epoch else None

    def expects(self, uid: str, epoch: int, slot: str) -> bool:
        """Return whether the job's newest placement is this one, so that its reports count."""
        body = self.jobs.get(uid)
        status = (body or {}).get("status") or {}
        return bool(body) and status.get("slot") == slot and status.get("epoch") == epoch

    def assign(self, uid: str, epoch: int, slot: str, now: datetime) -> None:
        """Remember that the sidecar was told to run a job."""
        self.runs[uid] = JobPlacement(uid, epoch, slot, RunState.ASSIGNED, since=now)

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
        here = [run.uid for run in self.runs.values() if run.slot == slot and run.state in ALIVE]
        return [self.jobs[uid]["metadata"]["namespace"] for uid in here if uid in self.jobs]

    def forget_unused_slots(self) -> list[LiveSlot]:
        """Drop and return slots whose pod and sidecar are gone and that no job is on."""
        held = self.holders()
        gone = [
            live
            for live in self.slots.values()
            if not live.attached and live.pod_uid not in self.pods and live.key not in held
        ]
        for live in gone:
            del self.slots[live.key]
        return gone


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
        version=int(metadata.get("resourceVersion") or 0),
        model=served_model(body),
        sidecar=_sidecar_state(body),
    )


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
    """Return where the policy's volumes stand that are in the pod and can be written."""
    spec = terms.policy.spec if terms else None
    return tuple(
        volume.mount_path
        for volume in (spec.sidecar.volumes if spec else ())
        if not volume.read_only and volume_name(volume) in pod.volumes
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
