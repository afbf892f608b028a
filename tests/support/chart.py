"""Rights that the chart gives the operator's account, without Helm, and what holds them.

Conditions of the templates count as met. tests/node compares this with what Helm makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "windrow"
ACCOUNT = "windrow-operator"
_RULES = re.compile(r'\{\{- define "windrow.servedRules" -\}\}\n(.*?)\{\{- end \}\}', re.DOTALL)


def rules_of(kind):
    """Return the rules of the ClusterRole, or of the Role in the operator's own namespace."""
    text = (CHART / "templates" / "rbac.yaml").read_text()
    (served,) = _RULES.findall(text)
    text = _RULES.sub("", text, count=1)
    within = "\n".join(f"  {line}" for line in served.splitlines())
    text = re.sub(r'  \{\{- include "windrow.servedRules" .*?\}\}', lambda _: within, text)
    bare = re.sub(r"\{\{.*?\}\}", "", text)
    (role,) = [
        body
        for body in yaml.safe_load_all(bare)
        if body and (body["kind"], body["metadata"]["name"]) == (kind, ACCOUNT)
    ]
    return role["rules"]


def admission_policies(own, *, image="decode", command=(), address="", namespaces=()):
    """Return the ValidatingAdmissionPolicies and their bindings."""
    variables = yaml.safe_load((CHART / "files" / "variables.yaml").read_text())
    words = {
        "@OWN@": own,
        "@EXEMPT@": ["kube-system", own],
        "@NAMESPACES@": list(namespaces),
        "@IMAGE@": image,
        "@COMMAND@": list(command or ("python", "-m", "windrow_sidecar.agent")),
        "@ADDRESS@": address or f"windrow-operator.{own}.svc:8443",
        "@VARIABLES@": variables,
    }
    text = (CHART / "files" / "admission.yaml").read_text()
    for word, value in words.items():
        text = text.replace(word, json.dumps(value, separators=(",", ":")))
    account = f"request.userInfo.username == 'system:serviceaccount:{own}:{ACCOUNT}'"
    bodies = []
    for each in yaml.safe_load(text):
        spec = {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [each["resource"]]},
            "matchConditions": [{"name": "account", "expression": account}],
            "validations": each["validations"],
        }
        if "variables" in each:
            spec["variables"] = each["variables"]
        binding = {"policyName": each["name"], "validationActions": ["Deny"]}
        for kind, body in (("", spec), ("Binding", binding)):
            bodies.append(
                {
                    "apiVersion": "admissionregistration.k8s.io/v1",
                    "kind": f"ValidatingAdmissionPolicy{kind}",
                    "metadata": {"name": each["name"]},
                    "spec": body,
                }
            )
    return bodies
