"""Kueue for tests: its definitions from its Go module, and its own controller manager."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import time
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import httpx
import yaml
from kubernetes import client
from waiting import wait_until

from windrow_lab.machine.ports import free_port
from windrow_lab.machine.resources import resource_directory
from windrow_lab.machine.toolchain import find_go
from windrow_operator.pki import make_authority, make_server

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
MODULE = "sigs.k8s.io/kueue"
# Half a megabyte of YAML, which takes the Python of it seconds.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def sources(environment) -> Path | None:
    """Return the folder of Kueue's module, fetched where it is not; None: there is no Go.

    Go checks what it fetches against go.sum.
    """
    go = find_go(environment)
    if go is None:
        return None
    done = subprocess.run(
        [go.program, "mod", "download", "-json", MODULE],
        cwd=resource_directory("kueue") / "kueue",
        env=dict(go.environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Path(json.loads(done.stdout)["Dir"]) if done.returncode == 0 else None


@cache
def definitions(module: Path) -> list[dict]:
    """Return Kueue's CustomResourceDefinitions; all are stored and read as v1beta2."""
    folder = module / "config" / "components" / "crd" / "bases"
    return [yaml.load(path.read_text(), Loader=LOADER) for path in sorted(folder.glob("*.yaml"))]


def install(kube, module: Path) -> None:
    """Install Kueue's definitions, and wait until the API server serves them."""
    api = client.ApiextensionsV1Api(kube)
    for body in definitions(module):
        api.create_custom_resource_definition(body)
    custom = client.CustomObjectsApi(kube)

    def served():
        try:
            for body in definitions(module):
                custom.list_cluster_custom_object(GROUP, VERSION, body["spec"]["names"]["plural"])
        except client.ApiException:
            return False
        return True

    wait_until(served, "Kueue's kinds are served")


def remove(kube, module: Path) -> None:
    """Remove the definitions, and with them all objects; without their finalizers."""
    custom, api = client.CustomObjectsApi(kube), client.ApiextensionsV1Api(kube)
    no_finalizers = {"metadata": {"finalizers": []}}
    for plural in ("clusterqueues", "resourceflavors", "admissionchecks"):
        for item in custom.list_cluster_custom_object(GROUP, VERSION, plural)["items"]:
            name = item["metadata"]["name"]
            custom.patch_cluster_custom_object(GROUP, VERSION, plural, name, no_finalizers)
    names = [body["metadata"]["name"] for body in definitions(module)]
    for name in names:
        api.delete_custom_resource_definition(name)
    wait_until(
        lambda: (
            not set(names)
            & {item.metadata.name for item in api.list_custom_resource_definition().items}
        ),
        "Kueue's definitions are gone",
    )


class Queues:
    """Client of Kueue's objects in one namespace, for a test."""

    def __init__(self, kube, namespace):
        self.custom, self.namespace = client.CustomObjectsApi(kube), namespace

    def create(self, plural, kind, name, spec, *, everywhere=True, annotations=None):
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": kind,
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": spec,
        }
        if everywhere:
            return self.custom.create_cluster_custom_object(GROUP, VERSION, plural, body)
        return self.custom.create_namespaced_custom_object(
            GROUP, VERSION, self.namespace, plural, body
        )

    def get(self, plural, name):
        return self.custom.get_cluster_custom_object(GROUP, VERSION, plural, name)

    def workloads(self):
        found = self.custom.list_namespaced_custom_object(
            GROUP, VERSION, self.namespace, "workloads"
        )
        return found["items"]

    def workload_of(self, job):
        """Return the Workload that a job owns, or None."""
        owned = [
            item
            for item in self.workloads()
            if any(
                owner["name"] == job and owner["kind"] == "FinetuneJob"
                for owner in item["metadata"].get("ownerReferences", ())
            )
        ]
        return owned[0] if owned else None

    def await_workload(self, job):
        return wait_until(lambda: self.workload_of(job), f"a Workload of job {job}")

    def condition(self, job, type_):
        held = ((self.workload_of(job) or {}).get("status") or {}).get("conditions") or ()
        return next((each for each in held if each["type"] == type_), {})

    def delete_workload(self, job):
        name = self.workload_of(job)["metadata"]["name"]
        self.custom.delete_namespaced_custom_object(
            GROUP, VERSION, self.namespace, "workloads", name
        )

    def patch_workload(self, job, spec):
        name = self.workload_of(job)["metadata"]["name"]
        return self.custom.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, "workloads", name, {"spec": spec}
        )

    def write_status(self, job, status):
        """Merge into the status of a Workload, as Kueue's controller may."""
        name = self.workload_of(job)["metadata"]["name"]
        return self.custom.patch_namespaced_custom_object_status(
            GROUP, VERSION, self.namespace, "workloads", name, {"status": status}
        )


class KueueProcess:
    """Kueue's controller manager on loopback ports, with its webhooks registered.

    It reads the certificate of its metrics from a fixed path below /etc, so it runs in a mount
    namespace of its own, where /etc is empty but for that.
    """

    def __init__(self, program: Path, module: Path, kube, kubeconfig: Path, directory: Path):
        self._program, self._module, self._kube = program, module, kube
        self._kubeconfig, self._directory = kubeconfig, directory
        self.log = directory / "kueue.log"
        self.process: subprocess.Popen | None = None
        self._hooks: list[tuple[str, str]] = []

    def start(self):
        now = datetime.now(UTC)
        authority = make_authority(now)
        server = make_server(authority, ["127.0.0.1", "localhost"], now)
        certificates = self._directory / "certificates"
        certificates.mkdir()
        (certificates / "tls.crt").write_bytes(server.certificate)
        (certificates / "tls.key").write_bytes(server.key)
        health, hooks = free_port(), free_port()
        core = client.CoreV1Api(self._kube)
        core.create_namespace({"metadata": {"name": "kueue-system"}})
        config = self._directory / "kueue.yaml"
        config.write_text(yaml.safe_dump(_configuration(certificates, health, hooks)))
        command = [self._program, "--config", config, "--kubeconfig", self._kubeconfig]
        words = " ".join(shlex.quote(str(word)) for word in command)
        own = "/etc/kueue/metrics/certs"
        script = (
            f"mount -t tmpfs none /etc && mkdir -p {own} && "
            f"cp {shlex.quote(str(certificates))}/tls.* {own} && exec {words}"
        )
        namespaces = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(namespaces, stdout=log, stderr=log)
        wait_until(lambda: self._is_ready(health), f"Kueue is ready; see {self.log}")
        self._register(authority.certificate, hooks)

    def _is_ready(self, port):
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def _register(self, authority: bytes, port: int):
        """Register the webhooks for Kueue's own kinds: those of other frameworks are not asked."""
        api = client.AdmissionregistrationV1Api(self._kube)
        text = (self._module / "config/components/webhook/manifests.yaml").read_text()
        for body in yaml.safe_load_all(text):
            if not body:
                continue
            body["webhooks"] = [
                {
                    **hook,
                    "clientConfig": {
                        "url": f"https://127.0.0.1:{port}{hook['clientConfig']['service']['path']}",
                        "caBundle": base64.b64encode(authority).decode(),
                    },
                }
                for hook in body["webhooks"]
                if any(GROUP in rule["apiGroups"] for rule in hook["rules"])
            ]
            body["metadata"]["name"] = f"kueue-{body['metadata']['name']}"
            self._hooks.append((body["kind"], body["metadata"]["name"]))
            if body["kind"] == "MutatingWebhookConfiguration":
                api.create_mutating_webhook_configuration(body)
            else:
                api.create_validating_webhook_configuration(body)

    def end(self):
        api = client.AdmissionregistrationV1Api(self._kube)
        for kind, name in self._hooks:
            if kind == "MutatingWebhookConfiguration":
                api.delete_mutating_webhook_configuration(name)
            else:
                api.delete_validating_webhook_configuration(name)
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            began = time.monotonic()
            self.process.wait(timeout=30)
            print(f"Kueue ended after {time.monotonic() - began:.1f} s")
        client.CoreV1Api(self._kube).delete_namespace("kueue-system")


def _configuration(certificates: Path, health: int, hooks: int) -> dict:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": "kueue-system",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": hooks, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
        "featureGates": {"VisibilityOnDemand": False},
    }
