"""Find running pods that a policy selects and that were not prepared, and say what each lacks.

The API server asks the webhook about decode pods and about pods with the label alone, so a pod that
no rule takes for decode passes without a word; so does one that is older than its policy. A policy
says of both what to do, by the name of the workload that makes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from windrow.crd import LABEL_DECODE, LABEL_INJECT
from windrow_operator import policies
from windrow_operator.command_line import option_of
from windrow_operator.decode_pods import containers_of, matching_rule
from windrow_operator.engine_evidence import MODE, SGLANG, engine_of, shows_engine
from windrow_operator.model import CheckedPolicy
from windrow_operator.pods import pod_of

Body = Mapping[str, Any]

# Of a list of pods: those that were not prepared and do not opt out.
NOT_PREPARED: Final = (f"{LABEL_DECODE}!=true", f"{LABEL_INJECT}!=disabled")

_NAMED = 3  # workloads that a message names


@dataclass(frozen=True, slots=True)
class Unprepared:
    """A workload with pods that are selected and that were not prepared.

    Attributes:
        workload: its kind and name, as `Deployment chat`.
        owner: the pods' controller as an event names an object; the pod where it has none.
        lacks: what is to be done, in words that follow the workload's name.
    """

    workload: str
    owner: Body
    lacks: str


def unprepared(policy: CheckedPolicy, pods: Iterable[Body]) -> list[Unprepared]:
    """Return the workloads of `pods` that `policy` selects and whose pods were not prepared.

    Pods that prefill or opt out are meant to be left alone. Where the selector is empty, which
    means all pods of a namespace, those alone count that show that they run SGLang.
    """
    if policy.spec is None:
        return []
    every = policy.spec.selector.is_empty
    found: dict[str, Unprepared] = {}
    for body in pods:
        pod = pod_of(body)
        if pod.ending or pod.labels.get(LABEL_DECODE) == "true":
            continue
        if not policies.selects(policy, pod) or _is_left_alone(body, every=every):
            continue
        name, owner = _workload(body)
        found.setdefault(name, Unprepared(name, owner, _lacks(body, name)))
    return sorted(found.values(), key=lambda each: each.workload)


def sentence(found: Iterable[Unprepared]) -> str:
    """Return what a policy says of them; empty: there are none."""
    listed = list(found)
    words = [f"{each.workload} {each.lacks}" for each in listed[:_NAMED]]
    if more := len(listed) - len(words):
        words.append(f"and {more} more")
    return "; ".join(words)


def _is_left_alone(body: Body, *, every: bool) -> bool:
    metadata = body["metadata"]
    if any(
        (metadata.get(part) or {}).get(LABEL_INJECT) == "disabled"
        for part in ("labels", "annotations")
    ):
        return True
    containers = containers_of(body)
    if any(option_of(container, MODE) == "prefill" for container in containers):
        return True
    engines = {engine_of(c).name for c in containers if shows_engine(c)}
    if SGLANG in engines:
        return False
    return every or bool(engines)


def _lacks(body: Body, workload: str) -> str:
    if not matching_rule(body):
        return (
            "is selected and left as it is, since no rule takes its pods for decode: set the label "
            f"{LABEL_INJECT}: enabled in its pod template (spec.template.metadata.labels)"
        )
    kind, _, name = workload.partition(" ")
    remedy = (
        "create it again"
        if kind == "Pod"
        else f"kubectl rollout restart {kind.lower()}/{name}"
        if kind in ("Deployment", "StatefulSet", "DaemonSet")
        else "have its pods created again"
    )
    return (
        "is selected, and its pods are older than the policy or were left as they came: " + remedy
    )


def _workload(body: Body) -> tuple[str, Body]:
    """Return what makes a pod, by its owner and its template's hash, and whom an event is about."""
    metadata = body["metadata"]
    owner = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), None)
    if owner is None:
        about = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        return f"Pod {metadata['name']}", about
    about = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "metadata": {
            "name": owner["name"],
            "namespace": metadata["namespace"],
            "uid": owner["uid"],
        },
    }
    template = (metadata.get("labels") or {}).get("pod-template-hash", "")
    if owner["kind"] == "ReplicaSet" and template and owner["name"].endswith(f"-{template}"):
        return f"Deployment {owner['name'].removesuffix(f'-{template}')}", about
    return f"{owner['kind']} {owner['name']}", about
