"""Pods made harvestable by the real API server calling the real webhook."""

import signal

import httpx
import pytest
from decode_pods import DECODE_PODS, OTHER_ENGINES
from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families
from waiting import wait_until

HTTP_WITHIN_S = 5


@pytest.fixture
def under_policy(cluster):
    """Apply a policy for this test's namespace; return once the API server acts by it."""

    def apply(**spec):
        cluster.policy(**{"selector": {}, **spec})
        wait_until(
            lambda: is_prepared(cluster.create_pod("probe", dry_run="All")),
            "decode pods of the namespace are prepared",
        )

    return apply


def is_prepared(pod):
    return (pod.metadata.labels or {}).get("windrow.dev/decode") == "true"


def create(cluster, body, name):
    body = {**body, "metadata": {"name": name, "labels": body["metadata"]["labels"]}}
    # Warnings come as headers beside the object.
    pod, _, headers = cluster.core.create_namespaced_pod_with_http_info(cluster.namespace, body)
    return pod, headers.get("Warning") or ""


def counted(cluster, metric, **labels):
    url = f"http://127.0.0.1:{cluster.operator.state['metricsPort']}/metrics"
    text = httpx.get(url, timeout=HTTP_WITHIN_S).text
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == metric and labels.items() <= sample.labels.items()
    ]
    return sum(sample.value for sample in samples)


def test_a_decode_pod_is_prepared_under_a_policy_and_the_rule_is_told(cluster, under_policy):
    under_policy()
    pod = cluster.create_pod("decode-0")
    assert pod.metadata.annotations["windrow.dev/injected-by"] == "arguments"
    # Nothing that could keep it from starting: no container, no image, no resources.
    assert pod.spec.init_containers is None
    assert len(pod.spec.containers) == 1
    assert pod.spec.containers[0].resources.requests is None
    wait_until(
        lambda: [
            event
            for event in cluster.core.list_namespaced_event(cluster.namespace).items
            if event.reason == "Injected" and "`arguments`" in event.message
        ],
        "an event that names the rule",
    )


def test_without_a_policy_a_decode_pod_is_not_even_asked_about(cluster, kube):
    assert not is_prepared(cluster.create_pod("decode-0"))
    assert not is_prepared(cluster.create_pod("off", {"windrow.dev/inject": "disabled"}))
    assert is_prepared(cluster.create_pod("asks", {"windrow.dev/inject": "enabled"}))
    hooks = client.AdmissionregistrationV1Api(kube).read_mutating_webhook_configuration(
        "windrow-operator"
    )
    for hook in hooks.webhooks:
        for expression in hook.namespace_selector.match_expressions:
            assert expression.operator == "NotIn" or cluster.namespace not in expression.values


def test_a_policy_that_does_not_select_the_pod_leaves_it_alone(cluster, under_policy):
    under_policy()
    cluster.custom.patch_namespaced_custom_object(
        *("windrow.dev", "v1alpha1", cluster.namespace, "harvestpolicies", "chat"),
        {"spec": {"selector": {"matchLabels": {"app": "other"}}}},
    )
    wait_until(
        lambda: not is_prepared(cluster.create_pod("probe", dry_run="All")),
        "the operator goes by the policy's new selector",
    )
    assert not is_prepared(cluster.create_pod("decode-0"))


@pytest.mark.parametrize("stack", DECODE_PODS)
def test_the_api_server_asks_about_the_decode_pods_of_each_stack(cluster, under_policy, stack):
    under_policy()
    body, rule = DECODE_PODS[stack]
    pod, _ = create(cluster, body, "decode-0")
    assert pod.metadata.annotations["windrow.dev/injected-by"] == rule


def test_pods_of_other_engines_and_other_pods_pass_untouched_and_the_former_are_counted(
    cluster, under_policy
):
    under_policy()
    metric = "windrow_pods_not_injected_total"
    before = counted(cluster, metric, reason="OtherEngine")
    for number, stack in enumerate(OTHER_ENGINES):
        pod, warning = create(cluster, OTHER_ENGINES[stack], f"other-{number}")
        assert not is_prepared(pod)
        assert "cannot drive" in warning
    assert counted(cluster, metric, reason="OtherEngine") - before == len(OTHER_ENGINES)
    web = {
        "metadata": {"labels": {"app": "web"}},
        "spec": {"containers": [{"name": "w", "image": "n"}]},
    }
    pod, warning = create(cluster, web, "web")
    assert not is_prepared(pod)
    assert warning == ""


def test_a_claim_that_is_not_there_is_left_out_with_a_warning(cluster, under_policy):
    volume = {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "none"}}
    under_policy(sidecar={"volumes": [volume]})
    pod, warning = create(cluster, DECODE_PODS["plain"][0], "decode-0")
    assert is_prepared(pod)
    assert "windrow-data" not in {entry.name for entry in pod.spec.volumes}
    assert "claim none is not bound" in warning

    def told():
        events = cluster.core.list_namespaced_event(cluster.namespace).items
        return [e for e in events if e.reason == "VolumeLeftOut"]

    (event,) = wait_until(told, "an event about the policy")
    assert (event.involved_object.kind, event.involved_object.name) == ("HarvestPolicy", "chat")
    assert "pod decode-0: volume data of the policy is not mounted" in event.message


def test_a_native_sidecar_is_part_of_the_pod_where_the_pod_is_still_admitted(cluster, under_policy):
    under_policy(sidecar={"form": "sidecar"})
    pod = cluster.create_pod("decode-0")
    (sidecar,) = pod.spec.init_containers
    assert (sidecar.name, sidecar.restart_policy) == ("windrow", "Always")
    env = {entry.name: entry.value for entry in sidecar.env}
    assert env["WINDROW_OPERATOR_ADDRESS"] == cluster.operator.state["attachAddress"]
    assert env["WINDROW_OPERATOR_CA"].encode() == cluster.authority()
    assert pod.status.qos_class == "BestEffort"


def test_a_native_sidecar_that_the_namespace_would_refuse_leaves_the_pod_as_it_came(
    cluster, under_policy
):
    under_policy(sidecar={"form": "sidecar"})
    small = {"type": "Container", "max": {"cpu": "500m", "memory": "1Gi"}}
    limits = {"metadata": {"name": "small"}, "spec": {"limits": [small]}}
    cluster.core.create_namespaced_limit_range(cluster.namespace, limits)
    body = {
        "metadata": {"labels": {"app": "chat"}},
        "spec": {
            "containers": [
                {
                    "name": "decode",
                    "image": "none",
                    "args": ["--disaggregation-mode", "decode"],
                    "resources": {"limits": {"cpu": "500m", "memory": "64Mi"}},
                }
            ]
        },
    }
    name = iter(range(1000))

    def limited():
        pod, warning = create(cluster, body, f"decode-{next(name)}")
        return (pod, warning) if "maximum cpu usage" in warning else None

    # The API server's own view of limit ranges lags behind by a moment.
    pod, warning = wait_until(limited, "the limit range is in force")
    assert pod.spec.init_containers is None
    assert not is_prepared(pod)
    assert pod.status.qos_class == "Guaranteed"
    assert "the pod is left as it came" in warning


def test_pods_are_created_while_the_webhook_is_down_and_prepared_when_it_is_back(cluster):
    cluster.operator.end(signal.SIGKILL)
    try:
        assert not is_prepared(cluster.pod("down"))
    finally:
        cluster.operator.start()
    assert is_prepared(cluster.pod("up"))


def test_the_registration_can_never_keep_a_pod_from_starting(cluster, under_policy, kube):
    under_policy()
    api = client.AdmissionregistrationV1Api(kube)
    hooks = api.read_mutating_webhook_configuration("windrow-operator").webhooks
    assert {hook.name for hook in hooks} == {"requested.windrow.dev", "policy.windrow.dev"}
    for hook in hooks:
        assert hook.failure_policy == "Ignore"
        assert hook.timeout_seconds == 2
        assert hook.reinvocation_policy == "IfNeeded"
        assert [rule.operations for rule in hook.rules] == [["CREATE"]]
        assert "not-disabled" in {condition.name for condition in hook.match_conditions}
        (selector,) = hook.namespace_selector.match_expressions
        if hook.name.startswith("policy"):
            assert cluster.namespace in selector.values
            assert selector.operator == "In"
        else:
            assert selector.values == ["kube-system", "windrow-system"]
            assert selector.operator == "NotIn"


# --- the form attach ------------------------------------------------------------------------------


def make_ready(cluster, name):
    """Say what a kubelet says of a pod whose containers run and are ready."""
    status = {
        "phase": "Running",
        "containerStatuses": [
            {
                "name": "decode",
                "image": "none",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {}},
                "user": {"linux": {"uid": 1000, "gid": 1000}},
            }
        ],
    }
    cluster.core.patch_namespaced_pod_status(name, cluster.namespace, {"status": status})


def sidecars_of(cluster, name="decode-0"):
    pod = cluster.core.read_namespaced_pod(name, cluster.namespace)
    return pod.spec.ephemeral_containers or []


def end_sidecar(cluster, name, sidecar):
    terminated = {"exitCode": 137, "reason": "Error", "finishedAt": "2025-01-01T12:00:00Z"}
    status = {
        "name": sidecar,
        "image": "none",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": terminated},
    }
    body = {"status": {"ephemeralContainerStatuses": [status]}}
    cluster.core.patch_namespaced_pod_status(name, cluster.namespace, body)


def test_an_observing_policy_gets_a_sidecar_once_decode_is_ready(cluster, under_policy):
    under_policy(mode="observe")
    cluster.create_pod("decode-0")
    assert sidecars_of(cluster) == []
    make_ready(cluster, "decode-0")
    (sidecar,) = wait_until(lambda: sidecars_of(cluster), "a sidecar is attached")
    assert (sidecar.name, sidecar.target_container_name) == ("windrow-1", "decode")
    assert sidecar.security_context.run_as_user == 1000

    def reasons():
        events = cluster.core.list_namespaced_event(cluster.namespace).items
        return {event.reason for event in events}

    wait_until(lambda: "SidecarAttached" in reasons(), "an event says so")
    # One whose container is gone is followed by the next name.
    end_sidecar(cluster, "decode-0", "windrow-1")
    wait_until(
        lambda: {c.name for c in sidecars_of(cluster)} == {"windrow-1", "windrow-2"},
        "the next sidecar",
    )


def test_a_harvesting_policy_gets_a_sidecar_when_a_job_waits_and_the_job_is_placed_on_it(
    cluster, under_policy
):
    under_policy()
    pod = cluster.create_pod("decode-0")
    make_ready(cluster, "decode-0")
    wait_until(
        lambda: cluster.get("harvestpolicies", "chat").get("status", {}).get("pods") == 1,
        "the operator has seen the pod",
    )
    assert sidecars_of(cluster) == []
    cluster.job()
    wait_until(lambda: sidecars_of(cluster), "a sidecar is attached")
    sidecar = cluster.attach(pod)
    sidecar.beat()
    assert sidecar.next("assign").job_name == "tone"
