"""Real engine, agent and worker: a job is finetuned in a slot while requests are answered."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from support.examplejob import MODEL, pod_job

from windrow.eventlog import StepEvent, TaskletEvent, read_events
from windrow.proto import attach_pb2
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

Event = attach_pb2.JobEvent

pytestmark = [
    pytest.mark.paired,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="a host device has two cores at least"
    ),
    pytest.mark.timeout(280),
]


def job(folder: Path) -> dict:
    sizes = {"maxSteps": 6, "batchSize": 4, "maxSequenceLength": 256}
    return pod_job(folder, every_steps=3, dataset={"evalFraction": 0.05}, **sizes)


def start(words: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", *words], env=env, stdout=out, stderr=out, process_group=0
        )


@pytest.fixture
async def pod():
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        operator = AttachedOperator()
        await operator.start()
        (folder / "token").write_text("secret")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {
            **os.environ,
            ENV_RUN_DIR: name,
            ENV_LOG_DIR: name,
            ENV_POD_NAME: "decode-0",
            "OMP_WAIT_POLICY": "passive",
        }
        engine = ["windrow_sidecar.engines.builtin", f"--model-path={MODEL}", f"--port={port}"]
        agent = [
            "windrow_sidecar.agent",
            f"--operator-address=127.0.0.1:{operator.port}",
            f"--operator-ca={operator.cert.decode()}",
            f"--token-file={folder / 'token'}",
        ]
        running = [start(words, env, folder / "pod.log") for words in (engine, agent)]
        try:
            await until(lambda: operator.has_engine, 120)
            yield operator, f"http://127.0.0.1:{port}", folder
        finally:
            for process in reversed(running):
                process.terminate()
            for process in running:
                process.wait(30)
            await operator.stop()
            print((folder / "pod.log").read_text()[-6000:])


async def ask(client: httpx.AsyncClient, n: int) -> int:
    answer = await client.post(
        "/v1/completions",
        json={"model": "m", "prompt": f"Question {n}: " + "words " * 60, "max_tokens": 120},
    )
    answer.raise_for_status()
    return answer.json()["usage"]["completion_tokens"]


async def test_a_job_is_harvested_while_requests_are_answered(pod):
    operator, url, folder = pod
    operator.set_policy(
        name="chat",
        policy="windrow",
        mode="harvest",
        objective_seconds=2.0,  # whatever the machine does: this is about the chain, not the time
        percentile=99,
        max_memory_percent=50,
    )
    operator.assign(job(folder))
    started = await until(lambda: operator.event(Event.STARTED) or operator.event(Event.FAILED), 90)
    assert started.kind == Event.STARTED, started.detail

    def logged() -> tuple[list[StepEvent], list[TaskletEvent]]:
        events = [event for _, event in read_events(folder)]
        return (
            [e for e in events if isinstance(e, StepEvent)],
            [e for e in events if isinstance(e, TaskletEvent)],
        )

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        # The worker may need longer to its first tasklet than four answers take.
        while not {step.finetune_units for step in logged()[0]} & {1, 2}:
            assert not operator.event(Event.SUCCEEDED), "no step had a grant"
            tokens = await asyncio.gather(*(ask(client, n) for n in range(4)))
            assert all(tokens)
    done = await until(lambda: operator.event(Event.SUCCEEDED) or operator.event(Event.FAILED), 150)
    assert done.kind == Event.SUCCEEDED, done.detail
    assert done.progress.step == 6
    assert (Path(done.adapter_path) / "adapter_model.safetensors").exists()
    beats = operator.heartbeats
    assert max(b.chunks_lent for b in beats) > 0
    assert max(b.job.progress.tokens for b in beats) > 0
    assert max(b.compute_utilization for b in beats) > max(
        b.compute_utilization_decode for b in beats[-3:]
    )
    await until(lambda: operator.heartbeats[-1].chunks_lent == 0)

    steps, tasklets = await until(lambda: (both := logged())[0] and both[1] and both)
    assert all(1 <= s.decode_units <= len(os.sched_getaffinity(0)) for s in steps)
    assert {t.phase for t in tasklets} >= {"fwd", "bwd", "opt"}
