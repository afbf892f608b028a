"""The whole chain on a real node: the chart, a decode pod, an attached sidecar, a job."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import fsspec
import pytest
from kubernetes import client
from served_pod import (
    NAMESPACE,
    OPERATOR_ARCHIVE,
    POD,
    SYSTEM,
    WITHIN_S,
    Requests,
    ask,
    await_prepared,
    await_step,
    chart_command,
    decode_pod,
    forget_jobs,
    helm,
    import_image,
    is_ready,
    policy_of,
    print_logs,
    programs,
    read,
    status,
    submit,
    succeeds,
)
from waiting import wait_until

from windrow_operator.injection import TOKEN_DIR, TRUST_CONFIG_MAP, TRUST_FILE
from windrow_sidecar.finetune.data.remote import Credentials, storage_options

# Of one release: how soon a pod that is gone is given up, and whose Secrets may be read.
VALUES = (
    *("--set", "operator.arguments={--gone-grace-seconds=2,--backoff-base-seconds=1}"),
    *("--set", f"secrets.namespaces={{{NAMESPACE}}}"),
)


@pytest.fixture(scope="module")
def chart(node, kube):
    """The chart, installed with the operator's own image and rights."""
    if not OPERATOR_ARCHIVE.exists():
        pytest.skip("no image of the operator: `make images` builds it")
    import_image(node, OPERATOR_ARCHIVE)
    core = client.CoreV1Api(kube)
    # What says that directories of the node may be mounted here.
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    core.create_namespace({"metadata": {"name": NAMESPACE, "labels": labels}})
    command = chart_command(*VALUES)
    try:
        helm(*command)
    except AssertionError:
        print_logs(kube)
        raise
    yield command
    print_logs(kube)
    forget_jobs(kube)
    core.delete_namespace(NAMESPACE)


@pytest.fixture(scope="module")
def serving(chart, kube, image, tmp_path_factory):
    """A namespace with a policy; its decode pod serves. Yields a folder for adapters."""
    core, custom = client.CoreV1Api(kube), client.CustomObjectsApi(kube)
    out = tmp_path_factory.mktemp("out")
    policy = policy_of({**programs(), "out": str(out)})
    custom.create_namespaced_custom_object(
        "windrow.dev", "v1alpha1", NAMESPACE, "harvestpolicies", policy
    )
    await_prepared(core, image)
    begin_serving(core, image)
    yield out
    for container in ("decode", *attached(read(core))):
        name = read(core).metadata.name
        print(container, core.read_namespaced_pod_log(name, NAMESPACE, container=container))


def begin_serving(core, image, name=POD):
    core.create_namespaced_pod(NAMESPACE, decode_pod(image, name))
    wait_until(lambda: is_ready(core), "decode serves", seconds=WITHIN_S)


def attached(pod):
    return {container.name for container in pod.spec.ephemeral_containers or ()}


def is_agent(process):
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"windrow_sidecar.agent" in words


def agents():
    return [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and is_agent(pid)]


def begun(core, name):
    """Return what the events of a job say of how each placement began."""
    found = core.list_namespaced_event(NAMESPACE, field_selector=f"involvedObject.name={name}")
    return {e.message for e in found.items if e.reason in ("Started", "Resumed")}


@pytest.mark.timeout(600)
def test_a_job_reaches_its_bucket_though_its_sidecar_and_then_its_pod_are_taken_away(
    serving, kube, image, bucket
):
    core = client.CoreV1Api(kube)
    url, secret = bucket
    data = {name: base64.b64encode(value.encode()).decode() for name, value in secret.items()}
    labels = {"windrow.dev/credentials": "true"}
    body = {"metadata": {"name": "s3", "labels": labels}, "data": data}
    core.create_namespaced_secret(NAMESPACE, body)
    first = read(core)
    assert not attached(first), "nothing is attached before a job waits"
    submit(kube, "tone", url, steps=24, secretRef={"name": "s3"})
    await_step(kube, "tone", 5)
    assert ask(read(core).status.pod_ip) > 0

    # What the kubelet has brought into the pod is what the operator tells it to trust.
    trusted = core.read_namespaced_config_map(TRUST_CONFIG_MAP, NAMESPACE).data[TRUST_FILE]
    pods = {Path(pid, "root" + TOKEN_DIR, TRUST_FILE).read_text() for pid in agents()}
    assert pods == {trusted}

    for pid in agents():
        os.kill(int(pid.name), 9)
    wait_until(lambda: attached(read(core)) == {"windrow-1", "windrow-2"}, "a second sidecar")
    await_step(kube, "tone", 9)
    pod = read(core)
    (decode,) = pod.status.container_statuses
    assert decode.restart_count == 0
    assert is_ready(core)

    core.delete_namespaced_pod(POD, NAMESPACE)
    wait_until(lambda: not core.list_namespaced_pod(NAMESPACE).items, "the pod is gone")
    begin_serving(core, image, "decode-b")
    wait_until(lambda: succeeds(kube, "tone"), "the job succeeds", seconds=WITHIN_S)
    # From its checkpoint in the bucket, not from step 0.
    (there,) = [said for said in begun(core, "tone") if "decode-b" in said]
    assert there.startswith("Resumed on ")
    system = fsspec.filesystem("s3", **storage_options(url, Credentials("s3", secret)))
    assert system.exists(f"{url}/adapter_model.safetensors")
    assert ask(read(core).status.pod_ip) > 0


@pytest.mark.timeout(600)
def test_an_upgrade_in_the_middle_of_a_job_fails_no_request_and_keeps_its_placement(
    chart, kube, serving
):
    core = client.CoreV1Api(kube)
    submit(kube, "steady", serving / "steady", steps=100_000)
    await_step(kube, "steady", 2)
    before, pod = status(kube, "steady"), read(core)
    operators = running_operators(core)
    helm("test", "windrow", "--namespace", SYSTEM, "--timeout", "60s")
    policy = {"name": "by-values", "namespace": NAMESPACE}
    policy["spec"] = {"selector": {"matchLabels": {"app": "none"}}, "objective": {"tpot": "1s"}}
    with Requests(pod.status.pod_ip) as requests:
        requests.await_more(3)
        more = ["--set", "operator.priorityClassName=system-cluster-critical"]
        helm(*chart, *more, "--set-json", f"policies={json.dumps([policy])}")
        wait_until(lambda: operators.isdisjoint(running_operators(core)), "operators are replaced")
        await_step(kube, "steady", before["progress"]["step"] + 2)
        requests.await_more(3)
    after = status(kube, "steady")
    assert (after["epoch"], after["state"]) == (before["epoch"], "Running")
    assert same_containers(pod, read(core))
    assert {"chat", "by-values"} <= kinds(kube)["harvestpolicies"]


def running_operators(core):
    chosen = "app.kubernetes.io/name=windrow-operator"
    pods = core.list_namespaced_pod(SYSTEM, label_selector=chosen).items
    return {
        pod.metadata.uid
        for pod in pods
        if not pod.metadata.deletion_timestamp and pod.status.phase == "Running"
    }


def same_containers(before, after):
    def ids(pod):
        of_both = (*pod.status.container_statuses, *pod.status.ephemeral_container_statuses)
        return [(c.name, c.container_id, c.restart_count, bool(c.state.running)) for c in of_both]

    return before.metadata.uid == after.metadata.uid and ids(before) == ids(after)


@pytest.mark.timeout(300)
def test_uninstalling_while_it_harvests_leaves_serving_and_what_users_made(chart, kube, serving):
    core = client.CoreV1Api(kube)
    pod = read(core)
    assert status(kube, "steady")["state"] == "Running", "it harvests"
    with Requests(pod.status.pod_ip) as requests:
        requests.await_more(3)
        helm("uninstall", "windrow", "--namespace", SYSTEM, "--wait")
        wait_until(lambda: not running_operators(core), "no operator runs")
        requests.await_more(10)
    assert is_ready(core)
    assert same_containers(pod, read(core))
    found = kinds(kube)
    assert found["harvestpolicies"] == {"chat"}
    assert "steady" in found["finetunejobs"]
    hooks = client.AdmissionregistrationV1Api(kube).list_mutating_webhook_configuration().items
    assert "windrow-operator" not in {hook.metadata.name for hook in hooks}


def kinds(kube):
    custom = client.CustomObjectsApi(kube)
    return {
        plural: {
            item["metadata"]["name"]
            for item in custom.list_namespaced_custom_object(
                "windrow.dev", "v1alpha1", NAMESPACE, plural
            )["items"]
        }
        for plural in ("harvestpolicies", "finetunejobs")
    }
