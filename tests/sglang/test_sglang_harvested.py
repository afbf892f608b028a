"""SGLang's server as users start it, with a real sidecar: a job is trained while it answers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors import safe_open

from windrow.eventlog import StepEvent, TaskletEvent, read_events
from windrow.proto import attach_pb2
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SGLANG_VENV", ROOT / ".venv-sglang")) / "bin" / "python"
MODEL = ROOT / "models" / "windrow-tiny"
ROWS = ROOT / "examples" / "support-tone" / "train.jsonl"
Event = attach_pb2.JobEvent

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="a host device has two cores at least"
    ),
]
SERVER = [
    "sglang.launch_server",
    f"--model-path={MODEL}",
    "--dtype=float32",
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--disable-radix-cache",
    "--max-total-tokens=16384",
    "--page-size=16",
    "--max-running-requests=8",
    "--num-reserved-decode-tokens=64",
    "--sleep-on-idle",
    "--host=127.0.0.1",
]
STOPPED_S, TOKENS = 5.0, 48
QUESTIONS = ["The for statement", "A list is", "To open a file", "When an exception is raised"]


def job(folder: Path) -> dict:
    return {
        "model": {"name": str(MODEL)},
        "dataset": {"source": str(ROWS), "format": "chat", "evalFraction": 0.05},
        "adapter": {"type": "lora", "lora": {"rank": 4, "alpha": 8}},
        "training": {
            # As many as two stops need, on a fast machine too.
            "maxSteps": 24,
            "batchSize": 4,
            "maxSequenceLength": 256,
            "learningRate": "2e-3",
        },
        "checkpoint": {"everySteps": 4},
        "output": {"destination": str(folder / "adapters")},
    }


def start(words: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    with log.open("ab") as out:
        return subprocess.Popen(words, env=env, stdout=out, stderr=out, process_group=0)


@pytest.fixture
async def pod(run_dir):
    operator = AttachedOperator()
    await operator.start()
    (run_dir / "token").write_text("secret")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        ENV_RUN_DIR: str(run_dir),
        ENV_LOG_DIR: str(run_dir),
        ENV_POD_NAME: "decode-0",
        "OMP_WAIT_POLICY": "passive",
    }
    server = [str(PYTHON), "-m", *SERVER, f"--port={port}"]
    agent = [
        *(sys.executable, "-m", "windrow_sidecar.agent"),
        f"--operator-address=127.0.0.1:{operator.port}",
        f"--operator-ca={operator.cert.decode()}",
        f"--token-file={run_dir / 'token'}",
    ]
    running = [
        start(words, {**env, **more}, run_dir / "pod.log")
        for words, more in ((server, {"SGLANG_USE_CPU_ENGINE": "1"}), (agent, {}))
    ]
    try:
        await until(lambda: any(h.slots for h in operator.hellos), 300)
        yield operator, f"http://127.0.0.1:{port}", run_dir, psutil.Process(running[1].pid)
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)
        await operator.stop()
        print((run_dir / "pod.log").read_text()[-6000:])


async def answer(client: httpx.AsyncClient, question: str, tokens: int = TOKENS) -> str:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    got = await client.post("/generate", json={"text": question, "sampling_params": params})
    got.raise_for_status()
    return got.json()["text"]


async def answers(client: httpx.AsyncClient) -> list[str]:
    return await asyncio.gather(*(answer(client, question) for question in QUESTIONS))


async def test_a_job_is_trained_beside_sglang_and_its_answers_stay_the_same(pod):
    operator, url, folder, sidecar = pod
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await healthy(client)
        before = await answers(client)
        operator.set_policy(
            name="chat",
            policy="windrow",
            mode="harvest",
            objective_seconds=2.0,  # this is about the chain, not the time
            percentile=99,
            max_memory_percent=50,
        )
        operator.assign(job(folder))
        beside, stops = [], []
        while not (end := operator.event(Event.SUCCEEDED) or operator.event(Event.FAILED)):
            beside.append(await answers(client))
            assert len(beside) < 2000, "the job does not end"
            if len(stops) < 2 and is_lending(folder):
                stopped = sidecar if stops else worker_of(folder)
                stops.append(await answers_while_stopped(client, stopped, beside))
        assert end.kind == Event.SUCCEEDED, end.detail
        assert (await client.get("/health")).status_code == 200
    assert all(found == before for found in beside)
    (adapter,) = (folder / "adapters").rglob("adapter_model.safetensors")
    with safe_open(adapter, framework="pt") as file:
        assert any("lora_B" in name for name in file.keys())  # noqa: SIM118
    assert_shared(folder)
    assert len(stops) == 2, "nothing was stopped while chunks were lent"
    assert_never_held_up(folder, *stops[0])
    assert_never_held_up(folder, *stops[1])
    assert not [t for t in events_of(folder, TaskletEvent) if within(t, *stops[0])]


def worker_of(folder: Path) -> psutil.Process:
    """The job's worker, as the sidecar names it in its log: another one may wait beside it."""
    (pid,) = re.findall(r"epoch 1: worker (\d+)", (folder / "pod.log").read_text())
    return psutil.Process(int(pid))


async def answers_while_stopped(
    client: httpx.AsyncClient, process: psutil.Process, found: list[list[str]]
) -> tuple[int, int]:
    """Ask while a process does nothing. A step that waited for it would have no end.

    Returns from when to when (ns of CLOCK_MONOTONIC).
    """
    process.send_signal(signal.SIGSTOP)
    began_ns = time.monotonic_ns()
    try:
        while time.monotonic_ns() - began_ns < STOPPED_S * 1e9:
            found.append(await answers(client))
    finally:
        ended_ns = time.monotonic_ns()
        process.send_signal(signal.SIGCONT)
    return began_ns, ended_ns


def events_of(folder: Path, kind: type) -> list:
    return [event for _, event in read_events(folder) if isinstance(event, kind)]


def is_lending(folder: Path) -> bool:
    steps = events_of(folder, StepEvent)
    return bool(steps) and steps[-1].chunks_lent > 0


def within(event: StepEvent | TaskletEvent, began_ns: int, ended_ns: int) -> bool:
    return began_ns < event.start_ns and event.end_ns < ended_ns


def assert_never_held_up(folder: Path, began_ns: int, ended_ns: int) -> None:
    steps = [s for s in events_of(folder, StepEvent) if within(s, began_ns, ended_ns)]
    assert len(steps) >= TOKENS - 1
    assert any(step.chunks_lent for step in steps)


async def healthy(client: httpx.AsyncClient) -> None:
    for _ in range(1200):
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.25)
    pytest.fail("SGLang does not become healthy")


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
