"""The whole chain on a real node: the chart, a decode pod, an attached sidecar, a job."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from kubernetes import client
from waiting import wait_until

from windrow.crd import API_VERSION

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "build" / "images"
ARCHIVE = IMAGES / "operator.tar"
NAMESPACE = "serving"
WITHIN_S = 150
PORT = 8001


def helm(*arguments):
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def chart(node, kube):
    """The chart, installed with the operator's own image and rights."""
    if not ARCHIVE.exists():
        pytest.skip("no image of the operator: `make images` builds it")
    load(node, ARCHIVE)
    python = f"{ROOT}/.venv/bin/python -m windrow_sidecar.agent"
    folder = str(ROOT / "deploy" / "helm" / "windrow")
    command = ["upgrade", "--install", "windrow", folder, "--namespace", "windrow-system"]
    command += ["--create-namespace", "--wait", "--timeout", "300s"]
    command += ["--set", "image.pullPolicy=Never", "--set", f"sidecar.command={python}"]
    try:
        helm(*command)
    except AssertionError:
        print_logs(kube)
        raise
    yield command
    print_logs(kube)


def load(node, archive):
    """Give the node the image of an archive; return the image's name."""
    ctr = [f"{node.bin}/ctr", "--address", node.containerd, "--namespace", "k8s.io"]
    done = subprocess.run(
        [*ctr, "images", "import", archive], check=True, capture_output=True, text=True
    )
    return next(word for word in done.stdout.split() if word.startswith("docker.io/"))


def print_logs(kube):
    core = client.CoreV1Api(kube)
    for pod in core.list_namespaced_pod("windrow-system").items:
        print(core.read_namespaced_pod_log(pod.metadata.name, "windrow-system")[-8000:])


def volumes():
    """This machine's programs, by the places where Python looks for them."""
    python = Path(os.path.realpath(sys.executable)).parents[1]
    places = {"usr": "/usr", "etc": "/etc", "repo": str(ROOT), "python": str(python)}
    return {name: path for name, path in places.items() if path not in ("/usr/local",)}


@pytest.fixture(scope="module")
def serving(chart, kube, image, tmp_path_factory):
    """A namespace with a policy; its decode pod serves. Yields the folder for adapters."""
    out = tmp_path_factory.mktemp("out")
    with a_namespace_that_serves(kube, NAMESPACE, image, out):
        yield out


@contextmanager
def a_namespace_that_serves(kube, namespace, image, out, **of_pod):
    core, custom = client.CoreV1Api(kube), client.CustomObjectsApi(kube)
    # What says that directories of the node may be mounted here.
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}
    core.create_namespace({"metadata": {"name": namespace, "labels": labels}})
    mounted = {**volumes(), "out": str(out)}
    policy = {
        "apiVersion": API_VERSION,
        "kind": "HarvestPolicy",
        "metadata": {"name": "chat"},
        "spec": {
            "selector": {"matchLabels": {"app": "chat"}},
            "objective": {"tpot": "2s"},
            "sidecar": {
                "volumes": [
                    {"name": name, "mountPath": path, "hostPath": {"path": path}}
                    for name, path in mounted.items()
                    if path != str(ROOT)  # of decode's model, so the sidecar has it already
                ]
            },
        },
    }
    custom.create_namespaced_custom_object(
        "windrow.dev", "v1alpha1", namespace, "harvestpolicies", policy
    )
    pod = decode_pod(image, mounted, **of_pod)
    wait_until(
        lambda: (
            "windrow-run"
            in {
                volume.name
                for volume in core.create_namespaced_pod(namespace, pod, dry_run="All").spec.volumes
            }
        ),
        "decode pods are prepared",
    )
    core.create_namespaced_pod(namespace, pod)
    wait_until(lambda: is_ready(core, namespace), "decode serves", seconds=WITHIN_S)
    try:
        yield
    finally:
        pod = read(core, namespace)
        for container in ("decode", *(c.name for c in pod.spec.ephemeral_containers or ())):
            log = core.read_namespaced_pod_log("decode", namespace, container=container)
            print(namespace, container, log)
        core.delete_namespace(namespace)


def decode_pod(image, mounted, **of_spec):
    # Little is asked for: two of them, and the operators, fit on a node of two cores.
    resources = {"cpu": "500m", "memory": "4Gi"}
    container = {
        "name": "decode",
        "image": image,
        "imagePullPolicy": "Never",
        "command": [f"{ROOT}/.venv/bin/python", "-m", "windrow_sidecar.engines.builtin"],
        "args": [
            f"--model-path={ROOT}/models/windrow-tiny",
            "--disaggregation-mode=decode",
            "--disaggregation-transfer-backend=fake",
            "--host=0.0.0.0",
            f"--port={PORT}",
        ],
        "resources": {"requests": resources, "limits": {"cpu": "2", "memory": "4Gi"}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": f"of-{name}", "mountPath": path}
            for name, path in mounted.items()
            if name != "out"
        ],
    }
    return {
        "metadata": {"name": "decode", "labels": {"app": "chat"}},
        "spec": {
            "terminationGracePeriodSeconds": 3,
            "containers": [container],
            "volumes": [
                {"name": f"of-{name}", "hostPath": {"path": path}}
                for name, path in mounted.items()
                if name != "out"
            ],
            **of_spec,
        },
    }


def read(core, namespace=NAMESPACE):
    return core.read_namespaced_pod("decode", namespace)


def is_ready(core, namespace=NAMESPACE):
    conditions = read(core, namespace).status.conditions or ()
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


def submit(kube, name, out, steps, namespace=NAMESPACE):
    job = {
        "apiVersion": API_VERSION,
        "kind": "FinetuneJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": f"{ROOT}/models/windrow-tiny"},
            "dataset": {
                "source": f"{ROOT}/examples/support-tone/train.jsonl",
                "format": "chat",
            },
            "adapter": {"type": "lora", "lora": {"rank": 4, "targetModules": "all-linear"}},
            "training": {"maxSteps": steps, "batchSize": 4, "learningRate": "2e-4"},
            "checkpoint": {"everySteps": 4, "keep": 2},
            "output": {"destination": f"{out}/{name}"},
        },
    }
    where = ("windrow.dev", "v1alpha1", namespace, "finetunejobs")
    client.CustomObjectsApi(kube).create_namespaced_custom_object(*where, job)


def status(kube, name, namespace=NAMESPACE):
    where = ("windrow.dev", "v1alpha1", namespace, "finetunejobs", name)
    return client.CustomObjectsApi(kube).get_namespaced_custom_object(*where).get("status") or {}


def answers(core):
    address = read(core).status.pod_ip
    body = {"model": "m", "prompt": "A coffee machine", "max_tokens": 8}
    url = f"http://{address}:{PORT}/v1/completions"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0


def ends(kube, name, namespace=NAMESPACE):
    found = status(kube, name, namespace)
    assert found.get("state") not in ("Failed", "Invalid"), found
    return found if found.get("state") == "Succeeded" else None


@pytest.mark.timeout(500)
def test_a_job_is_harvested_by_an_attached_sidecar_that_is_replaced_when_it_dies(serving, kube):
    core = client.CoreV1Api(kube)
    assert not read(core).spec.ephemeral_containers, "nothing is attached before a job waits"
    submit(kube, "tone", serving, steps=24)
    wait_until(
        lambda: (status(kube, "tone").get("progress") or {}).get("step", 0) >= 6,
        "the job has made six steps",
        seconds=WITHIN_S,
    )
    assert answers(core)
    agents = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and is_agent(pid)]
    assert agents
    for pid in agents:
        os.kill(int(pid.name), 9)
    done = wait_until(lambda: ends(kube, "tone"), "the job succeeds", seconds=WITHIN_S)
    assert (serving / "tone" / "adapter_model.safetensors").is_file()
    assert done["epoch"] >= 1
    pod = read(core)
    assert {c.name for c in pod.spec.ephemeral_containers} == {"windrow-1", "windrow-2"}
    (decode,) = pod.status.container_statuses
    assert decode.restart_count == 0
    assert is_ready(core)
    assert answers(core)


def is_agent(process):
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"windrow_sidecar.agent" in words


class Requests:
    """One request after another, from a thread, until the block ends; what failed is kept."""

    def __init__(self, core):
        self._core = core
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self.answered = 0
        self.failed = []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(timeout=70)

    def _ask(self):
        while not self._end.is_set():
            try:
                if not answers(self._core):
                    self.failed.append("an answer without tokens")
            except (httpx.HTTPError, client.ApiException) as error:
                self.failed.append(repr(error))
            self.answered += 1

    def go_on(self, more):
        """Wait until so many further requests have been answered, well or not."""
        target = self.answered + more
        wait_until(lambda: self.answered >= target, f"{more} more requests", seconds=60)


def step_of(kube, name):
    return (status(kube, name).get("progress") or {}).get("step", 0)


def identity(core):
    pod = read(core)
    (decode,) = pod.status.container_statuses
    return pod.metadata.uid, decode.container_id, decode.restart_count


@pytest.fixture(scope="module")
def long_job(serving, kube):
    """A job that trains for longer than these tests take. Yields its name."""
    submit(kube, "long", serving, steps=50_000)
    wait_until(lambda: step_of(kube, "long") >= 4, "the job has made four steps", seconds=WITHIN_S)
    yield "long"
    # No operator is left to take its own finalizer off, and the namespace is to go.
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
    name = load(node, archive)
    helm(
        *chart,
        "--set-string",
        f"sidecar.command=python -m windrow_sidecar.agent,sidecar.image={name}",
    )
    namespace, core = "own-image", client.CoreV1Api(kube)
    out = tmp_path_factory.mktemp("out-of-image")
    user = {"securityContext": {"runAsUser": 0, "runAsGroup": 0}}
    with a_namespace_that_serves(kube, namespace, image, out, **user):
        submit(kube, "tone", out, steps=8, namespace=namespace)
        wait_until(lambda: ends(kube, "tone", namespace), "the job succeeds", seconds=2 * WITHIN_S)
        assert (out / "tone" / "adapter_model.safetensors").is_file()
        (sidecar,) = read(core, namespace).spec.ephemeral_containers
        assert sidecar.image == name
    helm(*chart)


def test_the_charts_own_test_passes(chart, serving):
    helm("test", "windrow", "--namespace", "windrow-system", "--timeout", "60s")


@pytest.mark.timeout(900)
def test_an_upgrade_replaces_the_operator_while_a_job_trains_on(chart, kube, serving, long_job):
    core, apps = client.CoreV1Api(kube), client.AppsV1Api(kube)
    before, decode, epoch = kinds(kube), identity(core), status(kube, long_job)["epoch"]
    sidecars = {c.name for c in read(core).spec.ephemeral_containers}
    where = ("windrow-operator", "windrow-system")
    generation = apps.read_namespaced_deployment(*where).metadata.generation
    with Requests(core) as requests:
        # Other resources, so every pod of the operator is made again.
        helm(*chart, "--set", "operator.resources.requests.cpu=60m")
        assert apps.read_namespaced_deployment(*where).metadata.generation > generation
        reached = step_of(kube, long_job)
        wait_until(lambda: step_of(kube, long_job) > reached, "the job goes on", seconds=WITHIN_S)
        requests.go_on(3)
    assert requests.failed == []
    assert kinds(kube) == before
    assert identity(core) == decode
    assert {c.name for c in read(core).spec.ephemeral_containers} == sidecars
    assert status(kube, long_job)["epoch"] == epoch, "the job was not placed anew"


@pytest.mark.timeout(300)
def test_uninstalling_while_a_job_trains_fails_no_request(chart, kube, serving, long_job):
    core = client.CoreV1Api(kube)
    decode = identity(core)
    with Requests(core) as requests:
        requests.go_on(3)
        helm("uninstall", "windrow", "--namespace", "windrow-system", "--wait")
        requests.go_on(10)
    assert requests.failed == []
    assert is_ready(core)
    assert identity(core) == decode
    assert "chat" in kinds(kube)["harvestpolicies"]
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
