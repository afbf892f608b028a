"""What runs on the node: the chart, a decode pod of this machine's programs, jobs, requests."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
from kubernetes import client
from waiting import wait_until

from windrow.crd import API_VERSION, GROUP, VERSION
from windrow.local.realnode import write_image

ROOT = Path(__file__).resolve().parents[2]
OPERATOR_ARCHIVE = ROOT / "build" / "images" / "operator.tar"
CHART = ROOT / "deploy" / "helm" / "windrow"
IMAGE = "docker.io/windrow/decode:1"
SYSTEM, NAMESPACE, POD = "windrow-system", "serving", "decode"
WITHIN_S = 150
PORT = 8001


# --- the node -------------------------------------------------------------------------------------


def import_image(node, archive):
    ctr = [f"{node.bin}/ctr", "--address", node.containerd, "--namespace", "k8s.io"]
    subprocess.run([*ctr, "images", "import", archive], check=True, capture_output=True)


def import_decode_image(node, folder):
    """An image that waits, and that runs this machine's programs where /usr is mounted."""
    archive = folder / "image.tar"
    links = {
        name: Path("/", name) for name in ("lib", "lib64", "bin") if Path("/", name).is_symlink()
    }
    write_image(archive, IMAGE, {"pause": Path(node.bin, "pause"), **links}, ["/pause"])
    import_image(node, archive)
    return IMAGE


def helm(*arguments):
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def chart_command(*values):
    """Return arguments of helm that install or upgrade the chart, with this machine's Python."""
    python = f"{ROOT}/.venv/bin/python -m windrow_sidecar.agent"
    command = ["upgrade", "--install", "windrow", str(CHART), "--namespace", SYSTEM]
    command += ["--create-namespace", "--wait", "--timeout", "120s"]
    command += ["--set", "image.pullPolicy=Never", "--set", f"sidecar.command={python}"]
    return [*command, *values]


def print_logs(kube):
    core = client.CoreV1Api(kube)
    for pod in core.list_namespaced_pod(SYSTEM).items:
        print(core.read_namespaced_pod_log(pod.metadata.name, SYSTEM)[-8000:])


# --- the decode pod -------------------------------------------------------------------------------


def programs():
    """This machine's programs, by the places where Python looks for them."""
    python = Path(os.path.realpath(sys.executable)).parents[1]
    return {"usr": "/usr", "etc": "/etc", "repo": str(ROOT), "python": str(python)}


def policy_of(mounted, **changes):
    """Return a policy for the decode pod; `mounted` are directories that its sidecar gets too."""
    volumes = [
        {"name": name, "mountPath": path, "hostPath": {"path": path}}
        for name, path in mounted.items()
        if path != str(ROOT)  # of decode's model, so the sidecar has it already
    ]
    spec = {
        "selector": {"matchLabels": {"app": "chat"}},
        "objective": {"tpot": "2s"},
        "sidecar": {"volumes": volumes},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "HarvestPolicy",
        "metadata": {"name": "chat"},
        "spec": {**spec, **changes},
    }


def decode_pod(image, name=POD):
    """Return the built-in engine as a pod, found as a decode instance by its arguments."""
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
        "resources": {
            "requests": {"cpu": "1500m", "memory": "4Gi"},
            "limits": {"cpu": "2", "memory": "4Gi"},
        },
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": f"of-{name}", "mountPath": path} for name, path in programs().items()
        ],
    }
    volumes = [
        {"name": f"of-{name}", "hostPath": {"path": path}} for name, path in programs().items()
    ]
    return {
        "metadata": {"name": name, "labels": {"app": "chat"}},
        "spec": {
            "terminationGracePeriodSeconds": 3,
            "containers": [container],
            "volumes": volumes,
        },
    }


def read(core):
    """Return the one decode pod that there is."""
    (pod,) = core.list_namespaced_pod(NAMESPACE, label_selector="app=chat").items
    return pod


def is_ready(core):
    conditions = read(core).status.conditions or ()
    return any(c.type == "Ready" and c.status == "True" for c in conditions)


def await_prepared(core, image):
    """Wait until a decode pod that is made now would be harvestable."""

    def prepared():
        made = core.create_namespaced_pod(NAMESPACE, decode_pod(image), dry_run="All")
        return "windrow-run" in {volume.name for volume in made.spec.volumes}

    wait_until(prepared, "decode pods are prepared", seconds=WITHIN_S)


# --- requests -------------------------------------------------------------------------------------


def ask(address, tokens=8):
    """Send one request; return how many tokens came."""
    body = {"model": "m", "prompt": "A coffee machine", "max_tokens": tokens}
    url = f"http://{address}:{PORT}/v1/completions"
    answer = httpx.post(url, json=body, timeout=60, trust_env=False)
    answer.raise_for_status()
    return answer.json()["usage"]["completion_tokens"]


class Requests:
    """One request after the other, for as long as it is a context; `failures` are kept."""

    def __init__(self, address):
        self._address, self._stop = address, threading.Event()
        self.answered, self.failures = 0, []
        self._thread = threading.Thread(target=self._send)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _send(self):
        while not self._stop.wait(0.05):
            try:
                assert ask(self._address) > 0
            except (httpx.HTTPError, AssertionError) as error:
                self.failures.append(error)
            else:
                self.answered += 1

    def await_more(self, count):
        """Wait until so many more were answered."""
        wanted = self.answered + count
        wait_until(lambda: self.answered >= wanted or self.failures, "requests", seconds=WITHIN_S)
        assert self.failures == []


# --- jobs -----------------------------------------------------------------------------------------

JOBS = (GROUP, VERSION, NAMESPACE, "finetunejobs")


def submit(kube, name, destination, steps, **output):
    job = {
        "apiVersion": API_VERSION,
        "kind": "FinetuneJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": f"{ROOT}/models/windrow-tiny"},
            "dataset": {"source": f"{ROOT}/examples/support-tone/train.jsonl", "format": "chat"},
            "adapter": {"type": "lora", "lora": {"rank": 4, "targetModules": "all-linear"}},
            "training": {"maxSteps": steps, "batchSize": 4, "learningRate": "2e-4"},
            "checkpoint": {"everySteps": 4, "keep": 2},
            "output": {"destination": str(destination), **output},
        },
    }
    client.CustomObjectsApi(kube).create_namespaced_custom_object(*JOBS, job)


def status(kube, name):
    found = client.CustomObjectsApi(kube).get_namespaced_custom_object(*JOBS, name)
    return found.get("status") or {}


def step(kube, name):
    found = status(kube, name)
    assert found.get("state") not in ("Failed", "Invalid"), found
    return (found.get("progress") or {}).get("step", 0)


def await_step(kube, name, number):
    wait_until(
        lambda: step(kube, name) >= number, f"job {name} is at step {number}", seconds=WITHIN_S
    )


def succeeds(kube, name):
    found = status(kube, name)
    assert found.get("state") not in ("Failed", "Invalid"), found
    return found if found.get("state") == "Succeeded" else None


def forget_jobs(kube):
    """Let jobs be deleted that an operator still holds, where there is no operator any more."""
    custom = client.CustomObjectsApi(kube)
    for job in custom.list_namespaced_custom_object(*JOBS)["items"]:
        held = {"metadata": {"finalizers": []}}
        custom.patch_namespaced_custom_object(*JOBS, job["metadata"]["name"], held)
