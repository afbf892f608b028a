"""Check that the cluster has the operator's kinds and grants it the rights it needs.

Asked at the start, so that what is missing is named in one line. Otherwise a kind that nobody
installed would look like one without objects, and a missing right would show in the middle of a
placement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from windrow.crd import (
    FINETUNE_JOB,
    GROUP,
    HARVEST_POLICY,
    HARVEST_SLOT,
    KINDS,
    LATENCY_PROFILE,
    VERSION,
)
from windrow.errors import UserError
from windrow.off import SWITCH
from windrow_operator.certificates import SECRET
from windrow_operator.injection import PROFILES_CONFIG_MAP, TRUST_CONFIG_MAP
from windrow_operator.kube import ApiError, Kube, ObjectNotFound
from windrow_operator.lease import LEASE
from windrow_operator.webhook import CONFIGURATION

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True)
class Right:
    """Right that the operator needs on a resource."""

    verbs: tuple[str, ...]
    resource: str  # with its subresource: pods/status
    group: str = ""
    name: str = ""  # of the one object that is meant
    own: bool = False  # in the operator's own namespace only
    cluster: bool = False  # of no namespace

    def __str__(self) -> str:
        """Return it in the words of a role."""
        where = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{', '.join(self.verbs)} {where}{f' {self.name}' if self.name else ''}"


# What is asked of every cluster. Native sidecars take more, and say so when one is wanted.
RIGHTS: tuple[Right, ...] = (
    Right(("list", "watch", "get", "patch", "delete"), FINETUNE_JOB.plural, GROUP),
    Right(("update",), f"{FINETUNE_JOB.plural}/status", GROUP),
    Right(("list", "watch"), HARVEST_POLICY.plural, GROUP),
    Right(("update",), f"{HARVEST_POLICY.plural}/status", GROUP),
    Right(("list", "create", "patch"), HARVEST_SLOT.plural, GROUP),
    Right(("patch",), f"{HARVEST_SLOT.plural}/status", GROUP),
    Right(("list", "create", "patch"), LATENCY_PROFILE.plural, GROUP),
    Right(("list", "watch", "get"), "pods"),
    Right(("patch",), "pods/ephemeralcontainers"),
    Right(("get",), "persistentvolumeclaims"),
    Right(("list", "watch", "get"), "namespaces", cluster=True),
    Right(("list", "watch"), "nodes", cluster=True),
    Right(("create",), "events"),
    Right(("create",), "secrets", own=True),
    Right(("get", "update"), "secrets", name=SECRET, own=True),
    Right(("create", "patch"), "configmaps", name=TRUST_CONFIG_MAP),
    # It has owners, which some clusters let nobody set who may not delete it.
    Right(("create", "patch", "delete"), "configmaps", name=PROFILES_CONFIG_MAP),
    Right(("list", "watch"), "priorityclasses", "scheduling.k8s.io", cluster=True),
    Right(("create",), "tokenreviews", "authentication.k8s.io", cluster=True),
    Right(("get",), "configmaps", name=SWITCH, own=True),
    Right(("create",), "leases", "coordination.k8s.io", own=True),
    Right(("get", "update"), "leases", "coordination.k8s.io", name=LEASE, own=True),
    Right(
        ("get", "patch"),
        "mutatingwebhookconfigurations",
        "admissionregistration.k8s.io",
        name=CONFIGURATION,
        cluster=True,
    ),
)


# Asked for where a job names a queue of Kueue; the chart gives them with kueue.enabled.
QUEUE_RIGHTS: tuple[Right, ...] = (
    Right(("list", "create", "delete"), "workloads", "kueue.x-k8s.io"),
    Right(("patch",), "workloads/status", "kueue.x-k8s.io"),
    Right(("list",), "admissionchecks", "kueue.x-k8s.io", cluster=True),
    Right(("patch",), "admissionchecks/status", "kueue.x-k8s.io", cluster=True),
    Right(("get",), "workloadpriorityclasses", "kueue.x-k8s.io", cluster=True),
)


async def check(kube: Kube, own_namespace: str, namespaces: tuple[str, ...] = ()) -> None:
    """Return if the operator can work.

    Args:
        kube: the API server.
        own_namespace: of the operator.
        namespaces: that are served; none: all.

    Raises:
        UserError: kinds are not installed, or rights are missing; names them.
        ApiError: the API server cannot be asked.
    """
    if missing := await _missing_kinds(kube):
        raise UserError(
            f"the API server does not know {' and '.join(missing)}",
            remedy="Install the custom resource definitions: kubectl apply -f crds/.",
        )
    if refused := await _missing_rights(kube, own_namespace, namespaces):
        raise UserError(
            f"the operator's account may not {'; '.join(refused)}",
            remedy="Install the chart, whose ClusterRole windrow-operator and Roles allow it.",
        )


async def _missing_kinds(kube: Kube) -> list[str]:
    try:
        served = await kube.get(f"/apis/{GROUP}/{VERSION}")
    except ObjectNotFound:
        served = {}
    known = {found["name"] for found in served.get("resources", ())}
    return [kind.kind for kind in KINDS if kind.plural not in known]


async def _missing_rights(kube: Kube, own_namespace: str, namespaces: tuple[str, ...]) -> list[str]:
    """Return the rights that are missing, in words, each with its namespace where that is one."""
    asked = [
        (right, verb, namespace)
        for right in RIGHTS
        for namespace in _places(right, own_namespace, namespaces)
        for verb in right.verbs
    ]
    answers = await asyncio.gather(
        *(_may(kube, verb, right, namespace) for right, verb, namespace in asked)
    )
    refused: dict[tuple[Right, str], list[str]] = {}
    for (right, verb, namespace), allowed in zip(asked, answers, strict=True):
        if not allowed:
            said = namespace if namespaces and not right.own else ""
            refused.setdefault((right, said), []).append(verb)
    return [
        f"{replace(right, verbs=tuple(verbs))}{f' in namespace {said}' if said else ''}"
        for (right, said), verbs in refused.items()
    ]


def _places(right: Right, own_namespace: str, namespaces: tuple[str, ...]) -> tuple[str, ...]:
    """Return the namespaces in which a right is asked for; "": in all, or of none."""
    if right.own:
        return (own_namespace,)
    return ("",) if right.cluster or not namespaces else namespaces


async def _may(kube: Kube, verb: str, right: Right, namespace: str) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "verb": verb,
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "name": right.name,
        "namespace": namespace,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await kube.create(_REVIEWS, review)
    return bool(answer["status"]["allowed"])


def explain(error: UserError | ApiError, server: str) -> str:
    """Return what keeps the operator from working, in one line with its remedy."""
    if isinstance(error, UserError):
        return str(error)
    if error.status in (401, 403):
        return (
            f"the API server at {server} does not accept the operator's credentials: {error}. "
            "Give it others by --kubeconfig or KUBECONFIG, or fix its service account."
        )
    return (
        f"the API server at {server} does not answer: {error}. Start it, or name another cluster "
        "by --kubeconfig or KUBECONFIG."
    )
