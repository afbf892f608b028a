"""The whole chain on a real node: the chart, a decode pod, an attached sidecar, a job."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kubernetes import client
from support.requests import Requests
from support.serving_node import (
    WITHIN_S,
    a_namespace_that_serves,
    answers,
    endpoint,
    ends,
    is_ready,
    read,
    status,
    step_of,
    submit,
)
from waiting import wait_until

from windrow.conditions import get_condition
from windrow_lab.realnode.pods import SIDECAR_COMMAND, import_image

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "build" / "images"
ARCHIVE = IMAGES / "operator.tar"
NAMESPACE = "serving"


def helm(*arguments):
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def chart(node, kube):
    """The chart, installed with the operator's own image and rights."""
    if not ARCHIVE.exists():
        pytest.skip("no image of the operator: `make images` builds it")
    import_image(node, ARCHIVE)
    folder = str(ROOT / "deploy" / "helm" / "windrow")
    command = ["upgrade", "--install", "windrow", folder, "--namespace", "windrow-system"]
    command += ["--create-namespace", "--wait", "--timeout", "300s"]
    command += ["--set", "image.repository=docker.io/windrow/operator,image.pullPolicy=Never"]
    command += ["--set", f"sidecar.command={SIDECAR_COMMAND}"]
    try:
        helm(*command)
    except AssertionError:
        print_logs(kube)
        raise
    yield command
    print_logs(kube)


def print_logs(kube):
    core = client.CoreV1Api(kube)
    for pod in core.list_namespaced_pod("windrow-system").items:
        print(core.read_namespaced_pod_log(pod.metadata.name, "windrow-system")[-8000:])


@pytest.fixture(scope="module")
def serving(chart, kube, image, tmp_path_factory):
    """A namespace with a policy; its decode pod serves. Yields the folder for adapters."""
    out = tmp_path_factory.mktemp("out")
    with a_namespace_that_serves(kube, NAMESPACE, out):
        yield out


@pytest.mark.timeout(500)
def test_a_job_is_harvested_by_an_attached_sidecar_that_is_replaced_when_it_dies(serving, kube):
    core = client.CoreV1Api(kube)
    assert not read(core, NAMESPACE).spec.ephemeral_containers, (
        "nothing is attached before a job waits"
    )
    submit(kube, NAMESPACE, "tone", f"{serving}/tone", steps=24)
    wait_until(
        lambda: step_of(kube, NAMESPACE, "tone") >= 6,
        "the job has made six steps",
        seconds=WITHIN_S,
    )
    assert answers(core, NAMESPACE)
    agents = [pid for pid in processes() if runs(pid, b"windrow_sidecar.agent")]
    assert agents
    for pid in agents:
        os.kill(int(pid.name), 9)
    done = wait_until(lambda: ends(kube, NAMESPACE, "tone"), "the job succeeds", seconds=WITHIN_S)
    assert (serving / "tone" / "adapter_model.safetensors").is_file()
    assert done["epoch"] >= 1
    pod = read(core, NAMESPACE)
    assert {c.name for c in pod.spec.ephemeral_containers} == {"windrow-1", "windrow-2"}
    (decode,) = pod.status.container_statuses
    assert decode.restart_count == 0
    assert is_ready(core, NAMESPACE)
    assert answers(core, NAMESPACE)


def processes():
    return [path for path in Path("/proc").iterdir() if path.name.isdigit()]


def runs(process, module):
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    # The fork server names the module that it loads, too.
    return words[1:3] == [b"-m", module]


def identity(core):
    pod = read(core, NAMESPACE)
    (decode,) = pod.status.container_statuses
    return pod.metadata.uid, decode.container_id, decode.restart_count


@pytest.fixture(scope="module")
def long_job(serving, kube):
    """A job that trains for longer than these tests take. Yields its name."""
    submit(kube, NAMESPACE, "long", f"{serving}/long", steps=50_000)
    wait_until(
        lambda: step_of(kube, NAMESPACE, "long") >= 4,
        "the job has made four steps",
        seconds=WITHIN_S,
    )
    yield "long"
    # Where no operator is left to take its own finalizer off: the namespace is to go.
    where = ("windrow.dev", "v1alpha1", NAMESPACE, "finetunejobs", "long")
    without = {"metadata": {"finalizers": None}}
    client.CustomObjectsApi(kube).patch_namespaced_custom_object(*where, without)


@pytest.mark.timeout(600)
def test_a_job_is_harvested_in_an_image_of_the_sidecars_own(
    chart, node, kube, serving, image, tmp_path_factory
):
    archive = IMAGES / "sidecar.tar"
    if not archive.exists():
        pytest.skip("no image of the sidecar: `make images NAMES=sidecar` builds it")
    name = import_image(node, archive)
    helm(
        *chart,
        "--set-string",
        f"sidecar.command=python -m windrow_sidecar.agent,sidecar.image={name}",
    )
    namespace, core = "own-image", client.CoreV1Api(kube)
    out = tmp_path_factory.mktemp("out-of-image")
    user = {"securityContext": {"runAsUser": 0, "runAsGroup": 0}}
    with a_namespace_that_serves(kube, namespace, out, **user):
        submit(kube, namespace, "tone", f"{out}/tone", steps=8)
        wait_until(lambda: ends(kube, namespace, "tone"), "the job succeeds", seconds=2 * WITHIN_S)
        assert (out / "tone" / "adapter_model.safetensors").is_file()
        (sidecar,) = read(core, namespace).spec.ephemeral_containers
        assert sidecar.image == name
    helm(*chart)


def test_the_charts_own_test_passes(chart, serving):
    helm("test", "windrow", "--namespace", "windrow-system", "--timeout", "60s")


@pytest.mark.timeout(900)
def test_an_upgrade_replaces_the_operator_while_a_job_trains_on(chart, kube, serving, long_job):
    core, apps = client.CoreV1Api(kube), client.AppsV1Api(kube)
    before, decode, epoch = kinds(kube), identity(core), status(kube, NAMESPACE, long_job)["epoch"]
    sidecars = {c.name for c in read(core, NAMESPACE).spec.ephemeral_containers}
    where = ("windrow-operator", "windrow-system")
    generation = apps.read_namespaced_deployment(*where).metadata.generation
    with Requests(endpoint(core, NAMESPACE)) as requests:
        # Other resources, so every pod of the operator is made again.
        helm(*chart, "--set", "operator.resources.requests.cpu=60m")
        assert apps.read_namespaced_deployment(*where).metadata.generation > generation
        reached = step_of(kube, NAMESPACE, long_job)
        wait_until(
            lambda: step_of(kube, NAMESPACE, long_job) > reached,
            "the job goes on",
            seconds=WITHIN_S,
        )
        requests.go_on(3)
    assert requests.failures == []
    assert kinds(kube) == before
    assert identity(core) == decode
    assert {c.name for c in read(core, NAMESPACE).spec.ephemeral_containers} == sidecars
    assert status(kube, NAMESPACE, long_job)["epoch"] == epoch, "the job was not placed again"


@pytest.mark.timeout(300)
def test_uninstalling_while_a_job_trains_fails_no_request(chart, kube, serving, long_job):
    core = client.CoreV1Api(kube)
    decode = identity(core)
    with Requests(endpoint(core, NAMESPACE)) as requests:
        requests.go_on(3)
        helm("uninstall", "windrow", "--namespace", "windrow-system", "--wait")
        requests.go_on(10)
    assert requests.failures == []
    assert is_ready(core, NAMESPACE)
    assert identity(core) == decode
    assert "chat" in kinds(kube)["harvestpolicies"]
    hooks = client.AdmissionregistrationV1Api(kube).list_mutating_webhook_configuration().items
    assert "windrow-operator" not in {hook.metadata.name for hook in hooks}
    # It was turned off before the operator went, so the job has a checkpoint and no worker.
    ended = status(kube, NAMESPACE, long_job)
    assert ended["checkpoint"]["step"] >= 4
    assert get_condition(ended["conditions"], "Placed")["status"] == "False"
    assert not [pid for pid in processes() if runs(pid, b"windrow_sidecar.finetune.worker")]
    left = {body.metadata.name for body in core.list_namespaced_config_map("windrow-system").items}
    assert "windrow-off" not in left, "another installation is not turned off"


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
