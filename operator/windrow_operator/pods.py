"""Extract what the operator keeps of a decode pod's object."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from windrow.crd import SIDECAR_CONTAINER
from windrow_operator import policies
from windrow_operator.decode_pods import RUN_VOLUME, decoders_of, served_model
from windrow_operator.injection import attached_sidecars
from windrow_operator.model import Mount, Pod, SidecarState, version_of


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
        version=version_of(body),
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
    decoders = {container["name"] for container in decoders_of(body)}
    return SidecarState(
        prepared=any(volume["name"] == RUN_VOLUME for volume in spec.get("volumes") or ()),
        native=any(c["name"] == SIDECAR_CONTAINER for c in spec.get("initContainers") or ()),
        decode_ready=any(
            c["name"] in decoders and c.get("ready") for c in status.get("containerStatuses") or ()
        ),
        attached=len(added),
        alive=bool(added) and ended is None,
        ended_at=datetime.fromisoformat(finished) if finished else None,
    )
