"""Decode pods that only start, on a real node, and what is waited for around them."""

from __future__ import annotations

from kubernetes import client
from waiting import wait_until

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def apply_policy(custom, namespace, changes):
    body = {
        "apiVersion": "windrow.dev/v1alpha1",
        "kind": "HarvestPolicy",
        "metadata": {"name": "chat"},
        "spec": {"selector": {}, "objective": {"tpot": "40ms"}, **changes},
    }
    where = ("windrow.dev", "v1alpha1", namespace, "harvestpolicies")
    custom.create_namespaced_custom_object(*where, body)


def ready_pod(core, namespace):
    """Return the pod once it is ready."""

    def found():
        pod = core.read_namespaced_pod("decode", namespace)
        conditions = {c.type: c.status for c in pod.status.conditions or ()}
        return pod if conditions.get("Ready") == "True" else None

    return wait_until(found, f"the decode pod of {namespace} is ready")


def await_registered(kube, namespace):
    """Wait until the API server would ask about decode pods of the namespace."""
    hooks = client.AdmissionregistrationV1Api(kube)

    def asks():
        found = hooks.read_mutating_webhook_configuration("windrow-operator").webhooks
        return any(
            namespace in (expression.values or ())
            for hook in found
            for expression in hook.namespace_selector.match_expressions
        )

    wait_until(asks, "the webhook is registered for the namespace")


def still_serves(core, namespace):
    pod = core.read_namespaced_pod("decode", namespace)
    (status,) = pod.status.container_statuses
    return status.ready and status.restart_count == 0 and pod.status.phase == "Running"
