"""Find the HarvestPolicy that a decode pod is under, and what it allows at a moment."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from windrow.conditions import ConditionType as T
from windrow.conditions import Reason, Status, set_condition
from windrow.crd import ANNOTATION_POLICY, parse_policy_spec
from windrow.crd.harvestpolicy import VolumeSpec
from windrow.errors import UserError
from windrow.outputs import is_below, path_of
from windrow.proto import attach_pb2 as pb
from windrow_operator.model import CheckedPolicy, EffectivePolicy, Mount, Pod, Usage


def policy_of(body: Mapping[str, Any]) -> CheckedPolicy:
    """Return the checked policy of a HarvestPolicy object."""
    metadata = body["metadata"]
    try:
        spec, error = parse_policy_spec(body.get("spec") or {}), ""
    except UserError as caught:
        spec, error = None, str(caught)
    return CheckedPolicy(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        created=metadata.get("creationTimestamp", ""),
        spec=spec,
        error=error,
    )


def selects(policy: CheckedPolicy, pod: Pod) -> bool:
    """Return whether the valid `policy` means `pod`: by the pod's annotation, else by selector."""
    if policy.spec is None or policy.namespace != pod.namespace:
        return False
    named = pod.annotations.get(ANNOTATION_POLICY)
    if named:
        return named == policy.name
    return policy.spec.selector.matches(dict(pod.labels))


def select(pod: Pod, policies: Iterable[CheckedPolicy]) -> CheckedPolicy | None:
    """Return the policy that `pod` is under; of several the oldest: a new one moves no pod."""
    return min(
        (policy for policy in policies if selects(policy, pod)),
        key=lambda policy: (policy.created, policy.name),
        default=None,
    )


NOTHING_USED: Final = Usage()


def terms_of(policy: CheckedPolicy, now: datetime, usage: Usage = NOTHING_USED) -> EffectivePolicy:
    """Return what `policy` allows at `now`: its mode, unless a limit forbids it.

    `usage` is of today (UTC).
    """
    spec = policy.spec
    if spec is None:
        return EffectivePolicy(policy, "off", policy.error)
    if spec.mode != "harvest":
        return EffectivePolicy(policy, spec.mode, f"policy {policy.name} is in mode {spec.mode}")
    if not spec.open_at(now):
        hours = ", ".join(spec.limits.hours)
        return EffectivePolicy(policy, "off", f"policy {policy.name} allows it at {hours}")
    quota = spec.access.gpu_seconds_per_day
    if quota is not None and usage.seconds >= quota:
        return EffectivePolicy(
            policy, "off", f"policy {policy.name} has used its {quota} seconds of today"
        )
    share = spec.access.gpu_seconds_per_day_and_namespace
    spent = frozenset(
        namespace
        for namespace, seconds in usage.by_namespace.items()
        if share is not None and seconds >= share
    )
    return EffectivePolicy(policy, "harvest", spent=spent)


def places_of(
    destination: str, policies: Iterable[CheckedPolicy], mounts: Iterable[Mount] = ()
) -> frozenset[str]:
    """Return every name of the directory that a destination may be: two jobs with one may meet.

    That is where it is in a claim or on a node by the volumes of each policy: one claim may be
    mounted at two paths, and one path may be in the claims of two tenants. Where it is in none, it
    is the path itself.

    Args:
        destination: of a job.
        policies: as they are now, those that the job may run under.
        mounts: of the pod that the job runs in, which keeps what its policy once was.
    """
    path = path_of(destination)
    given = [[mount_of(policy, volume) for volume in _volumes(policy)] for policy in policies]
    names = (_place_in(tree, path) for tree in (*given, list(mounts)))
    return frozenset(name for name in names if name) or frozenset([path])


def _volumes(policy: CheckedPolicy) -> Iterable[VolumeSpec]:
    return policy.spec.sidecar.volumes if policy.spec else ()


def _place_in(mounts: Iterable[Mount], path: str) -> str:
    around = [mount for mount in mounts if is_below([mount.path], path)]
    if not around or not posixpath.isabs(path):
        return ""
    inner = max(around, key=lambda mount: len(mount.path))
    below = posixpath.relpath(path, inner.path)
    return posixpath.normpath(posixpath.join(inner.source, below)) if inner.source else ""


def mount_of(policy: CheckedPolicy, volume: VolumeSpec) -> Mount:
    """Return a volume as a sidecar has it; what it can only read has no source."""
    if volume.read_only:
        return Mount(volume.mount_path, "")
    claim, node = volume.persistent_volume_claim, volume.host_path
    source = source_of(
        policy.namespace, claim.claim_name if claim else None, node.path if node else None
    )
    return Mount(volume.mount_path, source)


def source_of(namespace: str, claim: str | None, node_path: str | None) -> str:
    """Return a name for what a volume mounts; no path of a destination begins like that."""
    if claim:
        return f"//claim:{namespace}/{claim}"
    return f"//node:{node_path}" if node_path else ""


def config_of(terms: EffectivePolicy | None) -> pb.PolicyConfig:
    """Return the message for the sidecar. Without a policy nothing is harvested."""
    if terms is None or terms.policy.spec is None:
        return pb.PolicyConfig(name="", mode="off")
    spec = terms.policy.spec
    deferral, first_token = spec.objective.deferral_bound, spec.objective.ttft
    return pb.PolicyConfig(
        name=terms.policy.name,
        policy=spec.policy,
        mode=terms.mode,
        objective_seconds=spec.objective.tpot.total_seconds(),
        percentile=spec.objective.percentile,
        scope=spec.objective.scope,
        max_compute_percent=spec.limits.max_sm_percent,
        max_memory_percent=spec.limits.max_memory_percent,
        generation=terms.policy.generation,
        deferral_seconds=deferral.total_seconds() if deferral else 0.0,
        lease_seconds=spec.lease.total_seconds(),
        first_token_seconds=first_token.total_seconds() if first_token else 0.0,
    )


@dataclass(frozen=True, slots=True)
class PolicyCounts:
    """Counts of what a policy has under it."""

    pods: int = 0
    slots: int = 0
    harvesting: int = 0
    refused: int = 0
    why_refused: str = ""  # of the first: its slot and the reason
    unprepared: str = ""  # workloads that are selected and not prepared, and what each lacks


def status_of(
    policy: CheckedPolicy,
    policy_counts: PolicyCounts,
    usage: Usage,
    held: Iterable[Mapping[str, Any]],
    now: datetime,
) -> dict[str, Any]:
    """Return the whole status of a policy.

    Args:
        policy: the policy.
        policy_counts: what is under it.
        usage: of the newest day.
        held: the conditions so far.
        now: an aware datetime.
    """
    accepted: tuple[Status, str, str] = (
        ("True", Reason.VALID, "The spec is valid")
        if policy.spec is not None
        else ("False", Reason.INVALID_SPEC, policy.error)
    )
    selecting: tuple[Status, str, str] = (
        ("True", Reason.PODS_SELECTED, _selected(policy_counts))
        if policy_counts.pods
        else (
            "False",
            Reason.NO_PODS,
            policy_counts.unprepared
            or f"No decode pod of namespace {policy.namespace} matches. A pod "
            "that no rule takes for decode needs the label windrow.dev/inject: enabled in its "
            "template; windrow inject -f shows it",
        )
    )
    conditions = set_condition(held, T.ACCEPTED, *accepted, policy.generation, now)
    conditions = set_condition(conditions, T.SELECTS_PODS, *selecting, policy.generation, now)
    status: dict[str, Any] = {
        "observedGeneration": policy.generation,
        "conditions": conditions,
        "pods": policy_counts.pods,
        "slots": policy_counts.slots,
        "harvesting": policy_counts.harvesting,
        "refused": policy_counts.refused,
    }
    if not usage.day:
        return status
    of_namespaces = [
        {"namespace": namespace, "gpuSeconds": round(seconds, 1)}
        for namespace, seconds in sorted(usage.by_namespace.items())
    ]
    used = {"day": usage.day, "gpuSeconds": round(usage.seconds, 1), "namespaces": of_namespaces}
    return {**status, "usage": used}


def _selected(policy_counts: PolicyCounts) -> str:
    pods = _count(policy_counts.pods, "decode pod")
    if policy_counts.unprepared:
        pods = f"{pods}; {policy_counts.unprepared}"
    if not policy_counts.refused:
        return pods
    of_slots = "slot" if policy_counts.refused == 1 else "slots"
    return (
        f"{pods}; {policy_counts.refused} {of_slots} cannot be harvested, the first: "
        f"{policy_counts.why_refused}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'} selected"
