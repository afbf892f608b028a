"""The status of a pod, made from the records of its containers; pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from windrow_lab.node.backoff import restarts
from windrow_lab.node.expansion import POD_ADDRESS
from windrow_lab.node.records import ContainerRecord, Running, Terminated, timestamp

Json = dict[str, Any]

_OURS = ("Initialized", "ContainersReady", "Ready")


def is_sidecar(container: Json) -> bool:
    """Tell whether an init container is a native sidecar."""
    return container.get("restartPolicy") == "Always"


def phase_of(pod: Json, records: Mapping[str, ContainerRecord]) -> str:
    """Return Pending, Running, Succeeded or Failed."""
    policy = pod["spec"].get("restartPolicy", "Always")
    for container in pod["spec"].get("initContainers") or []:
        state = records[container["name"]].state
        if (
            not is_sidecar(container)
            and isinstance(state, Terminated)
            and state.exit_code != 0
            and not restarts("Never" if policy == "Never" else "OnFailure", state.exit_code)
        ):
            return "Failed"
    mains = [records[container["name"]] for container in pod["spec"]["containers"]]
    ended = [
        record.state.exit_code
        for record in mains
        if isinstance(record.state, Terminated) and not restarts(policy, record.state.exit_code)
    ]
    if len(ended) == len(mains):
        return "Failed" if any(ended) else "Succeeded"
    begun = [isinstance(r.state, Running | Terminated) or r.last is not None for r in mains]
    return "Running" if all(begun) else "Pending"


def pod_status(pod: Json, records: Mapping[str, ContainerRecord], now: datetime) -> Json:
    """Return the status to write: phase, conditions, addresses and the containers' statuses.

    `pod` is the object as last seen; the times of conditions that did not change come from it.
    """
    spec, phase = pod["spec"], phase_of(pod, records)
    inits = [(spec_of, records[spec_of["name"]]) for spec_of in spec.get("initContainers") or []]
    mains = [(spec_of, records[spec_of["name"]]) for spec_of in spec["containers"]]
    known = {entry["type"]: entry for entry in pod.get("status", {}).get("conditions") or []}
    started_at = pod.get("status", {}).get("startTime") or timestamp(now)
    status: Json = {
        "phase": phase,
        "hostIP": POD_ADDRESS,
        "hostIPs": [{"ip": POD_ADDRESS}],
        "podIP": POD_ADDRESS,
        "podIPs": [{"ip": POD_ADDRESS}],
        "startTime": started_at,
        "conditions": [
            _condition(kind, wanted, known.get(kind), now)
            for kind, wanted in _conditions(spec, phase, inits, mains, known).items()
        ],
        "containerStatuses": [_container_status(*main) for main in mains],
    }
    if inits:
        status["initContainerStatuses"] = [_container_status(*init) for init in inits]
    # They count neither for the phase nor for readiness.
    added = [entry for entry in spec.get("ephemeralContainers") or [] if entry["name"] in records]
    if added:
        status["ephemeralContainerStatuses"] = [
            _container_status(entry, records[entry["name"]]) for entry in added
        ]
    return status


def _conditions(
    spec: Json,
    phase: str,
    inits: list[tuple[Json, ContainerRecord]],
    mains: list[tuple[Json, ContainerRecord]],
    known: Mapping[str, Json],
) -> dict[str, tuple[bool, str]]:
    initialized = all(_has_initialized(container, record) for container, record in inits)
    sidecars = [record for container, record in inits if is_sidecar(container)]
    ready = all(record.ready for record in [*sidecars, *(record for _, record in mains)])
    over = "PodCompleted" if phase in ("Succeeded", "Failed") else ""
    gates = [gate["conditionType"] for gate in spec.get("readinessGates") or []]
    gates_open = all(known.get(gate, {}).get("status") == "True" for gate in gates)
    why_not_ready = over or ("" if ready else "ContainersNotReady")
    return {
        "Initialized": (initialized, "" if initialized else "ContainersNotInitialized"),
        "ContainersReady": (ready and not over, why_not_ready),
        "Ready": (
            ready and gates_open and not over,
            why_not_ready or ("" if gates_open else "ReadinessGatesNotReady"),
        ),
    }


def _has_initialized(container: Json, record: ContainerRecord) -> bool:
    if is_sidecar(container):
        return record.started or record.restarts > 0 or record.last is not None
    return isinstance(record.state, Terminated) and record.state.exit_code == 0


def _condition(kind: str, wanted: tuple[bool, str], known: Json | None, now: datetime) -> Json:
    is_true, reason = wanted
    status = "True" if is_true else "False"
    since = timestamp(now)
    if known is not None and known["status"] == status:
        since = known.get("lastTransitionTime") or since
    # A null deletes what an earlier write left: a strategic merge keeps absent fields.
    return {
        "type": kind,
        "status": status,
        "reason": reason or None,
        "lastTransitionTime": since,
    }


def _container_status(container: Json, record: ContainerRecord) -> Json:
    status: Json = {
        "name": container["name"],
        "image": container.get("image", ""),
        "imageID": "",
        "state": record.state.as_json(),
        "lastState": record.last.as_json() if record.last else {},
        "ready": record.ready,
        "started": record.started,
        "restartCount": record.restarts,
    }
    if isinstance(record.state, Running):
        status["containerID"] = f"process://{record.state.pid}"
    return status
