"""Decide what a job may have of a HarvestPolicy: pure functions of both.

Two sides agree. A policy admits the jobs of its own namespace, or those that its selector means; a
job goes to policies of its own namespace, to those that it names, and to those of namespaces that
the administrator has marked as offering to all. What a job may reach then hangs on whether it is of
the policy's own namespace: it is the policy's namespace whose pod, network and credentials it uses.
A refusal names the field, what is allowed, and who can allow more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from windrow.access import NetworkAccess
from windrow.crd import FinetuneJobSpec, HarvestPolicySpec
from windrow.crd.harvestpolicy import NAMESPACE_FOLDER, VolumeSpec
from windrow.outputs import is_below, is_bucket, path_of
from windrow.proto import attach_pb2 as pb
from windrow_operator.model import CheckedPolicy, Job, key_of

_PORTS: Final = {"http": 80, "https": 443}
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


def closed_to(job: Job, policy: CheckedPolicy) -> str:
    """Return why `job` has nothing of `policy`, in words that follow a slot's name; "": it has."""
    named = job.spec.policies if job.spec else ()
    if named:
        if not _names(job.namespace, named, policy):
            return f"is under policy {policy.name}, which spec.policies does not name"
    elif policy.namespace != job.namespace and not policy.offered:
        return (
            f"is under policy {policy.name} of another namespace, which the job has to name in "
            "spec.policies"
        )
    if policy.spec is None or admits(policy, job):
        return ""
    return f"is closed to namespace {job.namespace} by policy {policy.name}"


def admits(policy: CheckedPolicy, job: Job) -> bool:
    """Return whether the valid `policy` admits `job` by its namespace."""
    return policy.spec is not None and policy.spec.access.admits(
        policy.namespace, job.namespace, job.namespace_labels
    )


def _names(namespace: str, named: Iterable[str], policy: CheckedPolicy) -> bool:
    return any(policy.key == (name if "/" in name else key_of(namespace, name)) for name in named)


def may_run_under(
    policy: CheckedPolicy, namespace: str, labels: Mapping[str, str], named: Sequence[str]
) -> bool:
    """Return whether a job may run under the policy, by what both sides say.

    Args:
        policy: the policy.
        namespace: of the job.
        labels: of that namespace.
        named: `spec.policies` of the job.
    """
    own = policy.namespace == namespace
    wanted = _names(namespace, named, policy) if named else own or policy.offered
    spec = policy.spec
    return wanted and spec is not None and spec.access.admits(policy.namespace, namespace, labels)


def class_refusal(job: Job, policy: CheckedPolicy) -> str:
    """Return why the policy does not take a job of this PriorityClass; "": it does."""
    honoured = policy.spec.access.priority_classes if policy.spec else None
    name = job.spec.priority_class_name if job.spec else None
    if honoured is None or name is None or name in honoured:
        return ""
    classes = ", ".join(honoured) or "none"
    return (
        f"does not take PriorityClass {name} (spec.priorityClassName): policy {policy.name} lists "
        f"{classes} in access.priorityClasses"
    )


# --- volumes --------------------------------------------------------------------------------------


def tree_of(policy: CheckedPolicy, volume: VolumeSpec, namespace: str = NAMESPACE_FOLDER) -> str:
    """Return the directory of a volume of the policy to which jobs of `namespace` are confined.

    Without one it is that of every namespace, with `{namespace}` for its name.
    """
    assert policy.spec is not None
    spec = policy.spec
    shared = spec.access.admits_others(policy.namespace)
    if volume.folder is None and volume.read_only and shared:
        # What one volume keeps apart is not read through another one of the same directory.
        apart = any(_overlap(volume, other) for other in spec.sidecar.volumes)
        return volume.model_copy(update={"read_only": not apart}).tree_of(namespace, shared=True)
    return volume.tree_of(namespace, shared=shared)


def _overlap(volume: VolumeSpec, other: VolumeSpec) -> bool:
    if other.read_only or other.folder == "":
        return False
    if volume.persistent_volume_claim is not None:
        return volume.persistent_volume_claim == other.persistent_volume_claim
    one, two = (v.host_path.path if v.host_path else "" for v in (volume, other))
    return bool(one and two) and (is_below([one], two) or is_below([two], one))


def with_namespace(trees: tuple[str, ...], namespace: str) -> tuple[str, ...]:
    """Return the directories that jobs of `namespace` may write, of those of all namespaces."""
    return tuple(tree.replace(NAMESPACE_FOLDER, namespace) for tree in trees)


# --- what a job names -----------------------------------------------------------------------------


def reach_refusal(job: Job, policy: CheckedPolicy, *, serves_model: bool) -> str:
    """Return why a job may not reach what it names, in words that follow a slot's name.

    Args:
        job: whose namespace the policy admits.
        policy: of the slot.
        serves_model: whether decode serves the job's model: it is read where decode reads it.
    """
    if job.spec is None or policy.spec is None:
        return ""
    return (
        _credentials_refusal(job, policy, job.spec, policy.spec)
        or _folder_refusal(job, policy, job.spec, policy.spec, serves_model=serves_model)
        or _host_refusal(job, policy, job.spec)
        or _arrival_refusal(policy, job.spec, policy.spec)
    )


def _arrival_refusal(policy: CheckedPolicy, spec: FinetuneJobSpec, terms: HarvestPolicySpec) -> str:
    """Return why the policy's servers could not load what the job is to deploy."""
    deploys = spec.output.deploy.enabled and terms.access.adapters
    if not deploys or terms.sidecar.adapter_cache or not is_bucket(spec.output.destination):
        return ""
    return (
        f"loads no adapter from {spec.output.destination} (output.deploy): policy {policy.name} "
        "names no volume for copies (sidecar.adapterCache). Write to a volume that servers mount, "
        "or leave out deploy"
    )


def _may_use_pod_credentials(job: Job, policy: CheckedPolicy) -> bool:
    said = policy.spec.access.pod_credentials if policy.spec else None
    return said if said is not None else job.namespace == policy.namespace


def _credentials_refusal(
    job: Job, policy: CheckedPolicy, spec: FinetuneJobSpec, terms: HarvestPolicySpec
) -> str:
    if _may_use_pod_credentials(job, policy):
        return ""
    for field, place, secret in (
        *((field, place, spec.dataset.secret_ref) for field, place in spec.dataset.sources),
        ("output.destination", spec.output.destination, spec.output.secret_ref),
        # A bucket of spec.checkpoint.resumeFrom comes with a destination in one.
    ):
        if is_bucket(place) and secret is None:
            whom = "nobody" if terms.access.pod_credentials is False else "its own namespace only"
            return (
                f"gives spec.{field} no credentials: policy {policy.name} lends those of the pod "
                f"to {whom}. Name a Secret in spec.{field.partition('.')[0]}.secretRef; who keeps "
                "the policy can set access.podCredentials"
            )
    return ""


def _folder_refusal(
    job: Job,
    policy: CheckedPolicy,
    spec: FinetuneJobSpec,
    terms: HarvestPolicySpec,
    *,
    serves_model: bool,
) -> str:
    named = [*spec.dataset.sources]
    if spec.adapter.start_from is not None:
        named.append(("adapter.from", spec.adapter.start_from))
    if not serves_model:
        named.append(("model.name", spec.model.name))
    begins_at = spec.checkpoint.resume_from
    if begins_at is not None and not job.status.get("checkpoint"):
        named.append(("checkpoint.resumeFrom", begins_at))
    for field, place in named:
        path = path_of(place)
        around = [v for v in terms.sidecar.volumes if is_below([v.mount_path], path)]
        if is_bucket(place) or not path.startswith("/"):
            continue
        if not around:
            if place is begins_at:
                return (
                    f"cannot read spec.{field} {place}: it is on no volume of policy {policy.name} "
                    "(sidecar.volumes)"
                )
            continue
        tree = tree_of(policy, max(around, key=lambda v: len(v.mount_path)), job.namespace)
        if not is_below([tree], path):
            return (
                f"cannot read spec.{field} {place}: the folder of namespace {job.namespace} there "
                f"is {tree}, by policy {policy.name} (sidecar.volumes, folder)"
            )
    return ""


def _host_refusal(job: Job, policy: CheckedPolicy, spec: FinetuneJobSpec) -> str:
    for field, place in spec.dataset.sources:
        parts = urlsplit(place)
        if parts.scheme not in _PORTS:
            continue
        try:
            port = parts.port or _PORTS[parts.scheme]
        except ValueError:
            return f"cannot read spec.{field} {place}: its port is not a number"
        refusal = network_access(job, policy).host_refusal(parts.hostname or "", port)
        if refusal:
            return f"cannot read spec.{field}: {refusal}"
    return ""


def network_access(job: Job, policy: CheckedPolicy) -> NetworkAccess:
    """Return which hosts the job may reach."""
    sources = policy.spec.access.sources if policy.spec else None
    listed = None if sources is None else tuple(sources)
    return NetworkAccess(listed, private=job.namespace == policy.namespace)


def endpoint_refusal(job: Job, policy: CheckedPolicy, secret: Mapping[str, str]) -> str:
    """Return why an endpoint that a Secret names may not be reached; "": it may.

    One of another namespace than the policy's has to be listed: it is reached from the policy's
    network.
    """
    own = job.namespace == policy.namespace
    access = network_access(job, policy)
    if access.sources is None and not own:
        access = NetworkAccess(())
    for key in _ENDPOINTS:
        if not (url := secret.get(key)):
            continue
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443)
        except ValueError:
            return f"{key} of the Secret is not a URL"
        if refusal := access.host_refusal(host, port):
            return f"{key} of the Secret: {refusal}"
    return ""


def access_of(
    job: Job, policy: CheckedPolicy | None, *, serves_model: bool = False
) -> pb.Access | None:
    """Return what the job may reach, for its sidecar; None: no valid policy says."""
    if policy is None or policy.spec is None:
        return None
    network, preparation = network_access(job, policy), policy.spec.access.preparation
    volumes = policy.spec.sidecar.volumes
    trees = [tree_of(policy, volume, job.namespace) for volume in volumes]
    if serves_model and job.spec is not None and job.spec.model.name.startswith("/"):
        trees.append(path_of(job.spec.model.name))  # it is read where decode reads it
    return pb.Access(
        readable_trees=trees,
        lists_sources=network.sources is not None,
        sources=network.sources or (),
        private_sources=network.private,
        pod_credentials=_may_use_pod_credentials(job, policy),
        shares_worker=policy.spec.access.share_workers,
        serves_model=serves_model,
        preparation_seconds=preparation.total_seconds() if preparation else 0.0,
    )


def mounts_of(policy: CheckedPolicy | None) -> Iterator[str]:
    """Yield where the policy's volumes are mounted that jobs may write to."""
    for volume in policy.spec.sidecar.volumes if policy and policy.spec else ():
        if not volume.read_only:
            yield volume.mount_path
