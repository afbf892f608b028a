"""SGLang's server with jobs in its scheduler's process, and a real sidecar that sends them."""

from __future__ import annotations

import asyncio

import httpx
import psutil
import pytest
from safetensors import safe_open
from support.sglang_pods import QUESTIONS, TOKENS, events_of, job, start_agent
from support.sglang_servers import MODEL, complete, start_server, text_of

from windrow.eventlog import StepEvent, TaskletEvent
from windrow.proto import attach_pb2
from windrow.rundir import ENV_FINETUNE, ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

Event = attach_pb2.JobEvent
pytestmark = pytest.mark.alone


async def test_a_job_is_trained_in_the_scheduler_and_answers_stay_the_same(run_dir):
    operator = AttachedOperator()
    await operator.start()
    (run_dir / "token").write_text("secret")
    env = {ENV_RUN_DIR: str(run_dir), ENV_LOG_DIR: str(run_dir), ENV_POD_NAME: "decode-0"}
    options = ("--max-total-tokens=16384",)
    short = job(run_dir)
    short["training"]["maxSteps"] = 8
    server = start_server(
        run_dir / "pod.log", *options, environment=env | {ENV_FINETUNE: "in-engine"}
    )
    sidecar = start_agent(operator, run_dir, env)
    try:
        await until(lambda: operator.has_engine, 300)
        await until(server.is_up, 300)
        async with httpx.AsyncClient(timeout=120) as client:

            async def answers() -> list[str]:
                asked = (complete(client, (server,), str(MODEL), q, TOKENS) for q in QUESTIONS)
                return [text_of(answer) for answer in await asyncio.gather(*asked)]

            before = await answers()
            operator.set_policy(
                name="chat",
                policy="windrow",
                mode="harvest",
                objective_seconds=2.0,  # this is about the chain, not the time
                first_token_seconds=60.0,
                percentile=99,
                max_memory_percent=50,
            )
            operator.assign(short)
            beside, of_server = [], set()
            while not (end := operator.event(Event.SUCCEEDED) or operator.event(Event.FAILED)):
                beside.append(await answers())
                assert len(beside) < 2000, "the job does not end"
                of_server |= {p.pid for p in psutil.Process(server.process.pid).children(True)}
            assert end.kind == Event.SUCCEEDED, end.detail
            assert await answers() == before
        assert all(found == before for found in beside)
    finally:
        sidecar.terminate()
        sidecar.wait(60)
        server.end()
        await operator.stop()
    said = (run_dir / "pod.log").read_text()
    assert "jobs run in the scheduler's process" in said
    assert "harvesting is off" not in said
    (adapter,) = (run_dir / "adapters").rglob("adapter_model.safetensors")
    with safe_open(adapter, framework="pt") as file:
        assert any("lora_B" in name for name in file.keys())  # noqa: SIM118
    steps, tasklets = events_of(run_dir, StepEvent), events_of(run_dir, TaskletEvent)
    assert any(step.finetune_units for step in steps), "a step began with a turn"
    assert tasklets
    (log,) = run_dir.rglob("worker-*.events.jsonl")  # its name ends with the process that computed
    assert int(log.name.split(".")[0].rsplit("-", 1)[1]) in of_server
    assert any(step.chunks_lent for step in steps)
