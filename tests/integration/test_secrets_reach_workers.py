"""Secrets of a job reach its worker from the API server, and nobody else.

API server, operator and agent are real; the worker answers with a digest of what it was given.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from agent_pod import Agent, Engine
from support.job_worker import digest_of
from waiting import wait_until

pytestmark = pytest.mark.paired

LABELS = {"windrow.dev/credentials": "true"}
TRACKING = {"WANDB_API_KEY": "hidden-91c", "MLFLOW_TRACKING_TOKEN": "hidden-91d"}
HUB = {"HF_TOKEN": "hidden-91f"}
STORE = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "hidden-91e"}


def secret(cluster, name, **held):
    metadata = {"name": name, "labels": LABELS}
    cluster.core.create_namespaced_secret(
        cluster.namespace, {"metadata": metadata, "stringData": held}
    )


def left_in(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.rglob("*") if file.is_file()]


async def test_the_secrets_of_model_tracking_and_output_reach_the_worker(cluster):
    secret(cluster, "figures", **TRACKING, password="of something else")
    secret(cluster, "store", **STORE)
    secret(cluster, "hub", **HUB, **STORE)  # of a model's, the token alone leaves the API server
    cluster.policy()
    pod = cluster.pod()
    with TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        port, cert = cluster.operator.state["attachPort"], cluster.authority()
        agent = Agent(
            folder,
            SimpleNamespace(port=port, cert=cert),
            *(f"--pod-namespace={cluster.namespace}", f"--pod-name={pod.metadata.name}"),
            *(f"--pod-uid={pod.metadata.uid}", "--worker-module=support.telling_worker"),
        )
        (folder / "token").write_text(cluster.token(pod))
        engine = Engine(folder)
        await agent.start()
        engine.start()
        try:
            cluster.job(
                model={"name": "tiny", "secretRef": {"name": "hub"}},
                output={"destination": "s3://team/tone", "secretRef": {"name": "store"}},
                tracking={"wandb": {"project": "p"}, "secretRef": {"name": "figures"}},
            )
            told = await asyncio.to_thread(
                wait_until,
                lambda: next(
                    (
                        said["message"]
                        for said in cluster.status().get("conditions") or ()
                        if said["reason"] == "Paused"
                    ),
                    None,
                ),
                "the worker answers",
            )
            cluster.patch_job(suspend=True)
            await asyncio.to_thread(cluster.await_state, "Suspended")
            left = left_in(folder)
        finally:
            await agent.end()
            engine.close()
    assert digest_of({}, STORE, TRACKING, HUB) in told
    assert not any(b"hidden-91" in content for content in left)
    assert "hidden-91" not in cluster.operator.log.read_text()
