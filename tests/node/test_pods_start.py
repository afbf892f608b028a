"""Decode pods become ready exactly as they do without Windrow, whatever goes wrong around them."""

from __future__ import annotations

import contextlib

import pytest
from kubernetes import client
from pod_cases import (
    CASES,
    MISSING_IMAGE,
    NATIVE,
    WITHOUT_IMAGE,
    Case,
    await_registered,
    decode_pod,
    impostor,
    make_namespace,
    ready_pod,
    still_serves,
)
from waiting import wait_until


@pytest.fixture
def place(kube):
    """Return a function that makes a namespace for a case, and what the case finds there."""
    made = []

    def make(case):
        made.append(make_namespace(kube, case))
        return made[-1]

    yield make
    for name in made:  # the node has room for a few of them at a time
        client.CoreV1Api(kube).delete_namespace(name)


def compare(kube, image, place, case):
    """Run the pod without Windrow and with it; return the latter once both are ready."""
    core = client.CoreV1Api(kube)
    plain = place(Case(policy=None, level=case.level, quota=case.quota, limits=case.limits))
    ours = place(case)
    if case.policy is not None and not case.webhook:
        await_registered(kube, ours)
    core.create_namespaced_pod(plain, decode_pod(case, image, {"windrow.dev/inject": "disabled"}))
    core.create_namespaced_pod(ours, decode_pod(case, image))
    without, with_ = ready_pod(core, plain), ready_pod(core, ours)
    assert with_.status.qos_class == without.status.qos_class
    assert [c.image for c in with_.spec.containers] == [c.image for c in without.spec.containers]
    assert with_.spec.containers[0].resources == without.spec.containers[0].resources
    return with_


@pytest.fixture(scope="module")
def operator(start_operator):
    # The image's own program in the agent's place: here it only has to start.
    return start_operator(
        *("--sidecar-command", "/pause", "--sidecar-cpu", "50m", "--sidecar-memory", "64Mi")
    )


@pytest.fixture
def answers(kube, operator):
    """Return a function that lets something else answer in the operator's place."""
    with contextlib.ExitStack() as stack:
        yield lambda what, namespace: stack.enter_context(impostor(kube, what, namespace))


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].webhook])
def test_a_decode_pod_is_ready_with_the_qos_class_that_it_has_without_windrow(
    kube, image, place, operator, name
):
    case, core = CASES[name], client.CoreV1Api(kube)
    pod = compare(kube, image, place, case)
    namespace = pod.metadata.namespace
    prepared = "windrow-run" in {volume.name for volume in pod.spec.volumes}
    native = case.policy is not None and case.policy.get("sidecar", {}).get("form") == "sidecar"
    # A native sidecar does not fit into an exact quota: then nothing at all is changed.
    refused = native and case.quota
    assert prepared == ((case.policy is not None or case.asks) and not refused)
    assert bool(pod.spec.init_containers) == (native and not refused)

    def sidecar_runs():
        status = core.read_namespaced_pod("decode", namespace).status
        found = status.ephemeral_container_statuses or status.init_container_statuses
        return found and found[0].state.running

    if (case.policy or {}).get("mode") == "observe" or (native and not refused):
        wait_until(sidecar_runs, "the sidecar runs")
    assert still_serves(core, namespace)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].webhook])
def test_a_decode_pod_is_ready_whatever_answers_for_the_webhook(
    kube, image, place, operator, answers, name
):
    case = CASES[name]
    core = client.CoreV1Api(kube)
    plain = place(Case(policy=None))
    ours = place(Case(policy=None))
    server = answers(case.webhook, ours)
    core.create_namespaced_pod(plain, decode_pod(case, image))

    def asked():
        # The API server takes up a registration after a moment.
        core.create_namespaced_pod(ours, decode_pod(case, image), dry_run="All")
        return server.asked.is_set() or case.webhook == "down"

    wait_until(asked, "the API server asks the impostor")
    core.create_namespaced_pod(ours, decode_pod(case, image))
    with_, without = ready_pod(core, ours), ready_pod(core, plain)
    assert with_.status.qos_class == without.status.qos_class
    assert with_.metadata.labels == without.metadata.labels
    assert still_serves(core, ours)


@pytest.mark.parametrize("name", WITHOUT_IMAGE)
def test_a_decode_pod_is_ready_where_the_sidecars_image_is_not_to_be_had(
    kube, image, place, start_operator, name
):
    start_operator("--sidecar-image", MISSING_IMAGE)
    case, core = WITHOUT_IMAGE[name], client.CoreV1Api(kube)
    pod = compare(kube, image, place, case)
    namespace = pod.metadata.namespace
    if case.policy == NATIVE:
        assert pod.spec.init_containers is None
        assert "windrow-run" not in {volume.name for volume in pod.spec.volumes}
        return

    def pulling_fails():
        statuses = core.read_namespaced_pod("decode", namespace).status.ephemeral_container_statuses
        waiting = statuses and statuses[0].state.waiting
        return waiting and "Image" in waiting.reason

    wait_until(pulling_fails, "the sidecar's image is not pulled")
    ready_pod(core, namespace)
    assert still_serves(core, namespace)
