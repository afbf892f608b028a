"""Compute what the webhook adds to a decode pod: pure functions over pod objects.

A pod that nobody asked for is never touched, and preparing a pod twice changes nothing. There are
two forms. In the form `attach` a pod gets at creation only what cannot fail (a volume in memory, a
projected token, variables for the engine), and the sidecar comes later as an ephemeral container.
In the form `sidecar` the native sidecar is part of the pod from its creation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from windrow import rundir
from windrow.crd import (
    ANNOTATION_GPU_ACCESS,
    ANNOTATION_INJECTED_BY,
    ANNOTATION_METRICS_PORT,
    LABEL_DECODE,
    LABEL_INJECT,
    SIDECAR_CONTAINER,
)
from windrow.crd.harvestpolicy import SharingMode, SidecarSpec, VolumeSpec
from windrow.sglang import own_rendering
from windrow_operator.decode_pods import (
    CHAT_TEMPLATE,
    CONFIG,
    MODEL_OPTIONS,
    REQUESTED,
    RUN_VOLUME,
    TEMPLATE_NAME,
    TEMPLATE_SETTINGS,
    TOOL_PARSER,
    annotations_of,
    containers_of,
    decoder_of,
    decoders_of,
    find_decoders,
    matching_rule,
    model_of,
    part_in_doubt,
    runs_builtin,
    serving_option,
)
from windrow_operator.engine_evidence import SGLANG, engine_of
from windrow_operator.gpu_access import GpuAccess, as_one, choose_access
from windrow_operator.model import Refusal
from windrow_operator.surroundings import Surroundings, is_of_modelscope, surroundings_of

# The run volume holds sockets, notes, the jobs' logs. It counts against the pod's memory.
RUN_VOLUME_SIZE = "256Mi"
TOKEN_VOLUME = "windrow-token"
TOKEN_DIR = "/var/run/secrets/windrow.dev"
TOKEN_FILE = "token"
# Beside the token, re-read when it changes: the authorities of the operator.
TRUST_CONFIG_MAP = "windrow-operator-ca"
TRUST_FILE = "ca.crt"
# What pods of the namespace have measured of kinds of decode, for engines to start from.
PROFILES_VOLUME = "windrow-profiles"
PROFILES_DIR = "/run/windrow-profiles"
PROFILES_CONFIG_MAP = "windrow-latency-profiles"
# The kubelet renews it long before; an hour bounds what a stolen one is worth.
TOKEN_SECONDS = 3600
# As the operator's image: the sidecar runs in decode's own, which holds this package.
DECODE_IMAGE = "decode"
LABEL_POD_SECURITY = "pod-security.kubernetes.io/enforce"
# Volumes that do not keep Cluster Autoscaler from removing a node, by name.
ANNOTATION_SAFE_VOLUMES = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"

Body = dict[str, Any]
Patch = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SidecarTemplate:
    """Part that is the same in every sidecar.

    Attributes:
        operator_address: host:port of the Attach service.
        operator_ca: PEM of the authorities to trust, until the pod has its file of them.
        image: of the sidecar; `decode` means the image of the pod's decode container.
        cpu: request and limit of a native sidecar; an ephemeral container can have neither.
        memory: likewise.
    """

    operator_address: str
    operator_ca: str
    image: str = DECODE_IMAGE
    command: tuple[str, ...] = ("python", "-m", "windrow_sidecar.agent")
    metrics_port: int = 0
    cpu: str = "1"
    memory: str = "4Gi"


# --- at creation ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PodNamespace:
    """Objects that a pod under creation finds in its namespace.

    Attributes:
        labels: of the namespace.
        shared_claims: claims that are bound and can be mounted on several nodes at once.
    """

    labels: Mapping[str, str]
    shared_claims: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Injection:
    """Change to a pod at its creation.

    Attributes:
        rule: by which it decodes.
        form: attach or sidecar.
        patch: JSON patch (RFC 6902); empty: nothing is left to do.
        gpu: how the sidecar gets at decode's GPU.
        warnings: what the pod does not get, in sentences.
        decoders: names of the containers that decode.
        evidence: why these, and why with an engine that Windrow can drive.
        notes: what a job beside this decode should know, in sentences.
    """

    rule: str
    form: str
    patch: Patch
    gpu: GpuAccess
    warnings: tuple[str, ...] = ()
    decoders: tuple[str, ...] = ()
    evidence: str = ""
    notes: tuple[str, ...] = ()

    @property
    def said(self) -> tuple[str, ...]:
        """Messages to its creator."""
        return (*self.warnings, self.gpu.lacks) if self.gpu.lacks else self.warnings


def inject(
    pod: Mapping[str, Any],
    template: SidecarTemplate,
    sidecar: SidecarSpec | None,
    around: PodNamespace,
    sharing: SharingMode = "auto",
) -> Injection | None:
    """Return how `pod` becomes harvestable; None: it is left alone, since nobody asked for it.

    Args:
        pod: the pod under creation.
        template: what is the same in every sidecar.
        sidecar: of the policy that selects the pod; None: no policy does.
        around: what is known of its namespace.
        sharing: of the GPU, as that policy asks for it.

    Raises:
        Refusal: it was asked for, and the pod cannot have it.
    """
    rule = matching_rule(pod)
    if not rule or not containers_of(pod) or (sidecar is None and rule != REQUESTED):
        return None
    asked = sidecar or SidecarSpec()
    wanted = without_nulls(pod)
    spec, found = wanted["spec"], find_decoders(wanted)
    decoders = list(found.containers)
    for decoder in decoders:
        _require_drivable(decoder, rule)
    if doubt := found.doubt or part_in_doubt(wanted):
        raise Refusal("DecoderInDoubt", f"the pod decodes by rule `{rule}`, but {doubt}")
    for decoder in decoders:
        _require_free_place(decoder)
    volumes, warnings = _mountable(asked.volumes, around)
    gpu = choose_access(as_one(decoders), asked, sharing)
    _mark(wanted, rule, asked.metrics_port or template.metrics_port, gpu, volumes)
    _add_volumes(spec, volumes)
    for decoder in decoders:
        _prepare_decoder(decoder, sharing)
    if asked.form == "sidecar":
        native = _native_sidecar(template, wanted, asked, sharing)
        # Last: what fetches a model or waits for the network is not held up.
        _merge(spec.setdefault("initContainers", []), native)
    return Injection(
        rule,
        asked.form,
        _difference(pod, wanted),
        gpu,
        warnings,
        decoders=tuple(str(decoder["name"]) for decoder in decoders),
        evidence=f"{found.why}; engine {SGLANG}, by {engine_of(decoders[0]).why}",
        notes=_notes_on(decoders[0], asked),
    )


def without_nulls(body: Mapping[str, Any]) -> Body:
    """Return a deep copy without what is null: the API server takes null for a field left out."""
    copied: Body = _without_nulls(body)
    return copied


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - of JSON
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(part) for part in value if part is not None]
    return value


def _require_drivable(decoder: Mapping[str, Any], rule: str) -> None:
    engine = engine_of(decoder)
    if engine.name != SGLANG:
        raise Refusal(
            "OtherEngine",
            f"the pod decodes by rule `{rule}`, with {engine.name}, which Windrow cannot drive",
        )
    # A label on the pod itself is deliberate.
    if engine.doubt and rule != REQUESTED:
        raise Refusal(
            "EngineInDoubt",
            f"the pod decodes by rule `{rule}`, but {engine.doubt}: if it is SGLang, label the pod "
            f"{LABEL_INJECT}: enabled",
        )


def _notes_on(decoder: Mapping[str, Any], asked: SidecarSpec) -> tuple[str, ...]:
    """Return what the sidecar will not see of the model that decode serves."""
    return (*_note_on_model(decoder, asked), *_notes_on_chats(decoder))


def _notes_on_chats(decoder: Mapping[str, Any]) -> Iterator[str]:
    """Yield how decode writes chats otherwise than jobs do, which use the template of the model."""
    if runs_builtin(decoder):  # which serves completions alone
        return
    model, template = model_of(decoder), serving_option(decoder, CHAT_TEMPLATE)
    parser = serving_option(decoder, TOOL_PARSER)
    if template and template != f"{model}/chat_template.jinja":
        yield (
            f"decode serves chats with {CHAT_TEMPLATE} {template}, and jobs render their rows with "
            "the template in the model's folder: put the same there (chat_template.jinja)"
        )
    elif why := own_rendering("" if template else model, parser=parser):
        yield (
            f"{why}, and jobs render their rows with the template in the model's folder: adapters "
            f"learn other tokens than decode sends. Give {CHAT_TEMPLATE}, serve the model from "
            "another path, or render rows for completions"
        )
    if settings := serving_option(decoder, TEMPLATE_SETTINGS):
        yield (
            f"decode gives the chat template {TEMPLATE_SETTINGS} {settings}, and jobs give it what "
            "their rows say: write the same into `chat_template_kwargs` of each row"
        )
    if name := serving_option(decoder, TEMPLATE_NAME):
        yield (
            f"decode serves chats with the template of the name {name}, and jobs render their rows "
            "with the one named `default`: give it that name in the model's folder"
        )


def _note_on_model(decoder: Mapping[str, Any], asked: SidecarSpec) -> tuple[str, ...]:
    written = serving_option(decoder, *MODEL_OPTIONS)
    model = model_of(decoder)
    if not written and (file := serving_option(decoder, CONFIG)):
        return (
            f"the server's options are in {file}, which is not in the pod's spec: jobs find this "
            "decode by what its engine reports, and the sidecar mounts no model of decode's. Write "
            "--model-path beside it",
        )
    if not written and not model:
        return (
            "the command line names no model (--model-path): jobs find this decode by what its "
            "engine reports, and the sidecar mounts no model of decode's",
        )
    if not model:
        return (
            f"the model is {written}, and the pod's spec does not hold the value: the sidecar "
            "mounts no model of decode's, and output.deploy does not find this pod. Give the "
            "variable by env with a value, or write the path",
        )
    if model.startswith((".", "~")):
        return (
            f"the model {model} is a path in a folder that the pod's spec does not name: the "
            "sidecar mounts no model of decode's. Write the path from the root",
        )
    if "://" in model or is_of_modelscope(decoder):
        return (
            f"decode fetches the model {model} from a place that is not the Hub, which the sidecar "
            "does not read: have decode serve a folder on a volume",
        )
    if model.startswith("/"):
        covering = _covering(decoder, model)
        if covering is not None and _is_partial(covering) and asked.form == "attach":
            return (
                f"the model {model} is on a part of volume {covering['name']} (subPath), which an "
                "ephemeral container cannot mount: use sidecar.form: sidecar, or mount the volume "
                "as a whole",
            )
        return ()
    around = surroundings_of(decoder)
    covering = _covering(decoder, around.cache) if around.cache else None
    if covering is None or (_is_partial(covering) and asked.form == "attach"):
        return (
            f"the model {model} comes from the Hub, and no volume holds decode's cache of it: the "
            "sidecar fetches it again, into its own file system",
        )
    return ()


def _require_free_place(decoder: Mapping[str, Any]) -> None:
    ours = {str(rundir.DEFAULT_RUN_DIR): RUN_VOLUME, PROFILES_DIR: PROFILES_VOLUME}
    for mount in decoder.get("volumeMounts") or ():
        place = mount["mountPath"].rstrip("/")
        if mount["name"] != ours.get(place, mount["name"]):
            raise Refusal(
                "PlaceTaken",
                f"container {decoder['name']} mounts its own volume {mount['name']} at {place}",
            )


def _mountable(
    volumes: Iterable[VolumeSpec], around: PodNamespace
) -> tuple[list[VolumeSpec], tuple[str, ...]]:
    """Return the policy's volumes that cannot keep a pod from starting, and what is left out."""
    taken, warnings = [], []
    for volume in volumes:
        if why := _harm_of(volume, around):
            warnings.append(f"volume {volume.name} of the policy is not mounted: {why}")
        else:
            taken.append(volume)
    return taken, tuple(warnings)


def _harm_of(volume: VolumeSpec, around: PodNamespace) -> str:
    claim = volume.persistent_volume_claim
    if claim is not None and claim.claim_name not in around.shared_claims:
        return (
            f"claim {claim.claim_name} is not bound with access mode ReadWriteMany or "
            "ReadOnlyMany, so it could keep decode pods from being scheduled"
        )
    if volume.host_path is not None and around.labels.get(LABEL_POD_SECURITY) != "privileged":
        return (
            "a directory of the node needs a namespace with the label "
            f"{LABEL_POD_SECURITY}: privileged"
        )
    return ""


def _mark(
    pod: Body, rule: str, metrics_port: int, gpu: GpuAccess, volumes: Iterable[VolumeSpec]
) -> None:
    metadata = pod.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), LABEL_DECODE: "true"}
    annotations = metadata.get("annotations") or {}
    metadata["annotations"] = {ANNOTATION_INJECTED_BY: rule, **annotations}
    if gpu.way != "none" or gpu.lacks:
        metadata["annotations"].setdefault(ANNOTATION_GPU_ACCESS, f"{gpu.way}: {gpu.why}")
    if metrics_port:
        metadata["annotations"].setdefault(ANNOTATION_METRICS_PORT, str(metrics_port))
    # Nothing of them is lost with the node: they keep none from being removed.
    local = [RUN_VOLUME, *(volume_name(each) for each in volumes if each.host_path is not None)]
    said = [name for name in annotations.get(ANNOTATION_SAFE_VOLUMES, "").split(",") if name]
    safe = ",".join(dict.fromkeys([*said, *local]))
    metadata["annotations"][ANNOTATION_SAFE_VOLUMES] = safe


def _add_volumes(spec: Body, volumes: Iterable[VolumeSpec]) -> None:
    wanted = spec.setdefault("volumes", [])
    in_memory = {"medium": "Memory", "sizeLimit": RUN_VOLUME_SIZE}
    _merge(wanted, {"name": RUN_VOLUME, "emptyDir": in_memory})
    token = {
        "audience": rundir.TOKEN_AUDIENCE,
        "expirationSeconds": TOKEN_SECONDS,
        "path": TOKEN_FILE,
    }
    # Optional: a ConfigMap that is not there yet keeps no pod from starting.
    items = [{"key": TRUST_FILE, "path": TRUST_FILE}]
    trust = {"name": TRUST_CONFIG_MAP, "optional": True, "items": items}
    projected = {"sources": [{"serviceAccountToken": token}, {"configMap": trust}]}
    _merge(wanted, {"name": TOKEN_VOLUME, "projected": projected})
    profiles = {"name": PROFILES_CONFIG_MAP, "optional": True}
    _merge(wanted, {"name": PROFILES_VOLUME, "configMap": profiles})
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


def _prepare_decoder(container: Body, sharing: SharingMode) -> None:
    mounts = container.setdefault("volumeMounts", [])
    _merge(mounts, {"name": RUN_VOLUME, "mountPath": str(rundir.DEFAULT_RUN_DIR)})
    _merge(mounts, {"name": PROFILES_VOLUME, "mountPath": PROFILES_DIR, "readOnly": True})
    env = container.setdefault("env", [])
    _merge(env, {"name": rundir.ENV_RUN_DIR, "value": str(rundir.DEFAULT_RUN_DIR)})
    _merge(env, {"name": rundir.ENV_STORED_PROFILES, "value": PROFILES_DIR})
    _merge(env, _field(rundir.ENV_POD_NAME, "metadata.name"))
    _merge(env, {"name": rundir.ENV_SHARING, "value": sharing})


# --- the sidecar, in both forms -------------------------------------------------------------------


def _native_sidecar(
    template: SidecarTemplate, pod: Body, asked: SidecarSpec, sharing: SharingMode
) -> Body:
    """Return the native sidecar: an init container that stays.

    It has no startup probe: the kubelet would hold decode back until that succeeds.
    """
    container = _sidecar(template, pod, asked, sharing) | {
        "name": SIDECAR_CONTAINER,
        "restartPolicy": "Always",
    }
    if qos_of(pod["spec"]) != "BestEffort":
        amounts = {"cpu": template.cpu, "memory": template.memory}
        container["resources"] = {"requests": amounts, "limits": dict(amounts)}
    if claims := choose_access(as_one(decoders_of(pod)), asked, sharing).claims:
        container.setdefault("resources", {})["claims"] = list(claims)
    if port := _metrics_port(pod):
        container["ports"] = [{"name": "windrow-metrics", "containerPort": port}]
    return container


def _metrics_port(pod: Mapping[str, Any]) -> int:
    """Return the port that a pod tells Prometheus; 0: none, and the sidecar takes any free one."""
    said = annotations_of(pod).get(ANNOTATION_METRICS_PORT, "")
    return int(said) if said.isdecimal() and int(said) < 65536 else 0


def attached_sidecar(
    template: SidecarTemplate,
    pod: Mapping[str, Any],
    asked: SidecarSpec,
    sharing: SharingMode = "auto",
) -> Body:
    """Return the ephemeral container that a prepared, running `pod` gets next.

    `sharing`: of the GPU, as the pod's policy asks for it.

    Raises:
        Refusal: it cannot run as the user that decode runs as.
    """
    earlier = attached_sidecars(pod["spec"])
    number = _number(earlier[-1]) + 1 if earlier else 1
    return _sidecar(template, pod, asked, sharing) | {
        "name": f"{SIDECAR_CONTAINER}-{number}",
        "targetContainerName": decoder_of(pod)["name"],
    }


def attached_sidecars(spec: Mapping[str, Any]) -> list[str]:
    """Return the names of the ephemeral containers that are sidecars, the newest last."""
    # The API server keeps them in no order of time.
    names = [container["name"] for container in spec.get("ephemeralContainers") or ()]
    return sorted((name for name in names if _number(name)), key=_number)


def _number(name: str) -> int:
    head, _, number = name.rpartition("-")
    return int(number) if head == SIDECAR_CONTAINER and number.isdigit() else 0


def _sidecar(
    template: SidecarTemplate, pod: Mapping[str, Any], asked: SidecarSpec, sharing: SharingMode
) -> Body:
    decoder = decoder_of(pod)
    own_image = template.image == DECODE_IMAGE
    env: list[Body] = [
        {"name": rundir.ENV_RUN_DIR, "value": str(rundir.DEFAULT_RUN_DIR)},
        {"name": rundir.ENV_OPERATOR_ADDRESS, "value": template.operator_address},
        {"name": rundir.ENV_OPERATOR_CA, "value": template.operator_ca},
        {"name": rundir.ENV_OPERATOR_CA_FILE, "value": f"{TOKEN_DIR}/{TRUST_FILE}"},
        {"name": rundir.ENV_TOKEN_FILE, "value": f"{TOKEN_DIR}/{TOKEN_FILE}"},
        {"name": rundir.ENV_METRICS_PORT, "value": str(_metrics_port(pod))},
        _field(rundir.ENV_POD_NAMESPACE, "metadata.namespace"),
        _field(rundir.ENV_POD_NAME, "metadata.name"),
        _field(rundir.ENV_POD_UID, "metadata.uid"),
        _field(rundir.ENV_NODE_NAME, "spec.nodeName"),
    ]
    env.append({"name": rundir.ENV_SHARING, "value": sharing})
    if sharing == "temporal":  # for an agent that is older than this operator
        env.append({"name": rundir.ENV_MPS, "value": "off"})
    taken_over = (rundir.ENV_LOG_DIR, rundir.ENV_COPY_RATE, rundir.ENV_MPS_PRIORITY)
    env += [entry for entry in decoder.get("env") or () if entry["name"] in taken_over]
    gpu = choose_access(as_one(decoders_of(pod)), asked, sharing)
    env += gpu.env
    around = surroundings_of(decoder)
    env += around.env
    container: Body = {
        "image": decoder.get("image", "") if own_image else template.image,
        "command": list(template.command),
        "env": env,
        "volumeMounts": _mounts(pod, decoder, asked, gpu, around),
        "securityContext": _security_context(pod, decoder, own_image=own_image),
    }
    if own_image:
        for taken in ("imagePullPolicy", "workingDir"):
            if taken in decoder:
                container[taken] = decoder[taken]
    return container


def _mounts(
    pod: Mapping[str, Any],
    decoder: Mapping[str, Any],
    asked: SidecarSpec,
    gpu: GpuAccess,
    around: Surroundings,
) -> list[Body]:
    """Return the mounts: ours, the policy's, decode's /dev/shm and GPU, what it reads files of.

    The latter are its model, its cache of the Hub and its authorities.
    """
    there = {volume["name"] for volume in pod["spec"].get("volumes") or ()}
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
        for volume in asked.volumes
        if volume_name(volume) in there  # else it was left out when the pod was made
    ]
    ours = {mount["mountPath"].rstrip("/") for mount in mounts}
    mounts += [mount for mount in gpu.mounts if mount["mountPath"].rstrip("/") not in ours]
    taken = {mount["mountPath"].rstrip("/") for mount in mounts}
    read = [path for path in (model_of(decoder), *around.places) if path]
    for mount in decoder.get("volumeMounts") or ():
        path = mount["mountPath"].rstrip("/")
        # An ephemeral container may not mount a part of a volume.
        if path in taken or (_is_partial(mount) and asked.form == "attach"):
            continue
        if path == "/dev/shm":
            mounts.append({"name": mount["name"], "mountPath": path})
        elif path and any(_is_within(place, path) for place in read):
            part = {key: mount[key] for key in ("subPath",) if mount.get(key)}
            if not mount.get("subPathExpr"):
                mounts.append({"name": mount["name"], "mountPath": path, "readOnly": True} | part)
    return mounts


def _covering(container: Mapping[str, Any], path: str) -> Body | None:
    """Return the mount of a container on which `path` is; None: it is on none."""
    found = [
        mount
        for mount in container.get("volumeMounts") or ()
        if _is_within(path, mount["mountPath"].rstrip("/"))
    ]
    return max(found, key=lambda mount: len(mount["mountPath"]), default=None)


def _is_within(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _is_partial(mount: Mapping[str, Any]) -> bool:
    return bool(mount.get("subPath") or mount.get("subPathExpr"))


def _security_context(
    pod: Mapping[str, Any], decoder: Mapping[str, Any], *, own_image: bool
) -> Body:
    """Return what the strictest Pod Security level asks for, with decode's user and group."""
    context: Body = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    declared = {
        **(pod["spec"].get("securityContext") or {}),
        **(decoder.get("securityContext") or {}),
    }
    seen = _user_seen(pod, decoder["name"])
    for field, known in (("runAsUser", "uid"), ("runAsGroup", "gid")):
        value = declared.get(field, seen.get(known))
        if value is not None:
            context[field] = value
    if declared.get("runAsNonRoot"):
        context["runAsNonRoot"] = True
    if "runAsUser" not in context and not own_image:
        raise Refusal(
            "UserUnknown",
            f"container {decoder['name']} names no user, and the sidecar's image is not its own: "
            "set securityContext.runAsUser, so that both can use the same sockets",
        )
    return context


def _user_seen(pod: Mapping[str, Any], container: str) -> Mapping[str, int]:
    """Return the user that the container runtime reports for a running container."""
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if status["name"] == container:
            user: Mapping[str, int] = (status.get("user") or {}).get("linux") or {}
            return user
    return {}


def qos_of(spec: Mapping[str, Any]) -> str:
    """Return the QoS class of a pod that is not created yet, as the API server will compute it."""
    resources = [
        container.get("resources") or {}
        for container in [*(spec.get("initContainers") or ()), *spec["containers"]]
    ]
    if not any(entry.get("requests") or entry.get("limits") for entry in resources):
        return "BestEffort"
    for entry in resources:
        limits, requests = entry.get("limits") or {}, entry.get("requests") or {}
        for name in ("cpu", "memory"):
            if name not in limits or requests.get(name, limits[name]) != limits[name]:
                return "Burstable"
    return "Guaranteed"


def _field(name: str, path: str) -> Body:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _merge(entries: list[Body], entry: Body) -> None:
    """Add `entry` unless one of its name exists: existing entries are intended."""
    if all(other["name"] != entry["name"] for other in entries):
        entries.append(entry)


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
        old, new = (before.get(parent) or {}).get(leaf), after[parent].get(leaf)
        if _without_nulls(old) != new:
            operation = "add" if old is None else "replace"
            patch.append({"op": operation, "path": f"/{parent}/{leaf}", "value": new})
    return patch
