"""The operator as a process, and a sidecar that a test scripts: a real client of the wire."""

from __future__ import annotations

import base64
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import yaml
from kubernetes import client
from waiting import DEADLINE_SECONDS, wait_until

from windrow.proto import attach_pb2 as pb
from windrow.proto import attach_pb2_grpc as pb_grpc

ROOT = Path(__file__).resolve().parents[2]
OWN_NAMESPACE = "windrow-system"


def install_crds(kube):
    """Install our CRDs, and wait until the API server serves them."""
    api = client.ApiextensionsV1Api(kube)
    there = {found.metadata.name for found in api.list_custom_resource_definition().items}
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        body = yaml.safe_load(path.read_text())
        if body["metadata"]["name"] not in there:
            api.create_custom_resource_definition(body)

    def served():
        found = api.list_custom_resource_definition().items
        return all(
            any(
                c.type == "Established" and c.status == "True"
                for c in (item.status.conditions or ())
            )
            for item in found
        )

    wait_until(served, "the CRDs are established")


# Patient for seconds, not minutes.
HURRIED = (
    *("--gone-grace-seconds", "1", "--lost-grace-seconds", "3"),
    *("--backoff-base-seconds", "0.2", "--stop-timeout-seconds", "4"),
)
# Finds within seconds what a watch has missed. Not in HURRIED: tests count calls.
LISTS_OFTEN = ("--list-every-seconds", "5")


class OperatorProcess:
    """`python -m windrow_operator` on loopback ports; may be killed and started again."""

    def __init__(self, kubeconfig, directory, *arguments, identity="tests"):
        self.identity = identity
        self.state_file, self.log = directory / "state.json", directory / "operator.log"
        self._command = [
            *(sys.executable, "-m", "windrow_operator", "--kubeconfig", str(kubeconfig)),
            *("--attach-host", "127.0.0.1", "--advertise-address", "127.0.0.1"),
            *("--attach-port", "0", "--webhook-port", "0", "--metrics-port", "0"),
            *("--namespace", OWN_NAMESPACE, "--state-file", str(self.state_file)),
            *("--identity", identity),
            *arguments,
        ]
        self.process = None

    def start(self):
        """Begin, and wait until it leads."""
        self.begin()
        wait_until(self.leads, f"the operator leads; see\n{self.log.read_text()}")

    def begin(self):
        """Begin, and do not wait."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def leads(self):
        assert self.process.poll() is None, f"the operator ended:\n{self.log.read_text()}"
        return self.state.get("pid") == self.process.pid and self.state.get("leads")

    def stands_by(self):
        assert self.process.poll() is None, f"the operator ended:\n{self.log.read_text()}"
        state = self.state
        return state.get("pid") == self.process.pid and state["ready"] and not state["leads"]

    @property
    def state(self):
        return json.loads(self.state_file.read_text()) if self.state_file.exists() else {}

    def end(self, signum=signal.SIGTERM):
        """Signal the process; return how long it took to end, in seconds."""
        began = time.monotonic()
        self.process.send_signal(signum)
        self.process.wait(timeout=DEADLINE_SECONDS)
        return time.monotonic() - began


class FakeSidecar:
    """One stream of a sidecar: says what the test says, and keeps what it is told."""

    def __init__(
        self,
        address,
        authority,
        token,
        *,
        facts=True,
        running=(),
        pod_uid="",
        version=1,
        outputs=("/out",),
        leader_term=0,
        model="/m",
        stores_adapters=False,
    ):
        credentials = grpc.ssl_channel_credentials(authority)
        self._channel = grpc.secure_channel(address, credentials)
        self._outbox = queue.SimpleQueue()
        self.told = deque()
        self.error = None
        slot = pb.SlotFacts(
            index=0,
            model=model,
            model_fingerprint="fingerprint-of-m",
            compute_units=2,
            chunks=128,
            tensor_parallel=1,
            output_trees=outputs,
        )
        hello = pb.SidecarHello(
            protocol_version=version,
            pod_uid=pod_uid,
            slots=[slot] if facts else [],
            running=running,
            leader_term=leader_term,
            stores_adapters=stores_adapters,
        )
        self._outbox.put(pb.SidecarMessage(hello=hello))
        self._stream = pb_grpc.AttachStub(self._channel).Attach(
            iter(self._outbox.get, None), metadata=(("authorization", f"Bearer {token}"),)
        )
        self._beat = None  # the last one, said again every second as a real sidecar does
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=t) for t in (self._read, self._keep_beating)]
        for thread in self._threads:
            thread.start()

    def _read(self):
        try:
            for message in self._stream:
                self.told.append(message)
        except grpc.RpcError as error:
            self.error = error

    def _keep_beating(self):
        while not self._ended.wait(1.0):
            if self._beat is not None:
                self._outbox.put(pb.SidecarMessage(heartbeat=self._beat))

    def fall_silent(self):
        """Say nothing any more; the stream stays."""
        self._beat = None

    def close(self):
        self._ended.set()
        self._outbox.put(None)
        self._stream.cancel()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)
        self._channel.close()

    def refusal(self):
        """Return the status code with which the operator ended the stream."""
        wait_until(lambda: self.error, "a refusal")
        return self.error.code()

    def next(self, kind, *, what=lambda message: True):
        """Return the next message of `kind` that `what` accepts, in the order of arrival."""

        def found():
            while self.told:
                message = self.told.popleft()
                if message.WhichOneof("message") == kind and what(getattr(message, kind)):
                    return getattr(message, kind)
            assert self.error is None, f"the stream ended: {self.error}"
            return None

        return wait_until(found, f"a message of kind {kind}")

    def beat(self, job=None, **fields):
        beat = pb.SlotHeartbeat(
            slot=0, engine_state="serving", predicted_tokens_per_second=9600, chunks_free=100
        )
        beat.MergeFrom(pb.SlotHeartbeat(**fields))
        if job is not None:
            beat.job.CopyFrom(job)
        self._beat = beat
        self._outbox.put(pb.SidecarMessage(heartbeat=beat))

    def report(self, assigned, kind, **fields):
        if self._beat is not None and kind in ("STOPPED", "SUCCEEDED", "FAILED", "REJECTED"):
            self._beat.ClearField("job")
        event = pb.JobEvent(
            kind=pb.JobEvent.Kind.Value(kind),
            job_uid=assigned.job_uid,
            epoch=assigned.epoch,
            **fields,
        )
        self._outbox.put(pb.SidecarMessage(job_event=event))

    def say(self, **message):
        """Send any message, whatever it says."""
        self._outbox.put(pb.SidecarMessage(**message))

    def send_profile(self, key, spec):
        report = pb.ProfileReport(slot=0, key=key, profile_json=json.dumps(spec))
        self._outbox.put(pb.SidecarMessage(profile=report))


def running(assigned, **progress):
    """Return what a sidecar says of a job that it runs."""
    return pb.RunningJob(
        slot=0,
        job_uid=assigned.job_uid,
        epoch=assigned.epoch,
        progress=pb.Progress(**progress),
    )


class Cluster:
    """Calls of a test to the API server: our objects, decode pods, and their tokens."""

    def __init__(self, kube, namespace, operator):
        self.core = client.CoreV1Api(kube)
        self.custom = client.CustomObjectsApi(kube)
        self.namespace, self.operator = namespace, operator
        self.sidecars = []
        wait_until(
            lambda: self.core.list_namespaced_service_account(namespace).items,
            "the default service account",
        )

    # --- our objects ------------------------------------------------------------------------------

    def apply(self, plural, name, spec, labels=None):
        kind = {"finetunejobs": "FinetuneJob", "harvestpolicies": "HarvestPolicy"}[plural]
        body = {
            "apiVersion": "windrow.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "labels": labels or {}},
            "spec": spec,
        }
        return self.custom.create_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, plural, body
        )

    def policy(self, name="chat", **changes):
        # Open to this test's jobs only: tests share the API server and the operator.
        own = {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}}
        spec = {
            "selector": {"matchLabels": {"app": "chat"}},
            "objective": {"tpot": "40ms"},
            "mode": "harvest",
            "access": {"namespaceSelector": own},
        }
        return self.apply("harvestpolicies", name, {**spec, **changes})

    def job(self, name="tone", labels=None, **changes):
        spec = {
            "model": {"name": "/m"},
            "dataset": {"source": "/d/rows.jsonl"},
            "training": {"maxSteps": 100, "learningRate": "2e-4"},
            "output": {"destination": f"/out/{self.namespace}/{name}"},
        }
        return self.apply("finetunejobs", name, {**spec, **changes}, labels)

    def label_job(self, name="tone", **labels):
        self.custom.patch_namespaced_custom_object(
            *("windrow.dev", "v1alpha1", self.namespace, "finetunejobs", name),
            {"metadata": {"labels": labels}},
        )

    def get(self, plural, name):
        return self.custom.get_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, plural, name
        )

    def list(self, plural):
        return self.custom.list_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, plural
        )["items"]

    def patch_job(self, name="tone", **spec):
        self.custom.patch_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, "finetunejobs", name, {"spec": spec}
        )

    def delete_job(self, name="tone"):
        self.custom.delete_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, "finetunejobs", name
        )

    def has_job(self, name="tone"):
        found = self.custom.list_namespaced_custom_object(
            "windrow.dev", "v1alpha1", self.namespace, "finetunejobs"
        )
        return any(item["metadata"]["name"] == name for item in found["items"])

    def status(self, name="tone"):
        return self.get("finetunejobs", name).get("status") or {}

    def condition(self, type_, name="tone"):
        held = self.status(name).get("conditions") or []
        return next((c for c in held if c["type"] == type_), {})

    def await_state(self, state, name="tone"):
        wait_until(
            lambda: self.status(name).get("state") == state,
            f"job {name} is {state}, it is {self.status(name)}",
        )
        return self.status(name)

    # --- decode pods ------------------------------------------------------------------------------

    def pod(self, name="decode-0", labels=None, **more):
        """Create a decode pod that asks by its label, so that no policy is needed."""
        return self.create_pod(name, {"windrow.dev/inject": "enabled", **(labels or {})}, **more)

    def create_pod(self, name, labels=None, model="/m", **more):
        command = ["python", "-m", "engine", "--disaggregation-mode", "decode"]
        spec = {
            "containers": [
                {
                    "name": "decode",
                    "image": "none",
                    "command": [*command, "--model-path", model],
                }
            ]
        }
        metadata = {"name": name, "labels": {"app": "chat", **(labels or {})}}
        body = {"metadata": metadata, "spec": spec}
        return self.core.create_namespaced_pod(self.namespace, body, **more)

    def token(self, pod, audience="windrow"):
        """Return a token of the default service account, bound to the pod as a projected one is."""
        spec = {
            "audiences": [audience],
            "expirationSeconds": 3600,
            "boundObjectRef": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": pod.metadata.name,
                "uid": pod.metadata.uid,
            },
        }
        review = self.core.create_namespaced_service_account_token(
            "default", self.namespace, {"spec": spec}
        )
        return review.status.token

    def authority(self):
        secret = self.core.read_namespaced_secret("windrow-operator-ca", OWN_NAMESPACE)
        return base64.b64decode(secret.data["tls.crt"])

    def webhook_path(self):
        """Return the path that the API server was given, which nobody else may read."""
        hooks = client.AdmissionregistrationV1Api(self.core.api_client)
        found = hooks.read_mutating_webhook_configuration("windrow-operator")
        return urlsplit(found.webhooks[0].client_config.url).path

    def attach(self, pod, token=None, to=None, **hello):
        address = f"127.0.0.1:{(to or self.operator).state['attachPort']}"
        sidecar = FakeSidecar(address, self.authority(), token or self.token(pod), **hello)
        self.sidecars.append(sidecar)
        return sidecar

    def close(self):
        """End the sidecars and delete the pods: the next operator must not find slots of ours."""
        for sidecar in self.sidecars:
            sidecar.close()
        self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)
