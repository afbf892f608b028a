"""Check which pods are made harvestable, and what they get."""

from __future__ import annotations

import copy

import pytest
from decode_pods import DECODE_PODS, OTHER_ENGINES

from windrow.crd.harvestpolicy import SidecarSpec
from windrow_operator.decode_pods import decoder_of, decoders_of, matching_rule, served_model
from windrow_operator.engine_evidence import other_engine
from windrow_operator.injection import (
    PodNamespace,
    SidecarTemplate,
    attached_sidecar,
    inject,
    qos_of,
)
from windrow_operator.model import Refusal

TEMPLATE = SidecarTemplate("10.0.0.1:8443", "PEM", "sidecar:1")
OWN_IMAGE = SidecarTemplate("10.0.0.1:8443", "PEM")
ATTACH, SIDECAR = SidecarSpec(), SidecarSpec(form="sidecar")
PLAIN = PodNamespace({})
DECODE_ARGS = ["--disaggregation-mode", "decode"]
DISABLED, ENABLED = {"windrow.dev/inject": "disabled"}, {"windrow.dev/inject": "enabled"}


def pod(labels=None, annotations=None, **container):
    return {
        "metadata": {"labels": labels or {}, "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "image": "sglang", **container}]},
    }


def decode_pod(**container):
    return pod(args=DECODE_ARGS, **container)


def applied(body, patch):
    """Apply the few operations that injection makes."""
    result = copy.deepcopy(body)
    for operation in patch:
        _, parent, leaf = operation["path"].split("/")
        exists = leaf in result[parent]
        assert operation["op"] == ("replace" if exists else "add")
        result[parent][leaf] = operation["value"]
    return result


def injected(body, asked=ATTACH, template=OWN_IMAGE, around=PLAIN, sharing="auto"):
    return applied(body, inject(body, template, asked, around, sharing).patch)


def volume(name="data", **source):
    return {"name": name, "mountPath": f"/{name}", "readOnly": True, **source}


def native(body, template=OWN_IMAGE):
    return injected(body, SIDECAR, template)["spec"]["initContainers"][-1]


def attached(body, template=OWN_IMAGE, asked=ATTACH, **status):
    return attached_sidecar(template, {**body, "status": status}, asked)


# --- who is meant ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", DECODE_PODS)
def test_decode_pods_of_each_stack_are_found_and_prepared(stack):
    body, rule = DECODE_PODS[stack]
    done = inject(body, TEMPLATE, ATTACH, PLAIN)
    assert done.rule == rule
    after = applied(body, done.patch)
    assert after["metadata"]["annotations"]["windrow.dev/injected-by"] == rule
    assert "sglang" in " ".join(str(decoder_of(after)).split())
    prepared = [c["name"] for c in after["spec"]["containers"] if "env" in c]
    assert decoder_of(after)["name"] in prepared


@pytest.mark.parametrize("stack", OTHER_ENGINES)
def test_pods_of_engines_that_cannot_be_driven_are_left_alone_with_a_reason(stack):
    body = OTHER_ENGINES[stack]
    assert matching_rule(body)
    with pytest.raises(Refusal, match="cannot drive") as caught:
        inject(body, TEMPLATE, ATTACH, PLAIN)
    assert caught.value.reason == "OtherEngine"


def test_a_model_or_a_value_named_like_another_engine_is_not_one():
    words = ["python3", "-m", "sglang.launch_server", "--model-path", "vllm", "--name=vllm"]
    assert not other_engine({"name": "d", "image": "lmsysorg/sglang:1", "command": words})


@pytest.mark.parametrize(
    "body",
    [
        pod({"component": "decoder"}),
        pod({"rbg.workloads.x-k8s.io/role-name": "prefill"}),
        pod(args=["--disaggregation-mode", "prefill", "decode"]),
        pod(),
        pod(DISABLED, args=DECODE_ARGS),
        pod(args=DECODE_ARGS, annotations=DISABLED),
        pod(ENABLED, annotations=DISABLED),
    ],
)
def test_other_pods_and_those_that_opted_out_are_left_alone(body):
    assert matching_rule(body) == ""
    assert inject(body, TEMPLATE, ATTACH, PLAIN) is None


def test_a_decode_pod_that_no_policy_selects_is_left_alone_unless_it_asks():
    assert inject(decode_pod(), TEMPLATE, None, PLAIN) is None
    for asking in (pod(ENABLED), pod(annotations=ENABLED)):
        assert inject(asking, OWN_IMAGE, None, PLAIN).rule == "requested"


def test_the_first_rule_in_order_is_named():
    both = pod({"rbg.workloads.x-k8s.io/role-name": "decode"}, args=DECODE_ARGS)
    assert injected(both)["metadata"]["annotations"]["windrow.dev/injected-by"] == "rbg"


def test_each_container_that_decodes_is_prepared_and_one_sidecar_serves_all_of_them():
    body = decode_pod()
    (first,) = body["spec"]["containers"]
    body["spec"]["containers"] += [{"name": "proxy"}, {**first, "name": "second"}]
    done = inject(body, OWN_IMAGE, SIDECAR, PLAIN)
    after = applied(body, done.patch)
    prepared = [
        container["name"]
        for container in after["spec"]["containers"]
        if any(mount["name"] == "windrow-run" for mount in container.get("volumeMounts") or ())
    ]
    assert prepared == [first["name"], "second"]
    assert [each["name"] for each in decoders_of(after)] == prepared
    assert [each["name"] for each in after["spec"]["initContainers"]] == ["windrow"]
    assert attached(after)["targetContainerName"] == first["name"]


# --- what is added at creation --------------------------------------------------------------------


@pytest.mark.parametrize("asked", [ATTACH, SIDECAR])
def test_injecting_twice_changes_nothing(asked):
    once = injected(decode_pod(), asked)
    assert inject(once, OWN_IMAGE, asked, PLAIN).patch == []


def test_injection_leaves_its_argument_alone():
    body = decode_pod()
    before = copy.deepcopy(body)
    inject(body, OWN_IMAGE, SIDECAR, PLAIN)
    assert body == before


@pytest.mark.parametrize(
    "resources",
    [
        {},
        {"requests": {"cpu": "1"}},
        {"limits": {"cpu": "1", "memory": "1Gi"}},
    ],
)
def test_the_form_attach_adds_no_container_no_image_and_no_resources(resources):
    body = decode_pod(resources=resources)
    spec = injected(body)["spec"]
    assert "initContainers" not in spec
    assert qos_of(spec) == qos_of(body["spec"])
    (decoder,) = spec["containers"]
    added = decoder.keys() - body["spec"]["containers"][0].keys()
    assert added == {"env", "volumeMounts"}
    kinds = [set(entry) - {"name"} for entry in spec["volumes"]]
    assert kinds == [{"emptyDir"}, {"projected"}, {"configMap"}]
    assert spec["volumes"][2]["configMap"]["optional"], "one that is not there holds up no pod"
    in_memory = spec["volumes"][0]["emptyDir"]
    assert in_memory == {"medium": "Memory", "sizeLimit": "256Mi"}


def test_the_container_that_decodes_is_chosen_not_the_first():
    body = pod()
    body["spec"]["containers"].append({"name": "decode", "args": DECODE_ARGS})
    first, decoder = injected(body)["spec"]["containers"]
    assert "env" not in first
    assert decoder["volumeMounts"]


def test_what_the_pod_says_itself_stays():
    own = {"name": "WINDROW_RUN_DIR", "value": "/elsewhere"}
    (decoder,) = injected(decode_pod(env=[own]))["spec"]["containers"]
    assert decoder["env"].count(own) == 1
    assert sum(entry["name"] == "WINDROW_RUN_DIR" for entry in decoder["env"]) == 1


def test_a_pod_with_a_mount_of_its_own_at_our_place_is_left_alone():
    mount = {"name": "mine", "mountPath": "/run/windrow/"}
    with pytest.raises(Refusal, match="mounts its own volume mine"):
        inject(decode_pod(volumeMounts=[mount]), OWN_IMAGE, ATTACH, PLAIN)


def test_a_pod_without_labels_or_annotations_can_be_injected():
    body = {"metadata": {}, "spec": {"containers": [{"name": "d", "args": DECODE_ARGS}]}}
    assert injected(body)["metadata"]["labels"] == {"windrow.dev/decode": "true"}


def test_a_claim_that_could_keep_the_pod_from_starting_is_left_out_and_told():
    asked = SidecarSpec(
        volumes=[
            volume("rows", persistentVolumeClaim={"claimName": "rows"}),
            volume("gone", persistentVolumeClaim={"claimName": "gone"}),
        ]
    )
    done = inject(decode_pod(), OWN_IMAGE, asked, PodNamespace({}, frozenset({"rows"})))
    names = [entry["name"] for entry in applied(decode_pod(), done.patch)["spec"]["volumes"]]
    assert "windrow-rows" in names
    assert "windrow-gone" not in names
    (warning,) = done.warnings
    assert "volume gone" in warning
    assert "claim gone is not bound" in warning


@pytest.mark.parametrize(
    ("level", "mounted"), [(None, False), ("baseline", False), ("privileged", True)]
)
def test_a_directory_of_the_node_is_mounted_in_privileged_namespaces_alone(level, mounted):
    asked = SidecarSpec(volumes=[volume(hostPath={"path": "/srv"})])
    labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
    done = inject(decode_pod(), OWN_IMAGE, asked, PodNamespace(labels))
    names = [entry["name"] for entry in applied(decode_pod(), done.patch)["spec"]["volumes"]]
    assert ("windrow-data" in names) is mounted
    assert bool(done.warnings) is not mounted


# --- the native sidecar ---------------------------------------------------------------------------


def test_the_native_sidecar_comes_last_and_holds_decode_back_by_no_probe():
    body = decode_pod()
    body["spec"]["initContainers"] = [{"name": "fetch"}]
    containers = injected(body, SIDECAR)["spec"]["initContainers"]
    assert [container["name"] for container in containers] == ["fetch", "windrow"]
    assert containers[-1]["restartPolicy"] == "Always"
    assert not {"startupProbe", "livenessProbe", "readinessProbe", "ports"} & containers[-1].keys()


@pytest.mark.parametrize(
    ("resources", "qos"),
    [
        ({}, "BestEffort"),
        ({"requests": {"cpu": "1"}}, "Burstable"),
        ({"limits": {"cpu": "2", "memory": "1Gi"}}, "Guaranteed"),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "1Gi"}}, "Burstable"),
    ],
)
def test_the_native_sidecar_leaves_the_qos_class_as_it_is(resources, qos):
    body = decode_pod(resources=resources)
    assert qos_of(body["spec"]) == qos
    assert qos_of(injected(body, SIDECAR)["spec"]) == qos


def test_the_metrics_port_is_declared_only_where_one_was_chosen():
    chosen = SidecarTemplate("a:1", "PEM", metrics_port=9500)
    assert native(decode_pod(), chosen)["ports"][0]["containerPort"] == 9500
    assert "ports" not in native(decode_pod())
    assert "ports" not in attached(injected(decode_pod()), chosen)


@pytest.mark.parametrize(
    ("of_policy", "of_operator", "found"),
    [(None, 0, None), (None, 9465, "9465"), (9470, 9465, "9470"), (9470, 0, "9470")],
)
def test_a_metrics_port_stands_on_the_pod_where_prometheus_finds_it(of_policy, of_operator, found):
    template = SidecarTemplate("a:1", "PEM", metrics_port=of_operator)
    body = injected(decode_pod(), SidecarSpec(metrics_port=of_policy), template)
    assert body["metadata"]["annotations"].get("windrow.dev/metrics-port") == found
    # What is attached later, by another operator's settings, listens where the pod says.
    port = next(e for e in attached(body)["env"] if e["name"] == "WINDROW_METRICS_PORT")
    assert port["value"] == (found or "0")


# --- the sidecar in both forms --------------------------------------------------------------------


@pytest.fixture(params=["attach", "sidecar"])
def sidecar_of(request):
    """Return the sidecar of a pod, in each form."""
    if request.param == "sidecar":
        return native
    return lambda body, template=OWN_IMAGE: attached(injected(body), template)


def test_the_sidecar_knows_the_operator_and_proves_who_it_is(sidecar_of):
    sidecar = sidecar_of(decode_pod())
    env = {entry["name"]: entry.get("value") for entry in sidecar["env"]}
    assert env["WINDROW_OPERATOR_ADDRESS"] == "10.0.0.1:8443"
    assert env["WINDROW_OPERATOR_CA"] == "PEM"
    token = next(m for m in sidecar["volumeMounts"] if m["name"] == "windrow-token")
    assert env["WINDROW_TOKEN_FILE"] == f"{token['mountPath']}/token"
    assert token["readOnly"]


def test_the_sidecar_asks_for_no_privilege(sidecar_of):
    context = sidecar_of(decode_pod())["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_sidecar_runs_as_decodes_user_and_group(sidecar_of):
    body = decode_pod(securityContext={"runAsUser": 1001})
    body["spec"]["securityContext"] = {"runAsUser": 7, "runAsGroup": 8, "runAsNonRoot": True}
    context = sidecar_of(body, TEMPLATE)["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (1001, 8, True)


def test_without_a_known_user_only_decodes_own_image_is_run(sidecar_of):
    with pytest.raises(Refusal, match="names no user"):
        sidecar_of(decode_pod(), TEMPLATE)
    assert sidecar_of(decode_pod())["image"] == "sglang"


def test_shared_memory_and_the_served_model_are_mounted_and_nothing_else_of_decodes(sidecar_of):
    mounts = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "models", "mountPath": "/models"},
        {"name": "secrets", "mountPath": "/secrets"},
        {"name": "part", "mountPath": "/models/chat/part", "subPath": "a"},
    ]
    body = pod(args=[*DECODE_ARGS, "--model-path=/models/chat"], volumeMounts=mounts)
    found = {m["mountPath"]: m.get("readOnly", False) for m in sidecar_of(body)["volumeMounts"]}
    assert served_model(body) == "/models/chat"
    assert found.pop("/dev/shm") is False
    assert found.pop("/models") is True
    assert set(found) == {"/run/windrow", "/var/run/secrets/windrow.dev"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WINDROW_LOG_DIR", "/logs"),
        ("WINDROW_COPY_RATE", "2Gi"),
        ("WINDROW_MPS_PRIORITY", "normal"),
    ],
)
def test_what_decode_says_of_logs_and_rates_is_the_sidecars_too(name, value, sidecar_of):
    said = {"name": name, "value": value}
    assert said in sidecar_of(decode_pod(env=[said]))["env"]


# --- the attached sidecar -------------------------------------------------------------------------


def test_the_attached_sidecar_sees_decodes_processes_and_has_what_a_pod_can_take_later():
    sidecar = attached(injected(decode_pod()))
    assert sidecar["name"] == "windrow-1"
    assert sidecar["targetContainerName"] == "main"
    # What an ephemeral container may not have.
    assert not {"resources", "ports", "restartPolicy", "livenessProbe"} & sidecar.keys()


def test_the_next_attached_sidecar_has_the_next_name():
    body = injected(decode_pod())
    body["spec"]["ephemeralContainers"] = [{"name": "windrow-1"}, {"name": "debugger"}]
    assert attached(body)["name"] == "windrow-2"


def test_the_user_that_the_runtime_reports_is_taken_where_none_is_declared():
    status = {"name": "main", "user": {"linux": {"uid": 0, "gid": 5}}}
    context = attached(injected(decode_pod()), TEMPLATE, containerStatuses=[status])
    assert context["securityContext"]["runAsUser"] == 0
    assert context["securityContext"]["runAsGroup"] == 5


@pytest.mark.parametrize("sharing", ["auto", "spatial", "temporal"])
def test_both_containers_are_told_how_the_gpu_is_to_be_shared_in_both_forms(sharing):
    made = injected(decode_pod(), ATTACH, sharing=sharing)
    early = injected(decode_pod(), SIDECAR, sharing=sharing)["spec"]["initContainers"][-1]
    late = attached_sidecar(OWN_IMAGE, made, ATTACH, sharing)
    containers = [*made["spec"]["containers"], early, late]
    for container in containers:
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert env["WINDROW_SHARING"] == sharing
    off = "off" if sharing == "temporal" else None
    assert env.get("WINDROW_MPS") == off, "an agent of before reads that variable"


def test_what_a_pod_says_of_its_sharing_stays():
    said = {"name": "WINDROW_SHARING", "value": "temporal"}
    (decoder,) = injected(decode_pod(env=[said]), ATTACH)["spec"]["containers"]
    assert [entry for entry in decoder["env"] if entry["name"] == said["name"]] == [said]


def test_the_attached_sidecar_mounts_only_volumes_that_the_pod_was_made_with():
    asked = SidecarSpec(volumes=[volume("rows", persistentVolumeClaim={"claimName": "rows"})])
    for claims, there in ((frozenset({"rows"}), True), (frozenset(), False)):
        body = injected(decode_pod(), asked, around=PodNamespace({}, claims))
        mounts = [mount["mountPath"] for mount in attached(body, asked=asked)["volumeMounts"]]
        assert ("/rows" in mounts) is there
