"""Write HarvestSlot objects from what sidecars report."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from windrow.conditions import IN_TIME, Reason, Status, set_condition, timestamp
from windrow.conditions import ConditionType as T
from windrow.crd import (
    API_VERSION,
    HARVEST_SLOT,
    format_duration,
)
from windrow.proto import attach_pb2 as pb
from windrow.protocol import PREDICTED_FROM
from windrow_operator.budget import FIGURES_PER_SECOND, WriteBudget
from windrow_operator.cluster_state import ClusterState, LiveSlot
from windrow_operator.kube import ApiError, Body, Conflict, Kube, ObjectNotFound, kind_path
from windrow_operator.model import ALIVE, Slot
from windrow_operator.work_queue import in_pieces

log = logging.getLogger(__name__)

# How often it is looked at what has changed. What decisions hang on is written at once.
LOOK_SECONDS = 2.0
# So long after another replica has come to lead, a slot that is not attached yet is not said to be.
_COMES_BACK = timedelta(seconds=60)
_AT_ONCE = 100  # looked at in one go
# It may have been killed while nothing ran on it: then nobody brings it back before a job waits.
_DISCONNECTED = (
    "The sidecar is not connected. One that runs dials again; one that has ended comes back once a "
    "job needs its slot"
)
_RANKS = (
    "Decode runs on {} ranks, and its sidecar starts a worker on one. Update the sidecar, or "
    "deploy an engine for each GPU (--tp-size 1); each is then a slot"
)
_OVER_RANKS = "; it runs on decode's {} ranks"
_SHOW_IT = (
    "In the HarvestPolicy set sidecar.gpuAccess: env on nodes of one tenant, or sidecar.form: "
    "sidecar where decode has its GPU by a ResourceClaim. Then recreate the pod"
)
_NOT_IN_SPACE = (
    "The policy says sharing: spatial, and the GPU is shared in time: see the condition "
    "SharedInSpace. With sharing: auto the slot takes jobs that run while decode has no request"
)
_OURS = ("name", "namespace", "ownerReferences")
# Figures that change every second are for Prometheus; here they are for people, and are written as
# the budget for what can wait allows.


def slot_object(live: LiveSlot) -> Body:
    """Return the object of a slot without its status. The pod owns it, so it goes with the pod."""
    facts = live.facts
    owner = {"apiVersion": "v1", "kind": "Pod", "name": live.pod_name, "uid": live.pod_uid}
    return {
        "apiVersion": API_VERSION,
        "kind": HARVEST_SLOT.kind,
        "metadata": {
            "name": live.name,
            "namespace": live.namespace,
            "ownerReferences": [owner],
        },
        "spec": {
            "podName": live.pod_name,
            "podUid": live.pod_uid,
            "nodeName": live.node,
            "index": facts.index,
            "engine": facts.engine,
            "engineVersion": facts.engine_version,
            "device": facts.device,
            "driver": facts.driver,
            "model": facts.model,
            "modelFingerprint": facts.model_fingerprint,
            "computeUnits": facts.compute_units,
            "finetuneLevels": list(facts.finetune_levels),
            "arenaBytes": facts.arena_bytes,
            "chunkBytes": facts.chunk_bytes,
            "chunks": facts.chunks,
            "tensorParallel": max(1, facts.tensor_parallel),
            "maxJobs": max(1, facts.max_jobs),
            "endpoint": facts.endpoint,
        },
    }


def slot_status(
    live: LiveSlot, view: Slot, jobs: list[Body], held: list[Body], now: datetime
) -> Body:
    """Return the whole status of a slot.

    Args:
        live: what the sidecar said.
        view: what placement makes of it.
        jobs: content of `status.jobs`.
        held: the conditions so far.
        now: an aware datetime.
    """
    terms = view.terms
    spec = terms.policy.spec if terms else None
    objective = spec.objective.tpot if spec else None
    status = {
        "conditions": _conditions(view, held, now),
        "policy": terms.policy.name if terms else None,
        "mode": terms.mode if terms else "off",
        "ranks": live.facts.ranks if live.facts.ranks > 1 else None,
        "objective": format_duration(objective) if objective else None,
        "objectiveSeconds": objective.total_seconds() if objective else None,
        "jobName": ", ".join(_job_name(job) for job in jobs) or None,
        "job": jobs[0] if jobs else None,
        "jobs": jobs,
        "sidecarVersion": live.sidecar_version or None,
        "lastHeartbeatTime": timestamp(live.beat_at) if live.beat_at else None,
        "sharing": live.facts.sharing or None,
        "sharingReason": live.facts.sharing_reason or None,
        **_observed(live, now),
    }
    return {name: value for name, value in status.items() if value is not None}


def _job_name(job: Body) -> str:
    """Return a job as people see it: of other namespaces no name is said."""
    return f"{job['namespace']}/{job['name']}" if job["name"] else f"a job of {job['namespace']}"


def _observed(live: LiveSlot, now: datetime) -> Body:
    """Return what the newest heartbeat says; nothing where none has come for a while."""
    if (beat := live.current_beat(now)) is None:
        return {}
    units = live.facts.compute_units
    return {
        "engineState": beat.engine_state,
        "tpotP50": _milliseconds(beat.tpot_p50_seconds),
        "tpotP99": _milliseconds(beat.tpot_p99_seconds),
        "tpotP50Seconds": _finite(beat.tpot_p50_seconds) or None,  # 0: no step was taken
        "tpotP99Seconds": _finite(beat.tpot_p99_seconds) or None,
        "decode": f"{beat.decode_units}/{units}",
        "finetune": f"{beat.finetune_units}/{units}",
        "lent": f"{beat.chunks_lent}/{live.facts.chunks}",
        "steps": beat.steps,
        "stepsOverObjective": beat.steps_over_objective,
        "batch": beat.batch,
        "contextTokens": beat.context_tokens,
        "waiting": beat.waiting,
        "decodeUnits": beat.decode_units,
        "finetuneUnits": beat.finetune_units,
        "chunks": {
            "kv": beat.chunks_kv,
            "lent": beat.chunks_lent,
            "reserved": beat.chunks_reserved,
            "draining": beat.chunks_draining,
            "free": beat.chunks_free,
        },
        "predictedTokensPerSecond": _finite(beat.predicted_tokens_per_second),
        "predictedFrom": _basis(beat.predicted_from),
        "computeUtilization": _finite(beat.compute_utilization),
        "computeUtilizationDecode": _finite(beat.compute_utilization_decode),
        "memoryUtilization": _finite(beat.memory_utilization),
        "breaker": beat.breaker,
        "ranksDiffer": beat.ranks_differ or None,
    }


def _basis(said: str) -> str | None:
    return said if said in PREDICTED_FROM else None  # a sidecar's word for one of ours


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON knows no other


def _milliseconds(seconds: float) -> str | None:
    return f"{seconds * 1000:.1f}ms" if 0 < seconds < math.inf else None


def _conditions(view: Slot, held: list[Body], now: datetime) -> list[Body]:
    attached: tuple[Status, str, str] = (
        ("True", Reason.CONNECTED, "The sidecar is connected")
        if view.attached
        else ("False", Reason.DISCONNECTED, _DISCONNECTED)
    )
    held = set_condition(held, T.ATTACHED, *attached, None, now)
    held = set_condition(held, T.READY, *readiness(view), None, now)
    if not view.sharing:  # a host, or nobody has said
        return [one for one in held if one["type"] != T.SHARED_IN_SPACE]
    return set_condition(held, T.SHARED_IN_SPACE, *_shared_in_space(view), None, now)


def _shared_in_space(view: Slot) -> tuple[Status, str, str]:
    if view.sharing == "spatial":
        return "True", Reason.MPS_CLIENTS, view.sharing_reason
    known = next((one for one in IN_TIME if one == view.sharing_code), Reason.REASON_NOT_SAID)
    return "False", known, f"{view.sharing_reason}. {IN_TIME[known]}"


def readiness(view: Slot) -> tuple[Status, str, str]:
    """Return status, reason and message of a slot's condition Ready."""
    if not view.attached:
        return "False", Reason.DISCONNECTED, "The sidecar is not connected"
    if view.silent:
        return "False", Reason.SILENT, "The sidecar is connected, but no heartbeat comes"
    if view.terms is None:
        return "False", Reason.NO_POLICY, "No valid HarvestPolicy selects the pod"
    if view.refused:
        return "False", Reason.ENGINE_REFUSED, f"Not harvested: {view.refused}"
    if view.terms.mode != "harvest":
        return "False", Reason.POLICY_OFF, view.terms.why or f"Mode is {view.terms.mode}"
    if view.off:
        return "False", Reason.SWITCHED_OFF, view.off[:1].upper() + view.off[1:]
    if view.lacks_ranks:
        return "False", Reason.TENSOR_PARALLEL, _RANKS.format(view.tensor_parallel)
    if view.unseen_device:
        message = f"No worker can use the GPU: {view.unseen_device}. {_SHOW_IT}"
        return "False", Reason.DEVICE_NOT_SEEN, message
    if view.lacks_space:
        return "False", Reason.NOT_SHARED_IN_SPACE, _NOT_IN_SPACE
    if view.engine_state == "leaving":
        return "False", Reason.DISCONNECTED, "The sidecar was asked to end"
    if view.node_leaving:
        return "False", Reason.NODE_LEAVING, f"Node {view.node} {view.node_leaving}"
    if view.engine_state != "serving":
        return "False", Reason.ENGINE_NOT_SERVING, f"The engine is {view.engine_state}"
    if view.breaker:
        return "False", Reason.BREAKER_OPEN, view.breaker
    if view.resting:
        return "False", Reason.RESTING, f"It rests {view.resting}"
    cut = "; it reports a rate above its hardware, which is cut" if view.overstates else ""
    ranks = _OVER_RANKS.format(view.ranks) if view.ranks > 1 else ""
    return "True", Reason.SERVING, f"The slot can take a job{ranks}{cut}"


def _notable(live: LiveSlot, view: Slot) -> tuple[object, ...]:
    """Return what of a slot is written at once when it changes."""
    return (
        *(id(live.facts), view.attached, view.silent, view.engine_state, view.breaker),
        view.off,
        *(
            view.resting,
            view.node_leaving,
            view.failed_jobs,
            view.holders,
            view.terms and (view.terms.mode, view.terms.policy),
        ),
    )


class SlotWriter:
    """Writes what changed.

    Args:
        cluster: what is known.
        kube: a client that may write.
        namespaces: that are served; none: all.
    """

    def __init__(self, cluster: ClusterState, kube: Kube, namespaces: tuple[str, ...] = ()) -> None:
        self._cluster, self._kube, self._namespaces = cluster, kube, namespaces
        self._written: dict[str, bytes] = {}  # digest of the object without status, by key
        self._status: dict[str, Body] = {}
        self._seen: dict[str, tuple[object, ...]] = {}  # what was notable when it was written
        self._later: dict[str, None] = {}  # keys of slots that are looked at the next time
        self._row: dict[str, None] = {}  # keys of slots of which figures have changed since
        self._budget = WriteBudget(FIGURES_PER_SECOND)

    async def load(self) -> None:
        """Take up the slots of an earlier life of the operator: known, not attached."""
        for namespace in self._namespaces or (None,):
            async for piece in self._kube.pieces(kind_path(HARVEST_SLOT, namespace)):
                for body in piece:
                    self._take_up(body)

    def _take_up(self, body: Body) -> None:
        metadata, spec = body["metadata"], body["spec"]
        key = f"{metadata['namespace']}/{metadata['name']}"
        live = LiveSlot(
            key=key,
            namespace=metadata["namespace"],
            name=metadata["name"],
            pod_name=spec["podName"],
            pod_uid=spec["podUid"],
            node=spec.get("nodeName", ""),
            facts=_facts(spec),
        )
        self._cluster.put_slot(live)
        said: Body = {name: body[name] for name in ("apiVersion", "kind", "spec") if name in body}
        said["metadata"] = {name: metadata.get(name) for name in _OURS}
        self._written[key] = _digest(said)
        self._status[key] = status = body.get("status") or {}
        self._cluster.health.take_up(key, status.get("health"))

    async def write(self, now: datetime) -> None:
        """Write the slots that changed; one that fails is written the next time.

        What decisions hang on goes at once. Slots of which only figures have changed stand in a row
        and are written from its front, as the budget allows.
        """
        keys = dict.fromkeys([*self._later, *self._cluster.changed_slots.take("writer")])
        self._later.clear()
        async for key in in_pieces(keys, _AT_ONCE):
            live = self._cluster.slots.get(key)
            if live is None:
                self._forget(key)
                continue
            view = self._cluster.slot_view(live, now)
            if view.awaited and now - self._cluster.started_at < _COMES_BACK:
                self._later[key] = None  # most come back before anybody has read it
                continue
            notable = _notable(live, view)
            if key not in self._seen and self._says_the_same(live, view, now):
                self._seen[key] = notable
            if self._seen.get(key) == notable:
                self._row[key] = None
            else:
                await self._try_to_write(live, view, now)
        while self._row and self._budget.take(now):
            key = next(iter(self._row))
            del self._row[key]
            if (live := self._cluster.slots.get(key)) is not None:
                await self._try_to_write(live, self._cluster.slot_view(live, now), now)

    async def _try_to_write(self, live: LiveSlot, view: Slot, now: datetime) -> None:
        self._row.pop(live.key, None)
        try:
            await self._write(live, view, now)
            self._seen[live.key] = _notable(live, view)
        except ApiError as error:
            self._written.pop(live.key, None)
            self._seen.pop(live.key, None)
            self._later[live.key] = None
            log.warning("slot %s could not be written: %s", live.key, error)

    async def _write(self, live: LiveSlot, view: Slot, now: datetime) -> None:
        wanted = slot_object(live)
        if live.attached and self._written.get(live.key) != _digest(wanted):
            await self._write_object(live, wanted)
        before, after = self._status.get(live.key, {}), self._status_of(live, view, now)
        if after == before:
            return
        path = kind_path(HARVEST_SLOT, live.namespace, live.name, "status")
        try:
            # A merge removes what is None: the figures of before that are not known any more.
            await self._kube.merge(path, {"status": {**dict.fromkeys(before), **after}})
        except ObjectNotFound:
            # Collected with its pod, or deleted by hand: made again while the sidecar is attached.
            self._forget(live.key)
            return
        self._status[live.key] = after

    def _status_of(self, live: LiveSlot, view: Slot, now: datetime) -> Body:
        held = self._status.get(live.key, {}).get("conditions") or []
        status = slot_status(live, view, self._jobs(live, view), held, now)
        health = self._cluster.health.status_of(live.key)
        return status if health is None else {**status, "health": health}

    def _says_the_same(self, live: LiveSlot, view: Slot, now: datetime) -> bool:
        """Return whether what an earlier leader has written is true but for figures."""
        before, after = self._status.get(live.key), self._status_of(live, view, now)
        same = self._written.get(live.key) == _digest(slot_object(live))
        told = ("conditions", "policy", "mode", "jobs", "health", "breaker")
        return same and before is not None and all(before.get(k) == after.get(k) for k in told)

    async def _write_object(self, live: LiveSlot, wanted: Body) -> None:
        try:
            await self._kube.create(kind_path(HARVEST_SLOT, live.namespace), wanted)
            self._status.pop(live.key, None)
        except Conflict:
            path = kind_path(HARVEST_SLOT, live.namespace, live.name)
            await self._kube.merge(path, wanted)
        self._written[live.key] = _digest(wanted)

    def _forget(self, key: str) -> None:
        self._written.pop(key, None)
        self._status.pop(key, None)
        self._seen.pop(key, None)
        self._row.pop(key, None)

    def _jobs(self, live: LiveSlot, view: Slot) -> list[Body]:
        """Return the content of `status.jobs`; what other tenants call their jobs is not said."""
        jobs = []
        for holder in view.holders:
            if (body := self._cluster.jobs.get(holder.uid)) is None:
                continue
            metadata = body["metadata"]
            mine = metadata["namespace"] == live.namespace
            job: Body = {"namespace": metadata["namespace"]}
            job["name"] = metadata["name"] if mine else ""
            epoch = (body.get("status") or {}).get("epoch", 0)
            job |= {"uid": holder.uid, "epoch": epoch}
            run = self._cluster.runs.get(holder.uid)
            if run is not None and run.epoch == epoch and run.state in ALIVE:
                joined = run.progress.joined_with
                job |= {"joinedWith": joined} if joined else {}
            jobs.append(job)
        return jobs


def _digest(body: Body) -> bytes:
    """Return what tells whether an object is still the same, in 16 bytes: there are thousands."""
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).digest()


def _facts(spec: Mapping[str, Any]) -> pb.SlotFacts:
    return pb.SlotFacts(
        index=spec.get("index", 0),
        engine=spec.get("engine", ""),
        engine_version=spec.get("engineVersion", ""),
        device=spec.get("device", ""),
        driver=spec.get("driver", ""),
        model=spec.get("model", ""),
        model_fingerprint=spec.get("modelFingerprint", ""),
        compute_units=spec.get("computeUnits", 0),
        finetune_levels=spec.get("finetuneLevels", ()),
        arena_bytes=spec.get("arenaBytes", 0),
        chunk_bytes=spec.get("chunkBytes", 0),
        chunks=spec.get("chunks", 0),
        tensor_parallel=spec.get("tensorParallel", 1),
        max_jobs=spec.get("maxJobs", 1),
        endpoint=spec.get("endpoint", ""),
    )
