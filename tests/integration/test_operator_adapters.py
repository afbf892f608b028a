"""Finished adapters go into the serving pods, on a real API server.

The servers here stand where SGLang's front stands: its three calls, with its answers.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import openai
import pytest
from kubernetes import client as k8s
from waiting import wait_until

from windrow_lab.machine.ports import free_port


@dataclass
class Front:
    """One server: which adapters it has, and every call that it has had, of all servers in turn."""

    role: str
    calls: list[tuple[str, str, str]]
    refuses: str = ""
    adapters: dict[str, dict] = field(default_factory=dict)
    port: int = 0

    def answer(self, path: str, body: dict | None) -> tuple[int, dict]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "/m"}, *({"id": name} for name in self.adapters)]}
        if path == "/v1/chat/completions":
            base, _, adapter = body["model"].partition(":")
            assert (base, adapter in self.adapters) == ("/m", True)
            message = {"role": "assistant", "content": f"by {adapter}"}
            return 200, {"id": "1", "choices": [{"index": 0, "message": message}]}
        self.calls.append((self.role, path, body["lora_name"]))
        if path == "/load_lora_adapter":
            if self.refuses:
                return 400, {"success": False, "error_message": self.refuses}
            self.adapters[body["lora_name"]] = body
        else:
            del self.adapters[body["lora_name"]]
        return 200, {"success": True, "error_message": ""}


@pytest.fixture
def fronts():
    """A prefill and a decode server."""
    calls: list[tuple[str, str, str]] = []
    made, servers = {role: Front(role, calls) for role in ("prefill", "decode")}, []
    for front in made.values():

        class Handler(BaseHTTPRequestHandler):
            of = front

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict | None) -> None:
                status, answer = self.of.answer(self.path, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_args) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        front.port = server.server_port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    yield made
    for server in servers:
        server.shutdown()
        server.server_close()


def serving_pod(cluster, front):
    """A ready pod whose server is `front`; the decode one is harvested."""
    words = ["python", "-m", "sglang.launch_server", "--model-path=/m"]
    words += [f"--disaggregation-mode={front.role}", f"--port={front.port}"]
    labels = {"app": "chat"}
    if front.role == "decode":
        labels["windrow.dev/inject"] = "enabled"
    body = {
        "metadata": {"name": f"{front.role}-0", "labels": labels},
        "spec": {"containers": [{"name": "server", "image": "none", "command": words}]},
    }
    pod = cluster.core.create_namespaced_pod(cluster.namespace, body)
    ready = {"type": "Ready", "status": "True"}
    status = {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}], "conditions": [ready]}
    cluster.core.patch_namespaced_pod_status(
        pod.metadata.name, cluster.namespace, {"status": status}
    )
    return pod


def finished(cluster, fronts, **access):
    """A job that asks for its adapter to be loaded, and has succeeded."""
    own = {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    cluster.policy(access={"namespaceSelector": own, **access})
    serving_pod(cluster, fronts["prefill"])
    sidecar = cluster.attach(serving_pod(cluster, fronts["decode"]))
    sidecar.beat()
    destination = f"/out/{cluster.namespace}/tone"
    deploy = {"enabled": True, "pinned": True}
    cluster.job(output={"destination": destination, "deploy": deploy})
    assigned = sidecar.next("assign")
    sidecar.report(assigned, "STARTED")
    sidecar.report(assigned, "SUCCEEDED", adapter_path="/out/tone")
    cluster.await_state("Succeeded")
    return f"{cluster.namespace}.tone"


def deployed(cluster):
    return wait_until(lambda: cluster.condition("Deployed"), "the condition Deployed")


def test_an_adapter_is_loaded_where_prompts_are_computed_and_then_where_they_are_answered(
    cluster, fronts
):
    name = finished(cluster, fronts, adapters=True)
    said = deployed(cluster)
    assert (said["status"], said["reason"]) == ("True", "Loaded"), said
    assert name in said["message"]
    wanted = {"lora_name": name, "lora_path": f"/out/{cluster.namespace}/tone", "pinned": True}
    assert [front.adapters for front in fronts.values()] == [{name: wanted}] * 2
    assert [role for role, _, _ in fronts["decode"].calls] == ["prefill", "decode"]
    assert cluster.status()["state"] == "Succeeded"

    cluster.delete_job()
    wait_until(lambda: not cluster.has_job(), "the job is gone")
    assert [front.adapters for front in fronts.values()] == [{}, {}]


def test_when_one_instance_refuses_none_keeps_the_adapter(cluster, fronts):
    fronts["decode"].refuses = "rank 64 exceeds the maximum of 16"
    name = finished(cluster, fronts, adapters=True)
    said = deployed(cluster)
    assert (said["status"], said["reason"]) == ("False", "NotLoaded")
    assert "decode-0 refuses: rank 64 exceeds the maximum of 16" in said["message"]
    assert fronts["prefill"].adapters == {}
    assert ("prefill", "/unload_lora_adapter", name) in fronts["prefill"].calls
    assert cluster.status()["state"] == "Succeeded"


def test_no_adapter_goes_where_the_policy_does_not_let_it(cluster, fronts):
    finished(cluster, fronts)
    said = deployed(cluster)
    assert (said["status"], said["reason"]) == ("False", "NoInstances")
    assert "access.adapters" in said["message"]
    assert fronts["decode"].calls == []
    cluster.delete_job()
    wait_until(lambda: not cluster.has_job(), "the job is gone")


@pytest.fixture
def endpoint(cluster, control_plane, tmp_path):
    """The URL of `windrow serve-api`, a Secret's key, and the place of files."""
    place, port = tmp_path / "files", free_port()
    place.mkdir()
    digest = hashlib.sha256(b"sk-anna").hexdigest()
    keys = {"metadata": {"name": "keys"}, "stringData": {"anna": f"{cluster.namespace} {digest}"}}
    cluster.core.create_namespaced_secret(cluster.namespace, keys)
    command = [Path(sys.executable).with_name("windrow"), "serve-api", f"--storage={place}"]
    command += ["--key-secret=keys", f"--namespace={cluster.namespace}", f"--port={port}"]
    command += [f"--kubeconfig={control_plane.kubeconfig}"]
    template = tmp_path / "job.yaml"
    template.write_text("output: {deploy: {enabled: true}}")
    with (tmp_path / "api.log").open("wb") as log:
        server = subprocess.Popen([*command, f"--job-template={template}"], stdout=log, stderr=log)

    def answers():
        assert server.poll() is None, (tmp_path / "api.log").read_text()
        try:
            return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(answers, "the endpoint answers")
    yield f"http://127.0.0.1:{port}/v1", place
    server.terminate()
    assert server.wait(timeout=30) == 0, (tmp_path / "api.log").read_text()


def test_openais_client_tunes_a_model_and_calls_it(cluster, fronts, endpoint, kube):
    url, place = endpoint
    own = {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    cluster.policy(access={"namespaceSelector": own, "adapters": True})
    serving_pod(cluster, fronts["prefill"])
    sidecar = cluster.attach(serving_pod(cluster, fronts["decode"]), outputs=(str(place),))
    sidecar.beat()
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with openai.OpenAI(base_url=url, api_key="sk-anna") as anna:
        wait_until(lambda: [m.id for m in anna.models.list()] == ["/m"], "the served model")
        content = json.dumps(row).encode()
        file = anna.files.create(file=("rows.jsonl", content), purpose="fine-tune")
        job = anna.fine_tuning.jobs.create(model="m", training_file=file.id, suffix="tone")
        assigned = sidecar.next("assign")
        assert json.loads(assigned.spec_json)["dataset"]["source"].startswith(str(place))
        sidecar.report(assigned, "STARTED")
        read = anna.fine_tuning.jobs.retrieve
        wait_until(lambda: read(job.id).status == "running", "the job runs")
        sidecar.report(assigned, "SUCCEEDED", adapter_path="/out/tone")
        wait_until(lambda: read(job.id).status == "succeeded", "the job has succeeded")
        events = [event.message for event in anna.fine_tuning.jobs.list_events(job.id)]
        assert any(said.startswith("Requests ask for it") for said in events)
        model = read(job.id).fine_tuned_model
        assert model in [each.id for each in anna.models.list()]
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{fronts['decode'].port}/v1", api_key="x"
        ) as c:
            said = c.chat.completions.create(model=model, messages=row["messages"][:1])
        assert said.choices[0].message.content == f"by {cluster.namespace}.tone"
    # A token of a service account: another key, which sees nothing of the first.
    account = {"metadata": {"name": "ci"}}
    cluster.core.create_namespaced_service_account(cluster.namespace, account)
    asked = {"spec": {"audiences": ["windrow-api"]}}
    token = cluster.core.create_namespaced_service_account_token("ci", cluster.namespace, asked)
    with openai.OpenAI(base_url=url, api_key=token.status.token, max_retries=0) as ci:
        with pytest.raises(openai.PermissionDeniedError, match="may not create finetunejobs"):
            ci.files.list()
        rules = [{"apiGroups": ["windrow.dev"], "resources": ["finetunejobs"], "verbs": ["create"]}]
        rbac, head = k8s.RbacAuthorizationV1Api(kube), {"metadata": {"name": "ci"}}
        rbac.create_namespaced_role(cluster.namespace, {**head, "rules": rules})
        subject = {"kind": "ServiceAccount", "name": "ci", "namespace": cluster.namespace}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "ci"}
        rbac.create_namespaced_role_binding(
            cluster.namespace, {**head, "roleRef": role, "subjects": [subject]}
        )
        wait_until(lambda: _allowed(ci), "the account may")
        assert list(ci.files.list()) == list(ci.fine_tuning.jobs.list()) == []
        with pytest.raises(openai.NotFoundError):
            ci.files.retrieve(file.id)


def _allowed(client):
    try:
        client.files.list()
    except openai.PermissionDeniedError:
        return False
    return True
