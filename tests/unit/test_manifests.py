"""The pods of each stack's manifests are found, with the labels of their controllers."""

from __future__ import annotations

import pytest

from windrow import sglang
from windrow_operator.preview import previews

ENGINE = {
    "name": "main",
    "image": "lmsysorg/sglang:v0.5",
    "command": ["python3", "-m", "sglang.launch_server"],
    "args": ["--model-path", "/models/chat"],
}
DECODE = {**ENGINE, "args": [*ENGINE["args"], "--disaggregation-mode", "decode"]}
TEMPLATE = {"spec": {"containers": [ENGINE]}}
WORKER = {"spec": {"containers": [{"name": "w", "image": "x", "command": ["sleep", "infinity"]}]}}


def manifest(kind, **spec):
    return {"kind": kind, "metadata": {"name": "chat"}, "spec": spec}


ROLE = manifest(
    "RoleBasedGroup",
    roleTemplates=[{"name": "base", "template": TEMPLATE}],
    roles=[
        {"name": "router", "template": WORKER},
        {"name": "decode", "standalonePattern": {"templateRef": {"name": "base", "patch": {}}}},
    ],
)
GROUP = manifest(
    "RoleBasedGroup",
    roles=[
        {
            "name": "decode",
            "leaderWorkerPattern": {
                "template": TEMPLATE,
                "leaderTemplatePatch": {
                    "spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}]}
                },
            },
        }
    ],
)
DYNAMO = manifest(
    "DynamoGraphDeployment",
    services={
        "Frontend": {
            "componentType": "frontend",
            "extraPodSpec": {"mainContainer": {"image": "x"}},
        },
        "decode": {
            "componentType": "worker",
            "subComponentType": "decode",
            "envFromSecret": "hf",
            "volumeMounts": [{"name": "cache", "mountPoint": "/opt/model"}],
            "extraPodSpec": {
                "mainContainer": {**ENGINE, "command": ["python3", "-m", "dynamo.sglang"]}
            },
        },
    },
)
DYNAMO_BETA = manifest(
    "DynamoGraphDeployment",
    components=[
        {"name": "Frontend", "type": "frontend", "podTemplate": WORKER},
        {"name": "d", "type": "decode", "podTemplate": TEMPLATE},
    ],
)
OME = manifest(
    "ClusterServingRuntime",
    engineConfig={"runner": ENGINE},
    decoderConfig={"leader": {"runner": ENGINE}, "worker": {"runner": ENGINE}},
)
SET = manifest(
    "DisaggregatedSet",
    roles=[
        {"name": name, "spec": {"leaderWorkerTemplate": {"workerTemplate": TEMPLATE}}}
        for name in ("prefill", "decode")
    ],
)
LEADER = {"spec": {"containers": [DECODE]}}
LWS = manifest(
    "LeaderWorkerSet", leaderWorkerTemplate={"leaderTemplate": LEADER, "workerTemplate": WORKER}
)
KSERVE = manifest(
    "LLMInferenceService", template=TEMPLATE["spec"], prefill={"template": TEMPLATE["spec"]}
)


@pytest.mark.parametrize(
    ("manifest", "prepared"),
    [
        (ROLE, ["role decode"]),
        (GROUP, ["role decode, leader", "role decode, worker"]),
        (DYNAMO, ["service decode"]),
        (DYNAMO_BETA, ["component d"]),
        (OME, ["decoder, leader", "decoder, worker"]),
        (SET, ["role decode, leader and workers"]),
        (LWS, ["leader"]),
        (KSERVE, ["decode, template"]),
        (manifest("Deployment", template=LEADER), [""]),
        ({"kind": "CronJob", "spec": {"jobTemplate": {"spec": {"template": LEADER}}}}, [""]),
        ({"kind": "List", "items": [manifest("Job", template=LEADER)]}, [""]),
        (manifest("Rollout", template=LEADER), ["spec.template"]),
        (manifest("CloneSet", template=LEADER), ["spec.template"]),
        (
            manifest("StormService", template={"spec": {"roles": [{"template": LEADER}]}}),
            ["spec.template.spec.roles[0].template"],
        ),
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)
def test_the_pods_that_decode_are_found_in_each_kind(manifest, prepared):
    answers = previews([manifest], None)
    found = [each["where"].partition(", ")[2] for each in answers if each["touched"]]
    assert found == prepared
    assert all(each["reason"] == "NotAsked" for each in answers if not each["touched"])


def test_a_container_without_an_image_is_of_kserves_preset():
    """The controller completes it by a preset of vLLM, or by what `baseRefs` names."""
    main = {"spec": {"containers": [{"name": "main", "resources": {"limits": {}}}]}}
    parts = {"template": main["spec"], "prefill": {"template": main["spec"]}}
    (answer, _) = previews([manifest("LLMInferenceService", **parts)], None)
    assert "with vllm, which Windrow cannot drive" in answer["why"]
    (answer, _) = previews([manifest("LLMInferenceService", baseRefs=["mine"], **parts)], None)
    assert answer["touched"]


def test_dynamo_names_the_kind_of_its_gpus():
    service = {
        "subComponentType": "decode",
        "resources": {"limits": {"gpu": "1", "gpuType": "gpu.intel.com/xe"}},
        "extraPodSpec": {"mainContainer": {"command": ["python3", "-m", "dynamo.sglang"]}},
    }
    (answer,) = previews([manifest("DynamoGraphDeployment", services={"d": service})], None)
    assert "gpu.intel.com/xe is not a GPU that workers can use" in answer["refused"]


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("lmsysorg/sglang:v0.5.9-cu129", "0.5.9"),
        ("sglang:0.5.23", "0.5.23"),
        ("registry:5000/lmsysorg/sglang:v0.5.23@sha256:00", "0.5.23"),
        ("nvcr.io/nvidia/ai-dynamo/sglang-runtime:0.7.0", ""),
        ("lmsysorg/sglang-router:v0.2.1", ""),
        ("lmsysorg/sglang:latest", ""),
    ],
)
def test_the_version_of_an_image_is_that_of_sglangs_own_images_alone(image, version):
    assert sglang.version_of_image(image) == version


def test_kinds_that_make_no_pod_are_passed_over():
    assert previews([{"kind": "Service", "spec": {}}, manifest("RoleBasedGroup")], None) == []


@pytest.mark.parametrize(
    ("container", "problem"),
    [
        ({"args": ["--port", 8080]}, "args[1] is 8080, not a string: put quotes around it"),
        ({"args": "--port 8080"}, "args is not a list"),
        ({"env": {"A": "1"}}, "env is not a list"),
        ({"env": [{"value": "1"}]}, "env[0] has no name"),
        ({"volumeMounts": [{"name": "m"}]}, "volumeMounts[0] has no mountPath"),
        ({"name": None}, "has no name"),
    ],
)
def test_what_the_api_server_would_refuse_is_said_with_its_place(container, problem):
    pod = {"kind": "Pod", "spec": {"containers": [{**DECODE, **container}]}}
    (answer,) = previews([pod], None)
    assert answer["touched"] is False
    assert problem in answer["why"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"kind": "Pod", "metadata": 3, "spec": {}}, "the Pod: metadata is not an object"),
        ({"kind": "Pod", "spec": [1]}, "the Pod: spec is not an object"),
        (manifest("Deployment", template=3), "the Deployment: spec.template is not an object"),
        (
            {"kind": "Pod", "metadata": {"labels": {"a": 1}}, "spec": {"containers": [DECODE]}},
            "metadata.labels[a] is 1, not a string: put quotes around it",
        ),
    ],
)
def test_a_manifest_of_another_shape_is_said_with_its_place(body, problem):
    (answer,) = previews([body], None)
    assert answer["touched"] is False
    assert problem in answer["why"]
