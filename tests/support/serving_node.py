"""A namespace of the real node whose decode pod serves, and what is asked of it."""

from __future__ import annotations

from contextlib import contextmanager

import httpx
from kubernetes import client
from support.requests import ask
from waiting import wait_until

from windrow_lab.realnode import pods as realpods

WITHIN_S = 150
GROUP = ("windrow.dev", "v1alpha1")


@contextmanager
def a_namespace_that_serves(kube, namespace, out, **of_spec):
    """Make it with a policy and a decode pod, and wait until that serves; it ends with the block.

    `out`: directory of the node that jobs may write below; None: there is none.
    """
    core, custom = client.CoreV1Api(kube), client.CustomObjectsApi(kube)
    core.create_namespace(realpods.namespace(namespace))
    policy = realpods.policy(namespace, out)
    custom.create_namespaced_custom_object(*GROUP, namespace, "harvestpolicies", policy)
    try:
        start_decode(core, namespace, **of_spec)
        yield
    finally:
        pod = read(core, namespace)
        for container in ("decode", *(c.name for c in pod.spec.ephemeral_containers or ())):
            log = core.read_namespaced_pod_log("decode", namespace, container=container)
            print(namespace, container, log)
        core.delete_namespace(namespace)


def start_decode(core, namespace, **of_spec):
    """Create the decode pod once pods are prepared here, and wait until it serves."""
    pod = realpods.decode_pod(namespace, **of_spec)

    def prepared():
        tried = core.create_namespaced_pod(namespace, pod, dry_run="All")
        return "windrow-run" in {volume.name for volume in tried.spec.volumes}

    wait_until(prepared, "decode pods are prepared")
    core.create_namespaced_pod(namespace, pod)
    wait_until(lambda: is_ready(core, namespace), "decode serves", seconds=WITHIN_S)


def read(core, namespace):
    return core.read_namespaced_pod("decode", namespace)


def is_ready(core, namespace):
    conditions = read(core, namespace).status.conditions or ()
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


def endpoint(core, namespace):
    return f"http://{read(core, namespace).status.pod_ip}:{realpods.PORT}"


def answers(core, namespace):
    with httpx.Client(timeout=60, trust_env=False) as http:
        ask(http, endpoint(core, namespace))
    return True


def submit(kube, namespace, name, destination, steps, **of_output):
    job = realpods.finetune_job(namespace, name, destination, steps, **of_output)
    client.CustomObjectsApi(kube).create_namespaced_custom_object(
        *GROUP, namespace, "finetunejobs", job
    )


def status(kube, namespace, name):
    where = (*GROUP, namespace, "finetunejobs", name)
    return client.CustomObjectsApi(kube).get_namespaced_custom_object(*where).get("status") or {}


def step_of(kube, namespace, name):
    return (status(kube, namespace, name).get("progress") or {}).get("step", 0)


def ends(kube, namespace, name):
    """Return the job's status once it has succeeded; fails when it cannot any more."""
    found = status(kube, namespace, name)
    assert found.get("state") not in ("Failed", "Invalid"), found
    return found if found.get("state") == "Succeeded" else None
