"""A pod with several engines: a slot for each, placed on and lost one by one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from agent_pod import Agent, Engine
from waiting import wait_until

from windrow.rundir import ENV_OUTPUT_TREES

pytestmark = pytest.mark.paired
SLOTS = ("decode-0", "decode-0.1")


@pytest.fixture
async def pod(cluster, monkeypatch) -> AsyncIterator[SimpleNamespace]:
    """A decode pod of the API server, with its agent and two engines as processes and threads."""
    monkeypatch.setenv(ENV_OUTPUT_TREES, "/out")
    cluster.policy()
    created = cluster.pod()
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        operator = SimpleNamespace(
            port=cluster.operator.state["attachPort"], cert=cluster.authority()
        )
        agent = Agent(
            folder,
            operator,
            f"--pod-namespace={cluster.namespace}",
            f"--pod-uid={created.metadata.uid}",
            "--max-jobs=1",
        )
        (folder / "token").write_text(cluster.token(created))
        engines = [Engine(folder, slot) for slot in range(len(SLOTS))]
        await agent.start()
        try:
            for engine in engines:
                engine.start()
            yield SimpleNamespace(folder=folder, agent=agent, engines=engines)
            print((folder / "agent.log").read_text())
        finally:
            await agent.end()
            for engine in engines:
                with contextlib.suppress(Exception):
                    engine.close()


def ready(cluster, slot: str) -> tuple[str, str]:
    """Return status and reason of a slot's condition Ready."""
    held = cluster.get("harvestslots", slot).get("status", {}).get("conditions") or []
    return next(((c["status"], c["reason"]) for c in held if c["type"] == "Ready"), ("", ""))


def await_ready(cluster, slot: str, status: str, reason: str) -> None:
    def is_so() -> bool:
        found = cluster.custom.list_namespaced_custom_object(
            "windrow.dev", "v1alpha1", cluster.namespace, "harvestslots"
        )
        there = slot in {item["metadata"]["name"] for item in found["items"]}
        return there and ready(cluster, slot) == (status, reason)

    wait_until(is_so, f"slot {slot} is {status}, {reason}")


def placed(cluster, name: str) -> str:
    """Wait until a job runs; return its slot's name."""
    wait_until(lambda: cluster.status(name).get("state") == "Running", f"job {name} runs")
    return str(cluster.status(name)["slot"].rpartition("/")[2])


def goes_on(cluster, name: str) -> None:
    def step() -> int:
        return int((cluster.status(name).get("step") or "0/").partition("/")[0])

    before = step()
    wait_until(lambda: step() > before, f"job {name} gets further")


async def test_each_slot_gets_a_job_and_the_loss_of_one_leaves_the_other_at_work(cluster, pod):
    for slot in SLOTS:
        await_ready(cluster, slot, "True", "Serving")
    for name in ("one", "two"):
        cluster.job(name, training={"maxSteps": 100000, "learningRate": "2e-4"})
    on = {placed(cluster, name): name for name in ("one", "two")}
    assert set(on) == set(SLOTS)
    spec = cluster.get("harvestslots", SLOTS[1])["spec"]
    assert (spec["podName"], spec["index"]) == ("decode-0", 1)
    assert len(pod.agent.worker_pids()) == 2
    for slot in SLOTS:
        labels = {"namespace": cluster.namespace, "slot": slot, "state": "kv"}
        assert pod.agent.sample("windrow_arena_bytes", **labels) is not None

    kept, lost = on[SLOTS[0]], on[SLOTS[1]]
    pod.engines[1].close()
    await_ready(cluster, SLOTS[1], "False", "EngineNotServing")
    wait_until(lambda: cluster.status(lost).get("state") != "Running", f"job {lost} is lost")
    await_ready(cluster, SLOTS[0], "True", "Serving")
    goes_on(cluster, kept)
    assert cluster.status(kept)["epoch"] == 1

    pod.engines[1] = Engine(pod.folder, 1)
    pod.engines[1].start()
    assert placed(cluster, lost) == SLOTS[1]
    assert cluster.status(lost)["epoch"] > 1
    assert cluster.status(kept)["epoch"] == 1
