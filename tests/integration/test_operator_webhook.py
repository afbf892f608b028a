"""Injection by the real API server calling the real webhook."""

import signal

from kubernetes import client
from waiting import wait_until


def test_a_decode_pod_is_injected_and_the_rule_is_told(cluster):
    pod = cluster.pod()
    assert pod.metadata.labels["windrow.dev/decode"] == "true"
    assert pod.metadata.annotations["windrow.dev/injected-by"] == "arguments"
    (sidecar,) = pod.spec.init_containers
    assert (sidecar.name, sidecar.restart_policy) == ("windrow", "Always")
    env = {entry.name: entry.value for entry in sidecar.env}
    assert env["WINDROW_OPERATOR_ADDRESS"] == cluster.operator.state["attachAddress"]
    assert env["WINDROW_OPERATOR_CA"].encode() == cluster.authority()
    wait_until(
        lambda: [
            event
            for event in cluster.core.list_namespaced_event(cluster.namespace).items
            if event.reason == "Injected" and "`arguments`" in event.message
        ],
        "an event that names the rule",
    )


def test_a_pod_of_another_kind_passes_untouched(cluster):
    body = {
        "metadata": {"name": "web", "labels": {"app": "web"}},
        "spec": {"containers": [{"name": "web", "image": "none"}]},
    }
    pod = cluster.core.create_namespaced_pod(cluster.namespace, body)
    assert pod.metadata.labels == {"app": "web"}
    assert pod.spec.init_containers is None


def test_volumes_of_the_policy_reach_the_sidecar(cluster):
    volume = {"name": "data", "mountPath": "/data", "hostPath": {"path": "/srv/data"}}
    cluster.policy(sidecar={"volumes": [volume]})
    wait_until(
        lambda: cluster.get("harvestpolicies", "chat").get("status"),
        "the operator knows the policy",
    )
    pod = cluster.pod()
    mounts = {mount.name: mount.mount_path for mount in pod.spec.init_containers[0].volume_mounts}
    assert mounts["windrow-data"] == "/data"


def test_a_policy_without_mps_reaches_the_sidecar(cluster):
    cluster.policy(sidecar={"mps": False})
    wait_until(
        lambda: cluster.get("harvestpolicies", "chat").get("status"),
        "the operator knows the policy",
    )
    env = {entry.name: entry.value for entry in cluster.pod().spec.init_containers[0].env}
    assert env["WINDROW_MPS"] == "off"


def test_pods_are_created_while_the_webhook_is_down_and_injected_when_it_is_back(cluster):
    cluster.operator.end(signal.SIGKILL)
    try:
        assert cluster.pod("down").spec.init_containers is None
    finally:
        cluster.operator.start()
    assert cluster.pod("up").spec.init_containers[0].name == "windrow"


def test_the_registration_can_never_keep_a_pod_from_starting(cluster, kube):
    api = client.AdmissionregistrationV1Api(kube)
    (hook,) = api.read_mutating_webhook_configuration("windrow-operator").webhooks
    assert hook.failure_policy == "Ignore"
    assert hook.timeout_seconds <= 5
    assert hook.reinvocation_policy == "IfNeeded"
    (exempt,) = hook.namespace_selector.match_expressions
    assert "kube-system" in exempt.values
    assert [rule.operations for rule in hook.rules] == [["CREATE"]]
