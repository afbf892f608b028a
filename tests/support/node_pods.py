"""Decode pods that only start, on a real node, and what is waited for around them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from kubernetes import client
from waiting import wait_until

ENV_STARTS = "WINDROW_NODE_STARTS"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def decode_container(image, resources):
    """A container that only waits, and says that it decodes."""
    return {
        "name": "decode",
        "image": image,
        "imagePullPolicy": "Never",
        "args": ["--disaggregation-mode", "decode"],
        "securityContext": RESTRICTED,
        "resources": resources,
    }


def apply_policy(custom, namespace, changes):
    body = {
        "apiVersion": "windrow.dev/v1alpha1",
        "kind": "HarvestPolicy",
        "metadata": {"name": "chat"},
        "spec": {"selector": {}, "objective": {"tpot": "40ms"}, "mode": "harvest", **changes},
    }
    where = ("windrow.dev", "v1alpha1", namespace, "harvestpolicies")
    custom.create_namespaced_custom_object(*where, body)


def start(core, namespace, body):
    """Create a pod; return it once it is ready, and the seconds until that was seen."""
    begin = time.monotonic()
    core.create_namespaced_pod(namespace, body)
    pod = ready_pod(core, namespace)
    return pod, time.monotonic() - begin


def note_start(name, without, with_):
    """Add a line to the file of `benchmarks.starts`, where that runs these tests; see `start`."""
    if file := os.environ.get(ENV_STARTS):
        line = {
            "case": name,
            "qos": [pod.status.qos_class for pod, _ in (without, with_)],
            "seconds": [round(seconds, 3) for _, seconds in (without, with_)],
        }
        with Path(file).open("a") as lines:
            lines.write(json.dumps(line) + "\n")


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
