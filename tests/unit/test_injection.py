"""Which pods are injected, and with what."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from windrow.crd.harvestpolicy import VolumeSpec
from windrow_operator.injection import SidecarTemplate, inject, matching_rule

TEMPLATE = SidecarTemplate("10.0.0.1:8443", "PEM", "sidecar:1")
DECODE_ARGS = ["--disaggregation-mode", "decode"]


def pod(labels=None, annotations=None, **container):
    return {
        "metadata": {"labels": labels or {}, "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "image": "sglang", **container}]},
    }


def applied(body, patch):
    """Apply the few operations that injection makes."""
    result = copy.deepcopy(body)
    for operation in patch:
        _, parent, leaf = operation["path"].split("/")
        exists = leaf in result[parent]
        assert operation["op"] == ("replace" if exists else "add")
        result[parent][leaf] = operation["value"]
    return result


def injected(body, volumes=()):
    return applied(body, inject(body, TEMPLATE, volumes))


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        (pod({"rbg.workloads.x-k8s.io/role-name": "decode"}), "rbg"),
        (pod({"disaggregatedset.x-k8s.io/role": "decode"}), "lws-disaggregatedset"),
        (pod({"component": "decoder", "ome.io/inferenceservice": "chat"}), "ome"),
        (pod({"nvidia.com/dynamo-component-type": "decode"}), "dynamo"),
        (pod({"nvidia.com/dynamo-sub-component-type": "decode"}), "dynamo-sub-component"),
        (pod({"llm-d.ai/role": "decode"}), "llm-d"),
        (pod(args=["serve", *DECODE_ARGS]), "arguments"),
        (pod(command=["python", "--disaggregation-mode=decode"]), "arguments"),
        (pod(command=["sh", "-c", "exec serve --disaggregation-mode decode"]), "arguments"),
        (pod(annotations={"windrow.dev/inject": "enabled"}), "annotation"),
        (pod({"component": "decoder"}), ""),
        (pod({"rbg.workloads.x-k8s.io/role-name": "prefill"}), ""),
        (pod(args=["--disaggregation-mode", "prefill", "decode"]), ""),
        (pod(), ""),
        (pod(args=DECODE_ARGS, annotations={"windrow.dev/inject": "disabled"}), ""),
    ],
)
def test_decode_pods_are_found_by_their_stack(body, rule):
    assert matching_rule(body) == rule
    assert bool(inject(body, TEMPLATE)) == bool(rule)


def test_the_first_rule_in_order_is_named():
    both = pod({"rbg.workloads.x-k8s.io/role-name": "decode"}, args=DECODE_ARGS)
    assert injected(both)["metadata"]["annotations"]["windrow.dev/injected-by"] == "rbg"


def test_injecting_twice_changes_nothing():
    once = injected(pod(args=DECODE_ARGS))
    assert inject(once, TEMPLATE) == []


def test_injection_leaves_its_argument_alone():
    body = pod(args=DECODE_ARGS)
    before = copy.deepcopy(body)
    inject(body, TEMPLATE)
    assert body == before


def test_the_sidecar_is_native_and_holds_decode_back_by_no_probe():
    (sidecar,) = injected(pod(args=DECODE_ARGS))["spec"]["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert "startupProbe" not in sidecar
    env = {entry["name"]: entry.get("value") for entry in sidecar["env"]}
    assert env["WINDROW_OPERATOR_ADDRESS"] == "10.0.0.1:8443"
    assert env["WINDROW_OPERATOR_CA"] == "PEM"
    token = next(m for m in sidecar["volumeMounts"] if m["name"] == "windrow-token")
    assert env["WINDROW_TOKEN_FILE"] == f"{token['mountPath']}/token"
    assert token["readOnly"]


def test_the_sidecar_comes_before_init_containers_that_were_there():
    body = pod(args=DECODE_ARGS)
    body["spec"]["initContainers"] = [{"name": "fetch"}]
    names = [container["name"] for container in injected(body)["spec"]["initContainers"]]
    assert names == ["windrow", "fetch"]


def test_both_sides_share_the_run_directory_and_only_the_sidecar_the_token():
    body = pod(args=DECODE_ARGS)
    body["spec"]["containers"].append({"name": "proxy"})
    spec = injected(body)["spec"]
    decoder, proxy = spec["containers"]
    assert [mount["name"] for mount in decoder["volumeMounts"]] == ["windrow-run"]
    assert {"name": "WINDROW_RUN_DIR", "value": "/run/windrow"} in decoder["env"]
    assert proxy == {"name": "proxy"}
    token = next(volume for volume in spec["volumes"] if volume["name"] == "windrow-token")
    (source,) = token["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == "windrow"


def test_the_container_that_decodes_is_chosen_not_the_first():
    body = pod()
    body["spec"]["containers"].append({"name": "decode", "args": DECODE_ARGS})
    first, decoder = injected(body)["spec"]["containers"]
    assert "env" not in first
    assert decoder["volumeMounts"]


def test_what_the_pod_says_itself_stays():
    own = {"name": "WINDROW_RUN_DIR", "value": "/elsewhere"}
    (decoder,) = injected(pod(args=DECODE_ARGS, env=[own]))["spec"]["containers"]
    assert decoder["env"].count(own) == 1
    assert sum(entry["name"] == "WINDROW_RUN_DIR" for entry in decoder["env"]) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("WINDROW_LOG_DIR", "/logs"), ("WINDROW_COPY_RATE", "2Gi")]
)
def test_what_decode_says_of_logs_and_rates_is_the_sidecars_too(name, value):
    said = {"name": name, "value": value}
    (sidecar,) = injected(pod(args=DECODE_ARGS, env=[said]))["spec"]["initContainers"]
    assert said in sidecar["env"]


def test_a_sidecar_that_may_not_share_by_mps_is_told():
    body = pod(args=DECODE_ARGS)
    patch = inject(body, replace(TEMPLATE, mps=False))
    (sidecar,) = applied(body, patch)["spec"]["initContainers"]
    assert {"name": "WINDROW_MPS", "value": "off"} in sidecar["env"]
    (sidecar,) = injected(body)["spec"]["initContainers"]
    assert "WINDROW_MPS" not in {entry["name"] for entry in sidecar["env"]}


def test_volumes_of_the_policy_are_mounted_in_the_sidecar():
    volume = VolumeSpec.model_validate(
        {
            "name": "data",
            "mountPath": "/data",
            "readOnly": True,
            "persistentVolumeClaim": {"claimName": "rows"},
        }
    )
    spec = injected(pod(args=DECODE_ARGS), [volume])["spec"]
    assert {
        "name": "windrow-data",
        "persistentVolumeClaim": {"claimName": "rows"},
    } in spec["volumes"]
    (sidecar,) = spec["initContainers"]
    assert {"name": "windrow-data", "mountPath": "/data", "readOnly": True} in sidecar[
        "volumeMounts"
    ]


def test_a_pod_without_labels_or_annotations_can_be_injected():
    body = {"metadata": {}, "spec": {"containers": [{"name": "d", "args": DECODE_ARGS}]}}
    assert injected(body)["metadata"]["labels"] == {"windrow.dev/decode": "true"}
