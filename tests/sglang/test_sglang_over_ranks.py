"""SGLang's server with its model over two ranks, a real sidecar, and a worker of two ranks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from support.examplejob import pod_job
from support.sglang_pods import events_of, start_agent
from support.sglang_servers import (
    MODEL,
    OVER_RANKS,
    PYTHON,
    Server,
    complete,
    start_server,
    text_of,
)

from windrow.eventlog import StepEvent, TaskletEvent
from windrow.proto import attach_pb2
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR, RunDir
from windrow_sidecar.engines.weight_files import read_header
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

Event = attach_pb2.JobEvent
RANKS = 2

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="a host device has two cores at least"
    ),
]


def job(folder: Path, **training: int) -> dict:
    usual = {"maxSteps": 3, "batchSize": 2, "maxSequenceLength": 128}
    return pod_job(folder, every_steps=1, **(usual | training))


@dataclass(frozen=True)
class Pod:
    """A harvested instance over ranks, its sidecar and the operator."""

    operator: AttachedOperator
    server: Server
    folder: Path
    sidecar: subprocess.Popen

    @property
    def log(self) -> str:
        return (self.folder / "pod.log").read_text()

    def harvest(self, max_memory_percent: int = 50) -> None:
        """Let a policy harvest; its objective is about the chain, not the time."""
        self.operator.set_policy(
            name="chat",
            policy="windrow",
            mode="harvest",
            objective_seconds=2.0,
            percentile=99,
            max_memory_percent=max_memory_percent,
        )

    def lent(self) -> int:
        """Return how many chunks the worker has, as the newest heartbeat says."""
        return self.operator.heartbeats[-1].chunks_lent if self.operator.heartbeats else 0

    async def first_of(self, epoch: int, kind: int) -> attach_pb2.JobEvent:
        """Return the first event of a kind that a placement has, or fail with its failure."""

        def found() -> list[attach_pb2.JobEvent]:
            said = [m.job_event for m in self.operator.heard if m.HasField("job_event")]
            return [e for e in said if e.epoch == epoch and e.kind in (kind, Event.FAILED)]

        await until(found, 240)
        assert found()[0].kind == kind, found()[0].detail
        return found()[0]


@asynccontextmanager
async def harvested(folder: Path) -> AsyncIterator[Pod]:
    operator = AttachedOperator()
    await operator.start()
    (folder / "token").write_text("secret")
    env = {ENV_RUN_DIR: str(folder), ENV_LOG_DIR: str(folder), ENV_POD_NAME: "decode-0"}
    log = folder / "pod.log"
    server = start_server(log, *OVER_RANKS.options, environment=OVER_RANKS.environment | env)
    sidecar = start_agent(operator, folder, env)
    try:
        await until(lambda: operator.has_engine or not server.is_running(), 300)
        await until(server.is_up, 300)
        yield Pod(operator, server, folder, sidecar)
    finally:
        sidecar.terminate()
        sidecar.wait(60)
        server.end()
        await operator.stop()


async def answers(server: Server, n: int, tokens: int, first: int = 0) -> list[str]:
    """Return the greedy answers to n questions from the first, six of which are asked at a time."""
    limit = asyncio.Semaphore(6)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        prompt = f"Question {number}: " + "words " * (number % 7)
        async with limit:
            answer = await complete(client, (server,), str(MODEL), prompt, tokens + number % 5)
        return text_of(answer)

    async with httpx.AsyncClient(timeout=240) as client:
        return list(
            await asyncio.gather(*(one(client, number) for number in range(first, first + n)))
        )


def other_rank(pod: Pod, epoch: int) -> psutil.Process:
    """Return rank 1 of the worker of a placement: the first process that it has forked."""
    (pid,) = re.findall(rf"epoch {epoch}: worker (\d+)", pod.log)
    return min(psutil.Process(int(pid)).children(), key=lambda child: child.pid)


async def test_a_job_over_ranks_is_trained_beside_sglang_and_outlives_its_ranks(run_dir):
    async with harvested(run_dir) as pod:
        assert f"can be lent on each of {RANKS} ranks" in pod.log
        before = await answers(pod.server, 4, 12)
        pod.harvest()
        pod.operator.assign(job(run_dir, maxSteps=100_000))
        beside: list[list[str]] = []

        async def ask_until(event: asyncio.Task) -> attach_pb2.JobEvent:
            while not event.done():
                beside.append(await answers(pod.server, 4, 12))
                await asyncio.wait({event}, timeout=0.3)  # what idles belongs to the worker
            return await event

        await ask_until(asyncio.create_task(pod.first_of(1, Event.CHECKPOINTED)))
        await ask_until(asyncio.create_task(until(lambda: pod.lent() > 0, 120)))
        pod.harvest(max_memory_percent=0)  # all of it is asked back, from both ranks
        await ask_until(asyncio.create_task(until(lambda: pod.lent() == 0, 120)))
        pod.harvest()
        await ask_until(asyncio.create_task(until(lambda: pod.lent() > 0, 120)))
        assert f"rank 1 of {RANKS}: sharing decode's weights" in pod.log
        assert "read its weights from files" not in pod.log
        # A rank of the worker that is stopped, then killed: decode waits for neither.
        other = other_rank(pod, epoch=1)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            other.send_signal(number)
            assert await answers(pod.server, 4, 12) == before
        failed = await until(lambda: pod.operator.event(Event.FAILED), 60)
        assert "rank 1 was ended by SIGKILL; the last good checkpoint is" in failed.detail
        await until(lambda: pod.lent() == 0, 60)  # of a worker that has gave nothing back
        step = failed.progress.checkpoint_step
        pod.operator.assign(job(run_dir, maxSteps=step + 1), epoch=2)
        done = await ask_until(asyncio.create_task(pod.first_of(2, Event.SUCCEEDED)))
        assert done.progress.step == step + 1
        assert read_header(Path(done.adapter_path) / "adapter_model.safetensors").tensors
        assert all(found == before for found in beside)
        (slot,) = pod.operator.hellos[-1].slots
        assert slot.ranks == RANKS
        steps = events_of(run_dir, StepEvent)
        assert events_of(run_dir, TaskletEvent)
        assert len({step.decode_units for step in steps}) > 1  # decode was put aside, on all ranks
        assert "harvesting is off" not in pod.log
        assert not RunDir(run_dir).of_rank(1).refusal().exists()


def test_sglangs_allocators_on_2_and_4_ranks_give_the_same_pages_whatever_is_lent(tmp_path):
    result = tmp_path / "result.json"
    program = Path(__file__).parent / "rank_lending_process.py"
    done = subprocess.run(
        [str(PYTHON), str(program), "3000", str(result)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    of_ranks = json.loads(result.read_text())
    assert of_ranks.keys() == {"2", "4"}
    for counts in of_ranks.values():
        assert counts["differ"] == 0
        assert counts["lent"] > 50
        assert counts["back"] > 50
        assert counts["deaths"] > 1


def lends_none(pod: Pod) -> bool:
    return pod.lent() == 0


async def ends_with_a_rank(server: Server) -> bool:
    """Kill rank 1 of a server's schedulers; return whether the server ends within two minutes."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (rank_1,) = [child for child in children if "scheduler_TP1" in " ".join(child.cmdline())]
    rank_1.kill()
    with suppress(AssertionError):
        await until(lambda: not server.is_running(), 120)
    return not server.is_running()


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_200_requests_beside_a_worker_have_the_tokens_of_stock_sglang(run_dir, tmp_path):
    stock = start_server(
        tmp_path / "stock.log", *OVER_RANKS.options, environment=OVER_RANKS.environment
    )
    try:
        await until(stock.is_up, 300)
        expected = await answers(stock, 200, 16)
        stock_ends = await ends_with_a_rank(stock)
    finally:
        stock.end()
    draw, found, seen = random.Random(47), [], [0]
    async with harvested(run_dir) as pod:
        pod.harvest()
        pod.operator.assign(job(run_dir, maxSteps=100_000, batchSize=8))
        beside = asyncio.create_task(pod.first_of(1, Event.CHECKPOINTED))
        while not beside.done():
            await answers(pod.server, 6, 16)
        await beside
        for first in range(0, 200, 10):
            # What a policy allows is lent, or asked back, before these are asked and beside them.
            fewer = len(seen) % 2 == 0
            pod.harvest(max_memory_percent=0 if fewer else draw.randint(20, 60))
            as_asked = partial(lends_none, pod) if fewer else pod.lent
            moved = asyncio.create_task(until(as_asked, 120))
            found += await answers(pod.server, 10, 16, first)
            while not moved.done():
                await answers(pod.server, 2, 16)
            await moved
            seen.append(pod.lent())
        assert found == expected
        assert min(seen) == 0 < max(seen)
        assert events_of(run_dir, TaskletEvent)
        assert "harvesting is off" not in pod.log
        assert not pod.operator.event(Event.FAILED)
        # Decode outlives its sidecar, which takes the worker along, and ends as stock SGLang does.
        pod.sidecar.kill()
        assert await answers(pod.server, 10, 16) == expected[:10]
        assert await ends_with_a_rank(pod.server) == stock_ends
