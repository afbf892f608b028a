"""Decide which version of an adapter a served name points to: pure functions over jobs.

Jobs of a namespace with one served name are versions of one adapter, the one that ended last the
newest. What was decided about a version is in its condition `Deployed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from windrow.adapter_files import CACHE_FOLDER
from windrow.conditions import ConditionType, Reason, get_condition
from windrow.outputs import is_below, is_bucket, path_of
from windrow_operator import tenancy
from windrow_operator.model import CheckedPolicy, Job

# A name may go back to the version before, so both stay in the caches.
_KEPT_OF_A_NAME: Final = 2
_SHOWN_DIGITS: Final = 12


def served_name(job: Job) -> str:
    """Return the name by which servers know the job's adapter; no two namespaces share one."""
    own = job.spec.output.deploy.name if job.spec else None
    return f"{job.namespace}.{own or job.name}"


def trial_name(job: Job) -> str:
    """Return the name by which servers know a version before its served name points to it."""
    return f"{served_name(job)}-canary-{(digest_of(job) or job.uid)[:_SHOWN_DIGITS]}"


def digest_of(job: Job) -> str:
    """Return the digest of the job's adapter; "": an older worker reports none."""
    return str((job.status.get("adapter") or {}).get("digest") or "")


def is_wanted(job: Job) -> bool:
    """Return whether a job has an adapter that servers are to have."""
    done = get_condition(job.status.get("conditions"), ConditionType.SUCCEEDED)
    ended_well = done is not None and done["status"] == "True"
    return ended_well and job.spec is not None and job.spec.output.deploy.enabled


def is_proven(job: Job) -> bool:
    """Return whether servers have answered by the job's version."""
    # An operator from before the field has noted no time.
    return bool((job.status.get("adapter") or {}).get("servedAt")) or _reason(job) == Reason.LOADED


def has_failed(job: Job) -> bool:
    """Return whether the job's version has failed its canary: it is not tried again."""
    return _reason(job) == Reason.CANARY_FAILED


def versions(job: Job, jobs: Iterable[Job]) -> list[Job]:
    """Return the versions that the job's served name may point to, the newest last.

    Args:
        job: one of them, or one that is about to go.
        jobs: all jobs whose adapters servers are to have.
    """
    name = served_name(job)
    found = [
        each
        for each in jobs
        if each.namespace == job.namespace
        and served_name(each) == name
        and _model(each) == _model(job)
        and each.deleted_at is None
        and is_wanted(each)
        and not has_failed(each)
    ]
    return sorted(found, key=lambda each: (str(each.status.get("completionTime")), each.uid))


def _model(job: Job) -> str:
    """Return the base model: servers of another one have names of their own."""
    return job.spec.model.name if job.spec else ""


def kept_digests(namespace: str, jobs: Iterable[Job]) -> list[str]:
    """Return the digests of the namespace's versions that served names point to, or go back to."""
    own = [each for each in jobs if each.namespace == namespace]
    kept = {
        digest
        for each in own
        for version in versions(each, own)[-_KEPT_OF_A_NAME:]
        if (digest := digest_of(version))
    }
    return sorted(kept)


def loss_refusal(job: Job, before: Job | None) -> str:
    """Return why the job's evaluation loss keeps its version from being served; "": it does not.

    Args:
        job: the version.
        before: the version that is served so far; None: none is.
    """
    canary = job.spec.output.deploy.canary if job.spec else None
    allowed = canary.max_loss_increase if canary else None
    if allowed is None:
        return ""
    own = _losses(job)
    if "tunedLoss" not in own:
        return "its evaluation loss is not known"
    earlier = _losses(before) if before else {}
    known = before is not None and "tunedLoss" in earlier
    bar = earlier["tunedLoss"] if known else own.get("baseLoss")
    whose = f"of job {before.name}" if known and before else "of the base model"
    if bar is None or float(own["tunedLoss"]) <= float(bar) + allowed:
        return ""
    return (
        f"its evaluation loss {float(own['tunedLoss']):.4g} is more than {allowed:g} above the "
        f"{float(bar):.4g} {whose}"
    )


def _losses(job: Job) -> Mapping[str, Any]:
    found: Mapping[str, Any] = job.status.get("evaluation") or {}
    return found


def _reason(job: Job) -> str:
    told = get_condition(job.status.get("conditions"), ConditionType.DEPLOYED)
    return told["reason"] if told else ""


# --- where it is ----------------------------------------------------------------------------------


def cache_of(job: Job, policy: CheckedPolicy | None) -> str:
    """Return the directory of the policy's cache for the job's namespace; "": it has none."""
    volume = policy.spec.sidecar.cache_volume if policy and policy.spec else None
    if policy is None or volume is None:
        return ""
    tree = tenancy.tree_of(policy, volume, job.namespace)
    return f"{tree}/{CACHE_FOLDER}/{job.namespace}"


def source_of(job: Job, policy: CheckedPolicy) -> str:
    """Return where a sidecar under the policy reads the job's adapter; "": nowhere.

    By the job's spec alone: its destination, else the repository of the Hub that has the same.
    """
    if job.spec is None or policy.spec is None:
        return ""
    output = job.spec.output
    place = path_of(output.destination)
    mounted = [volume.mount_path for volume in policy.spec.sidecar.volumes]
    if is_bucket(place) or is_below(mounted, place):
        return place
    return f"hf://{output.hub.repository}" if output.hub else ""
