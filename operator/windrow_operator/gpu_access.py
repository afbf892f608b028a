"""Choose how the sidecar's container gets at decode's GPU: pure functions over a pod's spec.

Never by asking the scheduler for anything: a device plugin's limit or a claim of its own would be a
second GPU. What the container gets is what decode's has: its claims, its variables, its pipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from windrow import rundir
from windrow.crd.harvestpolicy import SharingMode, SidecarSpec
from windrow_operator.model import Refusal

Body = dict[str, Any]
Way = Literal["none", "dra", "env", "mps"]

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
# What decode says of its devices, and what of them holds for the sidecar as well.
_VISIBILITY = (VISIBLE, CUDA_VISIBLE, CAPABILITIES)
# Extended resources that are GPUs or slices of them: nvidia.com/gpu, nvidia.com/mig-1g.10gb.
_GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
# GPUs and accelerators of other makers, which no worker can use.
_OTHERS = ("amd.com/gpu", "gpu.intel.com/", "huawei.com/", "habana.ai/", "aws.amazon.com/neuron")
_NO_DEVICE = frozenset({"", "void", "none"})


@dataclass(frozen=True, slots=True)
class GpuAccess:
    """Way in which the sidecar's container gets at decode's GPU.

    Attributes:
        way: `none`: it gets nothing.
        why: in words.
        claims: of its resources, decode's own.
        env: variables, decode's own where decode has them.
        mounts: of volumes that decode mounts.
        lacks: who must do what before a worker can use decode's GPU; empty: nothing.
    """

    way: Way
    why: str
    claims: tuple[Body, ...] = ()
    env: tuple[Body, ...] = ()
    mounts: tuple[Body, ...] = ()
    lacks: str = ""


def as_one(decoders: Sequence[Body]) -> Body:
    """Return the containers that decode in a pod as one: what its sidecar is to see is all of it.

    Which of a node's GPUs each one has is no matter: the agent learns it from their engines.
    """
    first, *others = decoders
    if not others:
        return first
    limits: Body = {}
    claims: list[Body] = []
    for each in decoders:
        limits |= (each.get("resources") or {}).get("limits") or {}
        claims += [claim for claim in _claims(each) if claim not in claims]
    said = [list(each.get("env") or ()) for each in decoders]
    env = [entry for entry in said[0] if all(entry in rest for rest in said)]
    values = [_variable(each, VISIBLE).get("value", "") for each in decoders]
    if len(set(values)) > 1 and not _NO_DEVICE.intersection(values):
        env.append({"name": VISIBLE, "value": ",".join(values)})
    name = ", ".join(str(each["name"]) for each in decoders)
    return first | {"name": name, "resources": {"limits": limits, "claims": claims}, "env": env}


def choose_access(
    decoder: Mapping[str, Any], asked: SidecarSpec, sharing: SharingMode = "auto"
) -> GpuAccess:
    """Return how the sidecar of a pod whose container `decoder` decodes gets at its GPU.

    `sharing`: of the GPU, as the pod's policy asks for it.

    Raises:
        Refusal: the policy names a way that this pod does not have.
    """
    if asked.gpu_access == "dra":
        return _by_claims(decoder, asked)
    if asked.gpu_access == "env":
        return _by_variables(decoder, "the policy says so")
    if asked.gpu_access == "mps":
        return _by_daemon(decoder, "the policy says so")
    return _best(decoder, asked, sharing)


def _best(decoder: Mapping[str, Any], asked: SidecarSpec, sharing: SharingMode) -> GpuAccess:
    """Return the access that needs no permission: it shows the sidecar no more than decode has."""
    name, claims, resource = decoder["name"], _claims(decoder), _gpu_resource(decoder)
    if sharing != "temporal" and _pipes(decoder):
        return _by_daemon(decoder, f"container {name} is a client of a daemon of the node")
    if claims and not resource:
        if asked.form == "sidecar":
            return _by_claims(decoder, asked)
        return GpuAccess(
            "none",
            f"container {name} has claims, and an ephemeral container can hold none",
            lacks=f"the GPU of claims {_named(claims)} stays decode's alone: let the policy say "
            "sidecar.form: sidecar, or on nodes of one tenant sidecar.gpuAccess: env",
        )
    if _names_devices(decoder):
        return _by_variables(decoder, f"container {name} names its devices by {VISIBLE}")
    if resource:
        return GpuAccess(
            "none",
            f"a device plugin gives {resource} to container {name} alone",
            lacks="the sidecar sees that GPU only where its image or the node's container runtime "
            "shows it: on nodes of one tenant let the policy say sidecar.gpuAccess: env",
        )
    if other := other_gpu(decoder):
        return GpuAccess("none", f"container {name} has {other}, and workers use NVIDIA's GPUs")
    return GpuAccess("none", f"container {name} asks for no GPU")


def other_gpu(decoder: Mapping[str, Any]) -> str:
    """Return the resource by which a container has another maker's GPU; empty: it has none."""
    limits = (decoder.get("resources") or {}).get("limits") or {}
    return next((str(name) for name in limits if str(name).startswith(_OTHERS)), "")


def _by_claims(decoder: Mapping[str, Any], asked: SidecarSpec) -> GpuAccess:
    name, claims = decoder["name"], _claims(decoder)
    if not claims:
        raise Refusal(
            "NoClaims",
            f"the policy says sidecar.gpuAccess: dra, and container {name} has no resources.claims "
            "to share: give decode its GPU by a ResourceClaim, or let the policy say auto",
        )
    if asked.form != "sidecar":
        raise Refusal(
            "ClaimsNeedSidecar",
            "the policy says sidecar.gpuAccess: dra, and an ephemeral container can hold no "
            "claims: let it say sidecar.form: sidecar, too",
        )
    shared = tuple(dict(claim) for claim in claims)
    return GpuAccess("dra", f"it shares claims {_named(claims)} of container {name}", shared)


def _by_variables(decoder: Mapping[str, Any], why: str) -> GpuAccess:
    """Visible devices by the container runtime's variables, as decode has them."""
    env = _taken_over(decoder, _VISIBILITY)
    if not _names_devices(decoder):
        # At admission nobody knows which GPU decode will have: the agent learns it from decode,
        # and shows its workers that one alone.
        env = [entry for entry in env if entry["name"] not in (VISIBLE, CUDA_VISIBLE)]
        env.append({"name": VISIBLE, "value": "all"})
    if all(entry["name"] != CAPABILITIES for entry in env):
        env.append({"name": CAPABILITIES, "value": "compute,utility"})
    env.append({"name": rundir.ENV_GPU_ACCESS, "value": "env"})
    return GpuAccess("env", why, env=tuple(env))


def _by_daemon(decoder: Mapping[str, Any], why: str) -> GpuAccess:
    """A client of the MPS daemon that the node runs for everybody: decode's pipes, and its IPC."""
    pipes = _pipes(decoder)
    if not pipes:
        raise Refusal(
            "NoMpsPipes",
            f"the policy says sidecar.gpuAccess: mps, and container {decoder['name']} has no "
            f"{PIPE_DIRECTORY} on a volume that it mounts: make decode a client of the node's "
            "daemon, or let the policy say auto",
        )
    visible = _by_variables(decoder, why)
    env = [entry for entry in visible.env if entry["name"] != rundir.ENV_GPU_ACCESS]
    env += _taken_over(decoder, (PIPE_DIRECTORY,))
    env.append({"name": rundir.ENV_GPU_ACCESS, "value": "mps"})
    # hostIPC is the pod's, so both containers have it or neither.
    return GpuAccess("mps", why, env=tuple(env), mounts=(pipes,))


def _claims(decoder: Mapping[str, Any]) -> list[Body]:
    return list((decoder.get("resources") or {}).get("claims") or ())


def _named(claims: list[Body]) -> str:
    return ", ".join(
        f"{claim['name']}/{claim['request']}" if claim.get("request") else str(claim["name"])
        for claim in claims
    )


def _gpu_resource(decoder: Mapping[str, Any]) -> str:
    limits = (decoder.get("resources") or {}).get("limits") or {}
    return next((name for name in limits if str(name).startswith(_GPU_RESOURCES)), "")


def _variable(decoder: Mapping[str, Any], name: str) -> Body:
    return next((entry for entry in decoder.get("env") or () if entry["name"] == name), {})


def _taken_over(decoder: Mapping[str, Any], names: tuple[str, ...]) -> list[Body]:
    return [dict(entry) for name in names if (entry := _variable(decoder, name))]


def _names_devices(decoder: Mapping[str, Any]) -> bool:
    said = _variable(decoder, VISIBLE)
    return bool(said.get("valueFrom")) or said.get("value", "") not in _NO_DEVICE


def _pipes(decoder: Mapping[str, Any]) -> Body:
    """Return decode's mount that holds the daemon's pipes; empty: it is a client of none."""
    folder = str(_variable(decoder, PIPE_DIRECTORY).get("value") or "").rstrip("/")
    for mount in decoder.get("volumeMounts") or ():
        path = mount["mountPath"].rstrip("/")
        # An ephemeral container may not mount a part of a volume.
        partial = mount.get("subPath") or mount.get("subPathExpr")
        if folder and not partial and f"{folder}/".startswith(f"{path}/"):
            return {"name": mount["name"], "mountPath": mount["mountPath"]}
    return {}
