"""The chart gives the operator every right that it asks for at its start."""

import pytest
import yaml
from support.chart import CHART, rules_of

from windrow import rundir
from windrow.crd.harvestpolicy import SidecarSpec
from windrow.errors import UserError
from windrow_operator import prerequisites
from windrow_operator.injection import SidecarTemplate, attached_sidecar
from windrow_operator.prerequisites import QUEUE_RIGHTS, RIGHTS


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
        for right in (*RIGHTS, *QUEUE_RIGHTS)
        for verb in right.verbs
        if not any(allows(rule, right, verb) for rule in roles[right.own])
    ]
    assert len(RIGHTS) > 10
    assert missing == []


class Reviews:
    """An API server that grants everything but what is asked for outside of some namespaces."""

    def __init__(self, *namespaces):
        self.namespaces = namespaces

    async def get(self, path):
        names = ("finetunejobs", "harvestpolicies", "harvestslots", "latencyprofiles")
        return {"resources": [{"name": name} for name in names]}

    async def create(self, path, body):
        asked = body["spec"]["resourceAttributes"]
        everywhere = not asked["namespace"]
        of_cluster = asked["resource"] in (
            *("namespaces", "nodes", "priorityclasses", "tokenreviews"),
            "mutatingwebhookconfigurations",
        )
        allowed = of_cluster if everywhere else asked["namespace"] in self.namespaces
        return {"status": {"allowed": allowed}}


async def test_an_operator_of_some_namespaces_asks_for_its_rights_in_these_alone():
    granted = Reviews("windrow-system", "blue", "red")
    await prerequisites.check(granted, "windrow-system", ("blue", "red"))
    with pytest.raises(UserError, match="list, watch, get pods in namespace green"):
        await prerequisites.check(granted, "windrow-system", ("blue", "green"))
    with pytest.raises(UserError, match="list, watch, get pods;"):
        await prerequisites.check(granted, "windrow-system")


def test_the_admission_policy_knows_every_variable_of_a_sidecar():
    known = set(yaml.safe_load((CHART / "files" / "variables.yaml").read_text()))
    said = ("HF_HOME", "HF_TOKEN", "https_proxy", "SSL_CERT_FILE", "CUDA_MPS_PIPE_DIRECTORY")
    said += ("NVIDIA_VISIBLE_DEVICES", rundir.ENV_LOG_DIR, rundir.ENV_COPY_RATE)
    env = [{"name": name, "value": "/x"} for name in said]
    mounts = [{"name": "pipes", "mountPath": "/x"}]
    decoder = {"name": "decode", "image": "i", "env": env, "volumeMounts": mounts}
    decoder["command"] = ["python", "-m", "sglang.launch_server", "--disaggregation-mode", "decode"]
    pod = {"metadata": {}, "spec": {"containers": [decoder], "volumes": [{"name": "pipes"}]}}
    made = attached_sidecar(SidecarTemplate("o:1", ""), pod, SidecarSpec(mps=False))
    names = {entry["name"] for entry in made["env"]}
    assert {*said} - {"CUDA_MPS_PIPE_DIRECTORY"} <= names
    assert names <= known
    made = attached_sidecar(SidecarTemplate("o:1", ""), pod, SidecarSpec())
    assert "CUDA_MPS_PIPE_DIRECTORY" in {entry["name"] for entry in made["env"]} <= known
