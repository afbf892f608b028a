"""SGLang's server as users start it, with a real sidecar: a job is trained while it answers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors import safe_open
from support.sglang_pods import QUESTIONS, TOKENS, events_of, job, start_agent
from support.sglang_servers import (
    DECODE,
    MODEL,
    OVER_TCP,
    TRANSFER,
    Server,
    complete,
    require_transfer,
    start_server,
    text_of,
)

from windrow.eventlog import StepEvent, TaskletEvent
from windrow.proto import attach_pb2
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR
from windrow_sidecar.agent.exporter import PORT_FILE
from windrow_sidecar.engines.sglang.compat import ENV_TRANSFER_GUARD
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

Event = attach_pb2.JobEvent

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="a host device has two cores at least"
    ),
]
STOPPED_S = 5.0


@dataclass(frozen=True)
class Pod:
    """A harvested decode instance, its sidecar, and who computes its prompts."""

    operator: AttachedOperator
    servers: tuple[Server, ...]  # the last one is harvested
    folder: Path
    sidecar: psutil.Process


@pytest.fixture(params=["alone", "behind prefill"])
async def pod(request, run_dir):
    """An instance that also prefills, and one whose KV a prefill instance sends."""
    operator = AttachedOperator()
    await operator.start()
    (run_dir / "token").write_text("secret")
    env = {
        ENV_RUN_DIR: str(run_dir),
        ENV_LOG_DIR: str(run_dir),
        ENV_POD_NAME: "decode-0",
        ENV_TRANSFER_GUARD: "2",  # nothing is given up here
    }
    log, room, servers = run_dir / "pod.log", "--max-total-tokens=16384", []
    if request.param == "alone":
        servers = [start_server(log, room, environment=env)]
    else:
        require_transfer()
        prefill = ("--disaggregation-mode=prefill", TRANSFER, room)
        servers = [
            start_server(run_dir / "prefill.log", *prefill, environment=OVER_TCP),
            start_server(log, *DECODE, TRANSFER, room, environment=OVER_TCP | env),
        ]
    sidecar = start_agent(operator, run_dir, env)
    try:
        await until(lambda: operator.has_engine, 300)
        await until(lambda: all(server.is_up() for server in servers), 300)
        yield Pod(operator, tuple(servers), run_dir, psutil.Process(sidecar.pid))
    finally:
        sidecar.terminate()
        sidecar.wait(60)
        for server in servers:
            server.end()
        await operator.stop()


async def answers(client: httpx.AsyncClient, pod: Pod) -> list[str]:
    found = (complete(client, pod.servers, str(MODEL), each, TOKENS) for each in QUESTIONS)
    return [text_of(answer) for answer in await asyncio.gather(*found)]


async def test_a_job_is_trained_beside_sglang_and_its_answers_stay_the_same(pod):
    operator, folder = pod.operator, pod.folder
    async with httpx.AsyncClient(timeout=120) as client:
        before = await answers(client, pod)
        operator.set_policy(
            name="chat",
            policy="windrow",
            mode="harvest",
            objective_seconds=2.0,  # this is about the chain, not the time
            first_token_seconds=60.0,
            percentile=99,
            max_memory_percent=50,
        )
        operator.assign(job(folder))
        beside, stops = [], []
        while not (end := operator.event(Event.SUCCEEDED) or operator.event(Event.FAILED)):
            beside.append(await answers(client, pod))
            assert len(beside) < 2000, "the job does not end"
            if len(stops) < 2 and is_lending(folder):
                stopped = pod.sidecar if stops else worker_of(folder)
                stops.append(await answers_while_stopped(client, pod, stopped, beside))
        assert end.kind == Event.SUCCEEDED, end.detail
        assert (await client.get(f"{pod.servers[-1].url}/health")).status_code == 200
        here = len(pod.servers) == 1  # prompts are computed by the harvested instance
        shown = await metric(client, folder, "windrow_decode_first_tokens_total")
        assert (shown > len(QUESTIONS)) == here
    assert all(found == before for found in beside)
    (adapter,) = (folder / "adapters").rglob("adapter_model.safetensors")
    with safe_open(adapter, framework="pt") as file:
        assert any("lora_B" in name for name in file.keys())  # noqa: SIM118
    assert_shared(folder)
    assert len(stops) == 2, "nothing was stopped while chunks were lent"
    assert_never_held_up(folder, *stops[0])
    assert_never_held_up(folder, *stops[1])
    assert not [t for t in events_of(folder, TaskletEvent) if within(t, *stops[0])]


async def metric(client: httpx.AsyncClient, folder: Path, name: str) -> float:
    """Return a figure that the sidecar shows, of the only slot."""
    port = (folder / PORT_FILE).read_text().strip()
    shown = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    (value,) = re.findall(rf"^{name}{{.*}} (\S+)$", shown, re.MULTILINE)
    return float(value)


def worker_of(folder: Path) -> psutil.Process:
    """The job's worker, as the sidecar names it in its log: another one may wait beside it."""
    (pid,) = re.findall(r"epoch 1: worker (\d+)", (folder / "pod.log").read_text())
    return psutil.Process(int(pid))


async def answers_while_stopped(
    client: httpx.AsyncClient, pod: Pod, process: psutil.Process, found: list[list[str]]
) -> tuple[int, int]:
    """Ask while a process does nothing. A step that waited for it would have no end.

    Returns from when to when (ns of CLOCK_MONOTONIC).
    """
    process.send_signal(signal.SIGSTOP)
    began_ns = time.monotonic_ns()
    try:
        while time.monotonic_ns() - began_ns < STOPPED_S * 1e9:
            found.append(await answers(client, pod))
    finally:
        ended_ns = time.monotonic_ns()
        process.send_signal(signal.SIGCONT)
    return began_ns, ended_ns


def is_lending(folder: Path) -> bool:
    steps = events_of(folder, StepEvent)
    return bool(steps) and steps[-1].chunks_lent > 0


def within(event: StepEvent | TaskletEvent, began_ns: int, ended_ns: int) -> bool:
    return began_ns < event.start_ns and event.end_ns < ended_ns


def assert_never_held_up(folder: Path, began_ns: int, ended_ns: int) -> None:
    steps = [s for s in events_of(folder, StepEvent) if within(s, began_ns, ended_ns)]
    assert len(steps) >= TOKENS - 1
    assert any(step.chunks_lent for step in steps)


def assert_shared(folder: Path) -> None:
    """Tasklets ran while steps did, chunks were lent, and decode was put aside for them."""
    steps, tasklets = events_of(folder, StepEvent), events_of(folder, TaskletEvent)
    assert any(step.chunks_lent for step in steps)
    beside = [step for step in steps if step.finetune_units]
    assert beside
    assert any(
        tasklet.start_ns < step.end_ns and step.start_ns < tasklet.end_ns
        for step in beside
        for tasklet in tasklets
    )
    log = (folder / "pod.log").read_text()
    assert "harvesting is off" not in log
    assert "leak" not in log
