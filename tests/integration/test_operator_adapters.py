"""Finished adapters go into the serving pods, on a real API server.

The servers here stand where SGLang's front stands: its three calls, with its answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import httpx
import openai
import pytest
import torch
from kubernetes import client as k8s
from safetensors.torch import save
from waiting import wait_until

from windrow.adapter_files import digest_of_folder
from windrow.rundir import RunDir
from windrow_lab.machine.ports import free_port
from windrow_sidecar.agent.adapter_store import AdapterStore
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.finetune.data.remote import Credentials, storage_options


@dataclass
class Front:
    """One server: which adapters it has, and every call that it has had, of all servers in turn."""

    role: str
    calls: list[tuple[str, str, str]]
    refuses: str = ""
    adapters: dict[str, dict] = field(default_factory=dict)
    port: int = 0
    broken: str = ""  # of the adapter directory by which it answers with an error
    asked: list[dict] = field(default_factory=list)

    def answer(self, path: str, body: dict | None) -> tuple[int, dict]:
        if path == "/v1/models":
            known = [
                {"id": name, "root": body["lora_path"]} for name, body in self.adapters.items()
            ]
            return 200, {"data": [{"id": "/m", "root": "/m"}, *known]}
        if path == "/v1/completions":
            self.asked.append(body)
            base, _, adapter = body["model"].partition(":")
            assert base == "/m"
            if adapter and self.broken and self.adapters[adapter]["lora_path"] == self.broken:
                return 500, {"error": {"message": "an assert of the kernel"}}
            return 200, {"choices": [{"text": "..."}]}
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


@pytest.mark.extended
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


# --- versions that arrive from a bucket -----------------------------------------------------------


@pytest.fixture
def cached(cluster, fronts, bucket, tmp_path):
    """A decode pod whose sidecar is scripted but for the copies, which the agent's own part makes.

    Returns how a job finishes, how an order to store is carried out, the sidecar, decode.
    """
    url, secret = bucket
    volume = tmp_path / "volume"
    volume.mkdir()
    own = {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    volumes = [{"name": "shared", "mountPath": str(volume), "hostPath": {"path": str(volume)}}]
    cluster.policy(
        access={"namespaceSelector": own, "adapters": True},
        sidecar={"volumes": volumes, "adapterCache": {"volume": "shared", "size": "1Mi"}},
    )
    labels, held = {"windrow.dev/credentials": "true"}, {"name": "s3"}
    body = {"metadata": {**held, "labels": labels}, "stringData": secret}
    cluster.core.create_namespaced_secret(cluster.namespace, body)
    serving_pod(cluster, fronts["prefill"])
    sidecar = cluster.attach(serving_pod(cluster, fronts["decode"]), stores_adapters=True)
    sidecar.beat()
    system = fsspec.filesystem("s3", **storage_options(url, Credentials("s3", secret)))

    def store(order):
        told = []
        settings = AgentSettings(RunDir(tmp_path / "run"))
        asyncio.run(AdapterStore(settings, told.append).store(order))
        sidecar.say(adapter=told[0])
        return told[0].error

    def finish(name, value, loss, **canary):
        """Have a job succeed whose adapter is in the bucket; returns the directory of its copy."""
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
        weights = {"lora_A": torch.full((1, 4), value)}
        (folder / "adapter_model.safetensors").write_bytes(save(weights))
        for file in folder.iterdir():
            system.put_file(str(file), f"{url}/{name}/{file.name}")
        output = {"destination": f"{url}/{name}", "secretRef": held}
        output["deploy"] = {"enabled": True, "name": "tone", "canary": canary}
        dataset = {"source": "/d/rows.jsonl", "evalFraction": 0.1}
        cluster.job(name, output=output, dataset=dataset)
        assigned = sidecar.next("assign")
        sidecar.report(assigned, "STARTED")
        digest = digest_of_folder(folder)
        losses = {"base_eval_loss": 3.0, "tuned_eval_loss": loss}
        sidecar.report(assigned, "SUCCEEDED", adapter_digest=digest, **losses)
        cluster.await_state("Succeeded", name)
        return f"{volume}/.windrow-adapters/{cluster.namespace}/{digest}"

    return finish, store, sidecar, fronts["decode"]


def said_of(cluster, name, reason):
    def found():
        said = cluster.condition("Deployed", name)
        return said if said.get("reason") == reason else None

    return wait_until(found, f"{name} is {reason}, it is {cluster.status(name)}")


def test_a_name_points_to_the_newest_version_that_passes_and_back(cluster, cached):
    finish, store, sidecar, decode = cached
    served = f"{cluster.namespace}.tone"

    def points_to():
        assert set(decode.adapters) == {served}
        return decode.adapters[served]["lora_path"]

    one = finish("one", 1.0, loss=2.0)
    order = sidecar.next("adapter")
    assert said_of(cluster, "one", "Fetching")
    assert store(order) == ""
    assert "Requests ask for it" in said_of(cluster, "one", "Loaded")["message"]
    assert points_to() == one
    assert {path.name for path in Path(one).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    # It answers worse than the version that is served: nothing is fetched or loaded.
    calls = len(decode.calls)
    finish("worse", 2.0, loss=2.5, maxLossIncrease="0.1")
    said = said_of(cluster, "worse", "CanaryFailed")
    assert "2.5 is more than 0.1 above the 2 of job one" in said["message"], said
    assert f"{served} points to the version of job one" in said["message"]
    assert len(decode.calls) == calls
    # The servers cannot compute with it: the name has never pointed to it.
    decode.broken = finish("broken", 3.0, loss=1.0, prompt="Say it.")
    assert store(sidecar.next("adapter")) == ""
    said = said_of(cluster, "broken", "CanaryFailed")
    assert "decode-0 answers with an error: an assert of the kernel" in said["message"], said
    assert points_to() == one
    assert decode.asked[-2]["prompt"] == "Say it."
    of_name = [(role, call) for role, call, name in decode.calls if name == served]
    assert of_name == [("prefill", "/load_lora_adapter"), ("decode", "/load_lora_adapter")]
    assert said_of(cluster, "one", "Loaded")
    # A good one takes the name, and gives it back when its job is deleted.
    two = finish("two", 4.0, loss=1.5, maxLossIncrease="0")
    order = sidecar.next("adapter")
    assert Path(one).name in order.keep
    assert store(order) == ""
    assert said_of(cluster, "two", "Loaded")
    assert points_to() == two
    assert "job two" in said_of(cluster, "one", "Superseded")["message"]
    cluster.delete_job("two")
    said_of(cluster, "one", "Loaded")
    assert points_to() == one
    # With the last version the copy goes as well: SGLang keeps the name, and would load it again.
    for name in ("worse", "broken", "one"):
        cluster.delete_job(name)
    order = sidecar.next("adapter", what=lambda order: order.forget)
    assert order.digest == Path(one).name
    wait_until(lambda: not cluster.has_job("one"), "the job is gone")
    assert decode.adapters == {}
    events = cluster.core.list_namespaced_event(cluster.namespace).items
    assert {"CanaryFailed", "Superseded", "Loaded"} <= {event.reason for event in events}


def test_a_bucket_whose_adapter_no_server_could_load_is_refused_before_it_is_trained(
    cluster, fronts
):
    own = {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    cluster.policy(access={"namespaceSelector": own, "adapters": True})
    cluster.attach(serving_pod(cluster, fronts["decode"])).beat()
    cluster.job(output={"destination": "s3://team/tone", "deploy": {"enabled": True}})
    wait_until(
        lambda: "sidecar.adapterCache" in cluster.condition("Placed").get("message", ""),
        "the job is not placed",
    )
