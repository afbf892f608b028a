"""A finished job's adapter goes into SGLang's own servers, which answer by it when it is asked for.

The operator, the API server, the servers and the adapter are real; pods are objects whose address
is this machine's.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest
import torch
import yaml
from peft import PeftModel
from support.sglang_servers import (
    DECODE,
    MODEL,
    OVER_TCP,
    PYTHON,
    TRANSFER,
    Server,
    complete,
    require_transfer,
    start_server,
    text_of,
)
from test_finetune_command import COMMAND, ROWS
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import wait_until

PROMPT, TOKENS = "To open a file, you", 24
PREFILL = "--disaggregation-mode=prefill"
# What each server is started with. The small one is not disaggregated, and refuses the job's
# adapter: its rank is too large there.
SERVERS = {
    "prefill": (PREFILL, TRANSFER, "--max-lora-rank=8"),
    "decode": (*DECODE, TRANSFER, "--max-lora-rank=8"),
    "small": ("--max-lora-rank=2",),
}
ADAPTERS = (
    *("--enable-lora", "--lora-backend=torch_native", "--max-loras-per-batch=4"),
    *("--lora-target-modules", "q_proj", "v_proj", "down_proj"),
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang here: make sglang"),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    require_transfer()
    folder = tmp_path_factory.mktemp("servers")
    options = ("--max-total-tokens=4096", *ADAPTERS)
    running = {
        name: start_server(folder / name, *own, *options, environment=OVER_TCP)
        for name, own in SERVERS.items()
    }
    try:
        for name, server in running.items():
            wait_until(server.is_up, f"SGLang's server {name} answers", seconds=300)
        yield running
    finally:
        for server in running.values():
            server.end()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """The directory of an adapter that was trained so much that it changes answers."""
    folder = tmp_path_factory.mktemp("trained")
    spec = {
        "model": {"name": str(MODEL)},
        "dataset": {"source": str(ROWS), "format": "chat"},
        "adapter": {
            "type": "lora",
            "lora": {"rank": 4, "alpha": 16, "targetModules": ["q_proj", "v_proj", "down_proj"]},
        },
        "training": {
            "maxSteps": 12,
            "batchSize": 4,
            "maxSequenceLength": 128,
            "learningRate": "1e-2",
        },
        "output": {"destination": str(folder / "out")},
    }
    kind = {"apiVersion": "windrow.dev/v1alpha1", "kind": "FinetuneJob"}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump({**kind, "metadata": {"name": "tone"}, "spec": spec}))
    subprocess.run([*COMMAND, str(manifest)], check=True)
    (found,) = (folder / "out").rglob("adapter_model.safetensors")
    return found.parent


@torch.inference_mode()
def greedy(adapter: Path | None) -> str:
    """Return what transformers and PEFT answer to the prompt, without SGLang's cache."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    for _ in range(TOKENS):
        best = model(input_ids=ids).logits[0, -1].argmax()
        ids = torch.cat([ids, best.view(1, 1)], dim=1)
    return tokenizer.decode(ids[0, -TOKENS:])


def serving_pod(cluster, name: str, server: Server):
    """A ready pod whose container was started with the server's own words."""
    labels = {"app": "chat"} | ({} if name == "prefill" else {"windrow.dev/inject": "enabled"})
    container = {"name": "server", "image": "none", "command": server.words}
    body = {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}}
    pod = cluster.core.create_namespaced_pod(cluster.namespace, body)
    ready = {"type": "Ready", "status": "True"}
    status = {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}], "conditions": [ready]}
    cluster.core.patch_namespaced_pod_status(name, cluster.namespace, {"status": status})
    return pod


def train(cluster, pod, adapter: Path) -> str:
    """Have a job succeed on the pod with that adapter; returns what servers call it."""
    own = {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}}
    cluster.policy(access={"namespaceSelector": own, "adapters": True})
    sidecar = cluster.attach(pod, model=str(MODEL), outputs=(str(adapter.parent),))
    sidecar.beat()
    output = {"destination": str(adapter), "deploy": {"enabled": True, "pinned": True}}
    cluster.job(model={"name": str(MODEL)}, output=output)
    assigned = sidecar.next("assign")
    sidecar.report(assigned, "STARTED")
    sidecar.report(assigned, "SUCCEEDED", adapter_path=str(adapter))
    cluster.await_state("Succeeded")
    return f"{cluster.namespace}.tone"


def deployed(cluster) -> dict:
    return wait_until(lambda: cluster.condition("Deployed"), "the condition Deployed", seconds=120)


async def test_a_user_asks_sglang_for_the_adapter_by_name_and_gets_the_tuned_answer(
    cluster, servers, adapter
):
    pair = servers["prefill"], servers["decode"]
    serving_pod(cluster, "prefill", servers["prefill"])
    pod = serving_pod(cluster, "decode", servers["decode"])
    async with httpx.AsyncClient(timeout=120) as client:
        before = text_of(await complete(client, pair, str(MODEL), PROMPT, TOKENS))
        name = train(cluster, pod, adapter)

        said = deployed(cluster)
        assert (said["status"], said["reason"]) == ("True", "Loaded"), said
        assert all(name in server.models() for server in pair)
        asked = f"{MODEL}:{name}"
        assert f'"model": "{asked}"' in said["message"]
        # Prefill computes the prompt's KV with it, decode the tokens: together what PEFT answers.
        tuned = text_of(await complete(client, pair, asked, PROMPT, TOKENS))
        assert tuned == greedy(adapter)
        assert tuned != before == greedy(None)
        # A request without its name is answered as before.
        assert text_of(await complete(client, pair, str(MODEL), PROMPT, TOKENS)) == before

        cluster.delete_job()
        wait_until(lambda: not cluster.has_job(), "the job is gone", seconds=120)
        assert not any(name in server.models() for server in pair)


async def test_where_one_of_sglangs_servers_refuses_the_adapter_none_keeps_it(
    cluster, servers, adapter
):
    used = servers["prefill"], servers["small"]
    serving_pod(cluster, "prefill", servers["prefill"])
    name = train(cluster, serving_pod(cluster, "small", servers["small"]), adapter)
    said = deployed(cluster)
    assert (said["status"], said["reason"]) == ("False", "NotLoaded"), said
    assert f"{cluster.namespace}/small refuses: " in said["message"]
    assert "rank" in said["message"]
    assert not any(name in server.models() for server in used)
    async with httpx.AsyncClient(timeout=120) as client:  # the one that refused serves on
        answer = await complete(client, used[1:], str(MODEL), PROMPT, TOKENS)
    assert text_of(answer) == greedy(None)
