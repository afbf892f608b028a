"""The chart gives the operator every right that it asks for at its start."""

import re
from pathlib import Path

import yaml

from windrow_operator.prerequisites import RIGHTS

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "windrow"


def rules_of(kind):
    # Conditions of the template count as met: what they add is not asked for.
    bare = re.sub(r"\{\{.*?\}\}", "", (CHART / "templates" / "rbac.yaml").read_text())
    named = (kind, "windrow-operator")
    (role,) = [
        body
        for body in yaml.safe_load_all(bare)
        if (body["kind"], body["metadata"]["name"]) == named
    ]
    return role["rules"]


def allows(rule, right, verb):
    return (
        right.group in rule["apiGroups"]
        and right.resource in rule["resources"]
        and verb in rule["verbs"]
        and ("resourceNames" not in rule or right.name in rule["resourceNames"])
    )


def test_every_right_that_is_asked_for_is_in_the_charts_roles():
    roles = {False: rules_of("ClusterRole"), True: rules_of("Role")}
    missing = [
        f"{verb} {right.resource}"
        for right in RIGHTS
        for verb in right.verbs
        if not any(allows(rule, right, verb) for rule in roles[right.own])
    ]
    assert len(RIGHTS) > 10
    assert missing == []
