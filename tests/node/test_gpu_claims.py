"""Decode and its sidecar share one claim of a GPU: real scheduler, kubelet and runtime, no GPU."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from kubernetes import client
from support.dra_driver import GROUP, FakeGpus, claim, template
from support.node_pods import (
    apply_policy,
    await_registered,
    decode_container,
    ready_pod,
    still_serves,
)
from waiting import wait_until

from windrow_lab.realnode.node import NODE_NAME

UUIDS = {"gpu-0": "GPU-00000000", "gpu-1": "GPU-00000001"}
AMOUNTS = {"cpu": "50m", "memory": "64Mi"}
DRA = {"sidecar": {"form": "sidecar", "gpuAccess": "dra"}}
AUTO = {"sidecar": {"form": "sidecar"}}
ATTACHED = {"mode": "observe"}


@pytest.fixture(scope="module")
def gpus(node, kube):
    with FakeGpus(kube, node.kubelet, NODE_NAME, UUIDS):
        yield


@pytest.fixture(scope="module")
def operator(start_operator):
    return start_operator(
        *("--sidecar-command", "/pause", "--sidecar-cpu", "50m", "--sidecar-memory", "64Mi")
    )


@pytest.fixture
def place(kube, gpus, operator):
    """Return a function that makes a namespace under a policy; None: under none."""
    core, made = client.CoreV1Api(kube), []

    def make(policy):
        name = f"gpus-{uuid.uuid4().hex[:8]}"
        core.create_namespace({"metadata": {"name": name}})
        made.append(name)
        if policy is not None:
            apply_policy(client.CustomObjectsApi(kube), name, policy)
            await_registered(kube, name)
        wait_until(
            lambda: core.list_namespaced_service_account(name).items, "the default service account"
        )
        return name

    yield make
    for name in made:
        core.delete_namespace(name)
    # The devices are free again for the next test.
    wait_until(lambda: not claims(kube), "the claims are gone")


def claims(kube, namespace=None):
    api = client.CustomObjectsApi(kube)
    if namespace is None:
        return api.list_cluster_custom_object(*GROUP, "resourceclaims")["items"]
    return api.list_namespaced_custom_object(*GROUP, namespace, "resourceclaims")["items"]


def decode_pod(image, **of_claim):
    resources = {
        "requests": AMOUNTS,
        "limits": AMOUNTS,
        "claims": [{"name": "mine", "request": "gpu"}],
    }
    spec = {
        "terminationGracePeriodSeconds": 0,
        "containers": [decode_container(image, resources)],
        "resourceClaims": [{"name": "mine", **of_claim}],
    }
    return {"metadata": {"name": "decode"}, "spec": spec}


def device_seen(status):
    """Return what a container's first process has as its visible devices."""
    number = status.container_id.rpartition("/")[2]

    def is_its(process):
        return process.name.isdigit() and number in (process / "cgroup").read_text()

    (process,) = [process for process in Path("/proc").iterdir() if is_its(process)]
    lines = (process / "environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if line).get("NVIDIA_VISIBLE_DEVICES")


def gpu_seen(status):
    """Return the GPU that a container sees, once it does.

    A container without a probe is ready as its process starts: that may still be the runtime's own.
    """
    return wait_until(
        lambda: (seen := device_seen(status)) in UUIDS.values() and seen, "it sees a GPU"
    )


def native_sidecar(core, namespace):
    def started():
        statuses = core.read_namespaced_pod("decode", namespace).status.init_container_statuses
        return statuses and statuses[0].state.running and statuses[0]

    return wait_until(started, "the sidecar runs")


@pytest.mark.parametrize("policy", [DRA, AUTO])
def test_decode_and_its_native_sidecar_see_the_one_gpu_of_their_claim(kube, image, place, policy):
    core, api = client.CoreV1Api(kube), client.CustomObjectsApi(kube)
    namespace = place(policy)
    api.create_namespaced_custom_object(
        *GROUP, namespace, "resourceclaimtemplates", template("one")
    )
    core.create_namespaced_pod(namespace, decode_pod(image, resourceClaimTemplateName="one"))
    pod = ready_pod(core, namespace)
    sidecar = native_sidecar(core, namespace)
    decode = pod.status.container_statuses[0]
    seen = gpu_seen(decode)
    assert gpu_seen(sidecar) == seen
    (made,) = claims(kube, namespace)
    (result,) = made["status"]["allocation"]["devices"]["results"]
    assert UUIDS[result["device"]] == seen
    assert pod.status.qos_class == "Guaranteed"
    assert pod.metadata.annotations["windrow.dev/gpu-access"].startswith("dra: ")
    assert still_serves(core, namespace)


def test_a_claim_that_does_not_exist_holds_a_pod_up_as_it_does_without_windrow(kube, image, place):
    core, api = client.CoreV1Api(kube), client.CustomObjectsApi(kube)
    plain, ours = place(None), place(DRA)

    for namespace in (plain, ours):
        core.create_namespaced_pod(namespace, decode_pod(image, resourceClaimName="later"))
    waiting = [core.read_namespaced_pod("decode", namespace) for namespace in (plain, ours)]
    # The scheduler does not even try them, so no condition tells of it.
    assert [(pod.status.phase, pod.spec.node_name) for pod in waiting] == [("Pending", None)] * 2
    assert waiting[0].spec.resource_claims == waiting[1].spec.resource_claims
    for namespace in (plain, ours):
        api.create_namespaced_custom_object(*GROUP, namespace, "resourceclaims", claim("later"))
    without, with_ = ready_pod(core, plain), ready_pod(core, ours)
    assert with_.status.qos_class == without.status.qos_class == "Guaranteed"
    assert gpu_seen(native_sidecar(core, ours)) == gpu_seen(with_.status.container_statuses[0])


def test_an_attached_sidecar_has_no_claim_and_the_policys_events_say_who_must_do_what(
    kube, image, place
):
    core, api = client.CoreV1Api(kube), client.CustomObjectsApi(kube)
    namespace = place(ATTACHED)
    api.create_namespaced_custom_object(*GROUP, namespace, "resourceclaims", claim("mine"))
    core.create_namespaced_pod(namespace, decode_pod(image, resourceClaimName="mine"))
    pod = ready_pod(core, namespace)
    decode = pod.status.container_statuses[0]
    gpu_seen(decode)

    def attached():
        statuses = core.read_namespaced_pod("decode", namespace).status.ephemeral_container_statuses
        return statuses and statuses[0].state.running and statuses[0]

    assert device_seen(wait_until(attached, "the sidecar is attached")) is None
    assert len(claims(kube, namespace)) == 1

    def told():
        return [
            event.message
            for event in core.list_namespaced_event(namespace).items
            if event.reason == "GpuNotShared"
        ]

    assert "sidecar.form: sidecar" in wait_until(told, "the event is there")[0]
    assert still_serves(core, namespace)
