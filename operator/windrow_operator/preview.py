"""Show offline what the webhook would do with pods: `python -m windrow_operator.preview`.

Reads `{"manifests": [...], "policy": ... or null}` from stdin and writes a JSON list, one entry for
each pod that the manifests make: where, rule, form, operations of the patch, warnings, and why the
pod is left alone where it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from windrow.crd import LABEL_INJECT, parse_policy_spec
from windrow.crd.harvestpolicy import SharingMode, SidecarSpec
from windrow_operator.decode_pods import (
    decoders_of,
    harvest_refusal,
    matching_rule,
    runs_builtin,
)
from windrow_operator.injection import (
    LABEL_POD_SECURITY,
    PodNamespace,
    SidecarTemplate,
    inject,
)
from windrow_operator.manifests import pods_in, shape_of, shape_of_manifest
from windrow_operator.model import Refusal
from windrow_operator.pods import pod_of
from windrow_operator.policies import policy_of, selects


def preview(pod: dict[str, Any], policy: dict[str, Any] | None) -> dict[str, Any]:
    """Return what would happen to `pod` in a namespace with `policy`; None: one that selects it."""
    rule = matching_rule(pod)
    sidecar: SidecarSpec | None
    sharing: SharingMode = "auto"
    if policy is None:
        sidecar = parse_policy_spec({"selector": {}, "objective": {"tpot": "1s"}}).sidecar
    else:
        spec = parse_policy_spec(policy.get("spec") or {})
        named = {
            "namespace": "default",
            "uid": "",
            "name": "policy",
            **(policy.get("metadata") or {}),
        }
        candidate = {
            **pod,
            "metadata": {**(pod.get("metadata") or {}), "namespace": named["namespace"]},
        }
        chosen = selects(policy_of({**policy, "metadata": named}), pod_of(candidate))
        sidecar, sharing = (spec.sidecar if chosen else None), spec.wanted_sharing
    # Claims and directories are looked at when the pod is made; here they are taken to be there.
    volumes = sidecar.volumes if sidecar else []
    claims = {v.persistent_volume_claim.claim_name for v in volumes if v.persistent_volume_claim}
    around = PodNamespace({LABEL_POD_SECURITY: "privileged"}, frozenset(claims))
    template = SidecarTemplate("windrow-operator.windrow-system.svc:8443", "(PEM)")
    try:
        done = inject(pod, template, sidecar, around, sharing)
    except Refusal as refusal:
        return {"rule": rule, "touched": False, "why": str(refusal), "reason": refusal.reason}
    if done is None:
        why = (
            "no rule of a stack matches, and no label asks for it, or one forbids it: "
            f"{LABEL_INJECT}: enabled on the pod (its template) asks for it"
            if not rule
            else "the policy does not select it"
        )
        return {"rule": rule, "touched": False, "why": why, "reason": "NotAsked"}
    return {
        "rule": done.rule,
        "touched": bool(done.patch),
        "form": done.form,
        "patch": done.patch,
        "decoders": list(done.decoders),
        "evidence": done.evidence,
        "gpu": {"access": done.gpu.way, "why": done.gpu.why},
        "warnings": list(done.said),
        "notes": list(done.notes),
        "refused": next(filter(None, map(harvest_refusal, decoders_of(pod))), ""),
        "starts": not any(runs_builtin(c) and harvest_refusal(c) for c in decoders_of(pod)),
    }


def previews(
    manifests: list[dict[str, Any]], policy: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Return what would happen to each pod that `manifests` make; `where` names it."""
    answers = []
    for manifest in manifests:
        kind = str(manifest.get("kind") or "Pod")
        if problem := shape_of_manifest(manifest):
            answers.append({"where": kind, **_not_valid(kind, problem)})
            continue
        for each in pods_in(manifest):
            problem = shape_of(each.pod)
            answer = _not_valid("pod", problem) if problem else preview(each.pod, policy)
            answers.append({"where": each.where, **answer})
    return answers


def _not_valid(what: str, problem: str) -> dict[str, Any]:
    why = f"the API server would refuse the {what}: {problem}"
    return {"rule": "", "touched": False, "why": why, "reason": "NotValid"}


def main() -> int:
    """Answer one question."""
    asked = json.load(sys.stdin)
    json.dump(previews(asked["manifests"], asked["policy"]), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
