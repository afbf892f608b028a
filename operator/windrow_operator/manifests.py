"""Find the pods that a manifest makes, with the labels that their stack's controller gives them.

Pure functions over objects. What a controller adds besides (variables, volumes, sidecars) is not
here, so a pod of a cluster can show more than its manifest does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]

# Kinds whose spec has a pod, or a template of one.
_PLAIN = frozenset(
    {"Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController", "Job"}
)
_PRESET = "ghcr.io/llm-d/llm-d-cuda"
_DYNAMO_TYPE = "nvidia.com/dynamo-component-type"
_DYNAMO_PART = "nvidia.com/dynamo-sub-component-type"


@dataclass(frozen=True, slots=True)
class FoundPod:
    """A pod that a manifest makes.

    Attributes:
        where: the manifest and the place in it, in words.
        pod: with `metadata` and `spec`.
    """

    where: str
    pod: Body


def pods_in(manifest: Mapping[str, Any]) -> list[FoundPod]:
    """Return the pods that one object makes; none of a kind that makes none."""
    kind, name = str(manifest.get("kind") or "Pod"), _name(manifest)
    if kind == "List" or (kind.endswith("List") and "items" in manifest):
        return [each for item in manifest.get("items") or () for each in pods_in(item)]
    found = [(place, pod) for place, pod in _pods(kind, manifest) if (pod.get("spec") or {}) != {}]
    head = f"{kind} {name}".strip()
    return [FoundPod(f"{head}, {place}" if place else head, pod) for place, pod in found]


def _pods(kind: str, manifest: Mapping[str, Any]) -> Iterator[tuple[str, Body]]:
    spec = manifest.get("spec") or {}
    if kind == "Pod":
        yield "", dict(manifest)
    elif kind == "PodTemplate":
        yield "", dict(manifest.get("template") or {})
    elif kind in _PLAIN:
        yield "", dict(spec.get("template") or {})
    elif kind == "CronJob":
        yield "", dict(((spec.get("jobTemplate") or {}).get("spec") or {}).get("template") or {})
    elif kind == "LeaderWorkerSet":
        yield from _leader_and_workers(spec.get("leaderWorkerTemplate") or {})
    elif kind == "DisaggregatedSet":
        for role in _entries(spec.get("roles")):
            labels = {"disaggregatedset.x-k8s.io/role": str(role.get("name", ""))}
            group = (role.get("spec") or role.get("template") or {}).get("leaderWorkerTemplate")
            yield from _of_role(str(role.get("name", "")), labels, group or {})
    elif kind == "RoleBasedGroup":
        yield from _role_based(spec)
    elif kind == "RoleBasedGroupSet":
        template = spec.get("groupTemplate") or spec.get("template") or {}
        yield from _role_based(template.get("spec") or template)
    elif kind == "DynamoGraphDeployment":
        yield from _dynamo(spec)
    elif kind == "DynamoComponentDeployment":
        yield from _dynamo_component(str(spec.get("serviceName") or ""), spec, ())
    elif kind in ("ServingRuntime", "ClusterServingRuntime", "InferenceService"):
        yield from _ome(spec)
    elif kind in ("LLMInferenceService", "LLMInferenceServiceConfig"):
        yield from _llm_d(spec)
    else:
        yield from _templates_in(spec, "spec")


def _templates_in(part: object, place: str) -> Iterator[tuple[str, Body]]:
    """Yield the pod templates in an object of a kind that we do not know (Rollout, CloneSet)."""
    if isinstance(part, Mapping):
        spec = part.get("spec")
        containers = spec.get("containers") if isinstance(spec, Mapping) else None
        if isinstance(containers, list) and containers:
            yield place, {"metadata": part.get("metadata") or {}, "spec": spec}
            return
        for name, below in part.items():
            yield from _templates_in(below, f"{place}.{name}")
    elif isinstance(part, list):
        for number, below in enumerate(part):
            yield from _templates_in(below, f"{place}[{number}]")


def _leader_and_workers(group: Mapping[str, Any]) -> Iterator[tuple[str, Body]]:
    leader, worker = group.get("leaderTemplate"), group.get("workerTemplate")
    if leader:
        yield "leader", _labelled(leader, {"leaderworkerset.sigs.k8s.io/worker-index": "0"})
    if worker:
        # Without a template of its own the leader is a worker, too.
        yield ("worker" if leader else "leader and workers"), dict(worker)


def _of_role(
    role: str, labels: Mapping[str, str], group: Mapping[str, Any]
) -> Iterator[tuple[str, Body]]:
    for place, pod in _leader_and_workers(group):
        yield f"role {role}, {place}", _labelled(pod, labels)


def _role_based(spec: Mapping[str, Any]) -> Iterator[tuple[str, Body]]:
    templates = {
        str(each.get("name")): each.get("template") or {}
        for each in _entries(spec.get("roleTemplates"))
    }
    for role in _entries(spec.get("roles")):
        name = str(role.get("name", ""))
        labels = {"rbg.workloads.x-k8s.io/role-name": name}
        standalone = role.get("standalonePattern") or {}
        group = role.get("leaderWorkerPattern") or role.get("leaderWorkerSet") or {}
        for source in (role, standalone, group):
            ref = (source.get("templateRef") or {}).get("name")
            template = source.get("template") or templates.get(str(ref)) or {}
            patch = (source.get("templateRef") or {}).get("patch") or {}
            if not template and not patch:
                continue
            whole = _patched(template, patch)
            parts = {
                part: group.get(f"{part}TemplatePatch") or group.get(f"patch{part.title()}Template")
                for part in ("leader", "worker")
            }
            if not any(parts.values()):
                yield f"role {name}", _labelled(whole, labels)
                continue
            for part, more in parts.items():
                yield f"role {name}, {part}", _labelled(_patched(whole, more or {}), labels)
        for custom in _entries((role.get("customComponentsPattern") or {}).get("components")):
            place = f"role {name}, component {custom.get('name', '')}"
            yield place, _labelled(custom.get("template") or {}, labels)


def _dynamo(spec: Mapping[str, Any]) -> Iterator[tuple[str, Body]]:
    shared = spec.get("envs") or spec.get("env") or ()
    for name, service in (spec.get("services") or {}).items():
        yield from _dynamo_component(str(name), service or {}, shared)
    for component in _entries(spec.get("components")):  # v1beta1
        template = component.get("podTemplate") or {}
        part = str(component.get("type") or "")
        pod = _labelled(template, {_DYNAMO_TYPE: part} if part else {})
        _add_env(pod, shared)
        yield f"component {component.get('name', '')}", pod


def _dynamo_component(
    name: str, service: Mapping[str, Any], shared: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Body]]:
    extra = dict(service.get("extraPodSpec") or {})
    main = {"name": "main", **(extra.pop("mainContainer", None) or {})}
    limits = (service.get("resources") or {}).get("limits") or {}
    if limits.get("gpu") and not main.get("resources"):
        main["resources"] = {"limits": {limits.get("gpuType") or "nvidia.com/gpu": limits["gpu"]}}
    if secret := service.get("envFromSecret"):
        main["envFrom"] = [*(main.get("envFrom") or ()), {"secretRef": {"name": secret}}]
    mounts = [
        {"name": each["name"], "mountPath": each["mountPoint"]}
        for each in _entries(service.get("volumeMounts"))
        if each.get("name") and each.get("mountPoint")
    ]
    if mounts:
        main["volumeMounts"] = [*(main.get("volumeMounts") or ()), *mounts]
        volumes = [
            {"name": each["name"], "persistentVolumeClaim": {"claimName": each["name"]}}
            for each in mounts
        ]
        extra["volumes"] = [*(extra.get("volumes") or ()), *volumes]
    extra["containers"] = [main, *(extra.get("containers") or ())]
    said = {
        _DYNAMO_TYPE: service.get("componentType"),
        _DYNAMO_PART: service.get("subComponentType"),
    }
    metadata = service.get("extraPodMetadata") or {}
    pod: Body = {"metadata": metadata, "spec": extra}
    pod = _labelled(pod, {key: str(value) for key, value in said.items() if value})
    _add_env(pod, [*shared, *(service.get("envs") or ())])
    yield f"service {name}", pod


def _add_env(pod: Body, env: Sequence[Mapping[str, Any]]) -> None:
    containers = (pod.get("spec") or {}).get("containers") or ()
    for container in containers[:1] if env else ():
        container["env"] = [*env, *(container.get("env") or ())]


def _ome(spec: Mapping[str, Any]) -> Iterator[tuple[str, Body]]:
    """Return the pods of OME's kinds, and of KServe's of the same names."""
    parts = {
        "engine": spec.get("engineConfig") or spec.get("engine"),
        "decoder": spec.get("decoderConfig") or spec.get("decoder"),
    }
    for part, config in parts.items():
        for place, pod_spec in (
            ("", config or {}),
            (", leader", (config or {}).get("leader") or {}),
            (", worker", (config or {}).get("worker") or {}),
        ):
            if runner := pod_spec.get("runner"):
                made = {key: value for key, value in pod_spec.items() if key != "runner"}
                beside = [each for each in made.get("containers") or () if each]
                made["containers"] = [runner, *beside]
                labels = {"component": part, "ome.io/inferenceservice": "any"}
                yield f"{part}{place}", {"metadata": {"labels": labels}, "spec": made}
    if spec.get("containers"):
        yield "", {"metadata": {}, "spec": dict(spec)}
    predictor = spec.get("predictor") or {}
    if predictor.get("containers"):
        yield "predictor", {"metadata": {}, "spec": dict(predictor)}


def _llm_d(spec: Mapping[str, Any]) -> Iterator[tuple[str, Body]]:
    # With a prefill part the rest decodes; without one it does both.
    role = "decode" if spec.get("prefill") else "both"
    parts = ((role, spec), ("prefill", spec.get("prefill") or {}))
    for part, config in parts:
        for place in ("template", "worker"):
            if pod_spec := config.get(place):
                made = dict(pod_spec)
                if not spec.get("baseRefs"):
                    made["containers"] = [_with_image(c) for c in _entries(made.get("containers"))]
                pod = {"metadata": {"labels": {"llm-d.ai/role": part}}, "spec": made}
                yield f"{part}, {place}", pod


def _with_image(container: Mapping[str, Any]) -> Body:
    """Return a container with the image of KServe's own preset, vLLM's, where it has none."""
    return {"image": _PRESET, **container} if container.get("name") == "main" else dict(container)


def _labelled(template: Mapping[str, Any], labels: Mapping[str, str]) -> Body:
    metadata = dict(template.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    return {**template, "metadata": metadata}


def _patched(template: Mapping[str, Any], patch: Mapping[str, Any]) -> Body:
    """Return a template with a strategic merge patch: named entries of lists are merged."""
    merged: Body = dict(template)
    for key, value in patch.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = _patched(old, value)
        elif isinstance(value, list) and isinstance(old, list) and _are_named([*old, *value]):
            by_name = {entry["name"]: entry for entry in old}
            for entry in value:
                by_name[entry["name"]] = _patched(by_name.get(entry["name"], {}), entry)
            merged[key] = list(by_name.values())
        else:
            merged[key] = value
    return merged


def _are_named(entries: Sequence[object]) -> bool:
    return all(isinstance(entry, Mapping) and "name" in entry for entry in entries)


def _entries(value: object) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _name(manifest: Mapping[str, Any]) -> str:
    metadata = manifest.get("metadata") or {}
    return str(metadata.get("name") or metadata.get("generateName") or "")


# --- what the API server would refuse -------------------------------------------------------------


def shape_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Return what keeps a manifest from being searched for pods; empty: nothing."""
    if problem := _shape_of_objects(manifest, ("metadata", "spec")):
        return problem
    if problem := _shape_of_objects(manifest.get("spec") or {}, ("template", "jobTemplate")):
        return f"spec.{problem}"
    return ""


def _shape_of_objects(body: Mapping[str, Any], keys: Sequence[str]) -> str:
    for key in keys:
        if body.get(key) is not None and not isinstance(body[key], Mapping):
            return f"{key} is not an object"
    return ""


def shape_of(pod: Mapping[str, Any]) -> str:
    """Return where a pod has another shape than Kubernetes takes; empty: nowhere that counts."""
    if problem := _shape_of_objects(pod, ("metadata",)):
        return problem
    for key in ("labels", "annotations"):
        entries = (pod.get("metadata") or {}).get(key)
        if entries is not None and not isinstance(entries, Mapping):
            return f"metadata.{key} is not an object"
        for name, value in (entries or {}).items():
            if value is not None and not isinstance(value, str):
                return f"metadata.{key}[{name}] is {value!r}, not a string: put quotes around it"
    spec = pod.get("spec")
    if not isinstance(spec, Mapping):
        return "spec is not an object"
    for key in ("containers", "initContainers", "volumes"):
        entries = spec.get(key)
        if entries is not None and not isinstance(entries, list):
            return f"spec.{key} is not a list"
        for place, entry in enumerate(entries or ()):
            if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
                return f"spec.{key}[{place}] has no name"
    for place, container in enumerate(spec.get("containers") or ()):
        if problem := _shape_of_container(container):
            return f"spec.containers[{place}].{problem}"
    return ""


def _shape_of_container(container: Mapping[str, Any]) -> str:
    for key in ("command", "args"):
        words = container.get(key)
        if words is not None and not isinstance(words, list):
            return f"{key} is not a list"
        for place, word in enumerate(words or ()):
            if not isinstance(word, str):
                return f"{key}[{place}] is {word!r}, not a string: put quotes around it"
    for key, needed in (("env", "name"), ("volumeMounts", "mountPath")):
        entries = container.get(key)
        if entries is not None and not isinstance(entries, list):
            return f"{key} is not a list"
        for place, entry in enumerate(entries or ()):
            if not isinstance(entry, Mapping) or not isinstance(entry.get(needed), str):
                return f"{key}[{place}] has no {needed}"
    return ""
