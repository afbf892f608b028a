"""Which pods decode, and what a decode pod gets from us: a pure function from pod to JSON patch.

A pod that no rule matches is never touched. Injecting twice changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from windrow import rundir
from windrow.crd import (
    ANNOTATION_INJECT,
    ANNOTATION_INJECTED_BY,
    LABEL_DECODE,
    SIDECAR_CONTAINER,
)
from windrow.crd.harvestpolicy import VolumeSpec

RUN_VOLUME = "windrow-run"
TOKEN_VOLUME = "windrow-token"
TOKEN_DIR = "/var/run/secrets/windrow.dev"
TOKEN_FILE = "token"
# The kubelet renews it long before; an hour bounds what a stolen one is worth.
TOKEN_SECONDS = 3600

Body = dict[str, Any]
Patch = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SidecarTemplate:
    """What is the same in every injected sidecar."""

    operator_address: str
    operator_ca: str  # PEM
    image: str
    command: tuple[str, ...] = ("python", "-m", "windrow_sidecar.agent")
    metrics_port: int = 0
    mps: bool = True  # whether a GPU may be shared under a private MPS daemon


@dataclass(frozen=True, slots=True)
class Rule:
    """How the pods of one stack say that they decode."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]


def _labels(pod: Mapping[str, Any]) -> Mapping[str, str]:
    return pod.get("metadata", {}).get("labels") or {}


def _label(name: str, key: str, value: str) -> Rule:
    return Rule(name, lambda pod: _labels(pod).get(key) == value)


def _ome(pod: Mapping[str, Any]) -> bool:
    labels = _labels(pod)
    return labels.get("component") == "decoder" and "ome.io/inferenceservice" in labels


def _is_decoder(container: Mapping[str, Any]) -> bool:
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    # A shell line (`sh -c "exec python -m ... --disaggregation-mode decode"`) is one word.
    flat = " ".join(words).split()
    return "--disaggregation-mode=decode" in flat or any(
        flag == "--disaggregation-mode" and value == "decode" for flag, value in pairwise(flat)
    )


def _arguments(pod: Mapping[str, Any]) -> bool:
    return any(_is_decoder(container) for container in _containers(pod))


# In this order; the first that matches is named in the pod's annotation.
RULES: tuple[Rule, ...] = (
    _label("rbg", "rbg.workloads.x-k8s.io/role-name", "decode"),
    _label("lws-disaggregatedset", "disaggregatedset.x-k8s.io/role", "decode"),
    Rule("ome", _ome),
    _label("dynamo", "nvidia.com/dynamo-component-type", "decode"),
    _label("dynamo-sub-component", "nvidia.com/dynamo-sub-component-type", "decode"),
    _label("llm-d", "llm-d.ai/role", "decode"),
    Rule("arguments", _arguments),
)


def matching_rule(pod: Mapping[str, Any]) -> str:
    """Return the name of the rule by which `pod` decodes; empty: it does not, or opted out."""
    wish = (pod.get("metadata", {}).get("annotations") or {}).get(ANNOTATION_INJECT)
    if wish == "disabled":
        return ""
    if wish == "enabled":
        return "annotation"
    return next((rule.name for rule in RULES if rule.matches(pod)), "")


def inject(
    pod: Mapping[str, Any], template: SidecarTemplate, volumes: Iterable[VolumeSpec] = ()
) -> Patch:
    """Return the JSON patch (RFC 6902) that makes `pod` harvestable; empty: leave it alone."""
    rule = matching_rule(pod)
    if not rule or not _containers(pod):
        return []
    wanted = copy.deepcopy(dict(pod))
    _mark(wanted, rule)
    spec = wanted["spec"]
    _add_volumes(spec, volumes)
    decoder = next((c for c in spec["containers"] if _is_decoder(c)), spec["containers"][0])
    _prepare_decoder(decoder)
    sidecar = _sidecar(template, decoder, volumes)
    # First, so that its sockets are there when a container of the same list wants them.
    _merge(spec.setdefault("initContainers", []), sidecar, front=True)
    return _difference(pod, wanted)


def _containers(pod: Mapping[str, Any]) -> list[Body]:
    return list(pod.get("spec", {}).get("containers") or ())


def _mark(pod: Body, rule: str) -> None:
    metadata = pod.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), LABEL_DECODE: "true"}
    annotations = metadata.get("annotations") or {}
    metadata["annotations"] = {ANNOTATION_INJECTED_BY: rule, **annotations}


def _add_volumes(spec: Body, volumes: Iterable[VolumeSpec]) -> None:
    wanted = spec.setdefault("volumes", [])
    _merge(wanted, {"name": RUN_VOLUME, "emptyDir": {}})
    token = {
        "audience": rundir.TOKEN_AUDIENCE,
        "expirationSeconds": TOKEN_SECONDS,
        "path": TOKEN_FILE,
    }
    projected = {"sources": [{"serviceAccountToken": token}]}
    _merge(wanted, {"name": TOKEN_VOLUME, "projected": projected})
    for volume in volumes:
        source = volume.model_dump(
            by_alias=True,
            exclude_none=True,
            include={"persistent_volume_claim", "host_path"},
        )
        _merge(wanted, {"name": volume_name(volume), **source})


def volume_name(volume: VolumeSpec) -> str:
    """Return the name that a volume of a policy has in a pod."""
    return f"windrow-{volume.name}"


def _prepare_decoder(container: Body) -> None:
    mounts = container.setdefault("volumeMounts", [])
    _merge(mounts, {"name": RUN_VOLUME, "mountPath": str(rundir.DEFAULT_RUN_DIR)})
    env = container.setdefault("env", [])
    _merge(env, {"name": rundir.ENV_RUN_DIR, "value": str(rundir.DEFAULT_RUN_DIR)})
    _merge(env, _field(rundir.ENV_POD_NAME, "metadata.name"))


def _sidecar(template: SidecarTemplate, decoder: Body, volumes: Iterable[VolumeSpec]) -> Body:
    """Return the native sidecar: an init container that stays.

    It has no startup probe: the kubelet would hold decode back until that succeeds.
    """
    env: list[Body] = [
        {"name": rundir.ENV_RUN_DIR, "value": str(rundir.DEFAULT_RUN_DIR)},
        {"name": rundir.ENV_OPERATOR_ADDRESS, "value": template.operator_address},
        {"name": rundir.ENV_OPERATOR_CA, "value": template.operator_ca},
        {"name": rundir.ENV_TOKEN_FILE, "value": f"{TOKEN_DIR}/{TOKEN_FILE}"},
        {"name": rundir.ENV_METRICS_PORT, "value": str(template.metrics_port)},
        _field(rundir.ENV_POD_NAMESPACE, "metadata.namespace"),
        _field(rundir.ENV_POD_NAME, "metadata.name"),
        _field(rundir.ENV_POD_UID, "metadata.uid"),
        _field(rundir.ENV_NODE_NAME, "spec.nodeName"),
    ]
    if not template.mps:
        env.append({"name": rundir.ENV_MPS, "value": "off"})
    taken_over = (rundir.ENV_LOG_DIR, rundir.ENV_COPY_RATE)
    env += [entry for entry in decoder["env"] if entry["name"] in taken_over]
    mounts: list[Body] = [
        {"name": RUN_VOLUME, "mountPath": str(rundir.DEFAULT_RUN_DIR)},
        {"name": TOKEN_VOLUME, "mountPath": TOKEN_DIR, "readOnly": True},
    ]
    mounts += [
        {
            "name": volume_name(volume),
            "mountPath": volume.mount_path,
            **({"readOnly": True} if volume.read_only else {}),
        }
        for volume in volumes
    ]
    return {
        "name": SIDECAR_CONTAINER,
        "image": template.image,
        "restartPolicy": "Always",
        "command": list(template.command),
        "env": env,
        "volumeMounts": mounts,
    }


def _field(name: str, path: str) -> Body:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _merge(entries: list[Body], entry: Body, *, front: bool = False) -> None:
    """Add `entry` unless one of its name is there: what stands already was meant."""
    if all(other["name"] != entry["name"] for other in entries):
        entries.insert(0 if front else len(entries), entry)


def _difference(before: Mapping[str, Any], after: Body) -> Patch:
    """Return operations on the few places that injection changes, each replaced as a whole."""
    patch: Patch = []
    for path in (
        ("metadata", "labels"),
        ("metadata", "annotations"),
        ("spec", "volumes"),
        ("spec", "initContainers"),
        ("spec", "containers"),
    ):
        parent, leaf = path
        old, new = before.get(parent, {}).get(leaf), after[parent].get(leaf)
        if old != new:
            operation = "add" if old is None else "replace"
            patch.append({"op": operation, "path": f"/{parent}/{leaf}", "value": new})
    return patch
