"""Real engine over two ranks, agent and a worker of two ranks: a job is finetuned beside decode."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.examplejob import MODEL, pod_job
from waiting import is_running

from windrow.eventlog import StepEvent, TaskletEvent, read_events
from windrow.proto import attach_pb2
from windrow.rundir import ENV_LOG_DIR, ENV_POD_NAME, ENV_RUN_DIR
from windrow_sidecar.engines.weight_files import read_header
from windrow_sidecar.testing.attached_operator import AttachedOperator, until

Event = attach_pb2.JobEvent
POLICY = {
    "name": "chat",
    "policy": "windrow",
    "mode": "harvest",
    "objective_seconds": 2.0,  # whatever the machine does: this is about the chain, not the time
    "percentile": 99,
    "max_memory_percent": 50,
}

pytestmark = [
    pytest.mark.paired,
    pytest.mark.extended,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="a host device has two cores at least"
    ),
    pytest.mark.timeout(280),
]


def job(folder: Path, **training: int) -> dict:
    usual = {"maxSteps": 3, "batchSize": 2, "maxSequenceLength": 128}
    return pod_job(folder, every_steps=1, **(usual | training))


def start(words: list[str], env: dict[str, str], log: Path) -> subprocess.Popen:
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", *words], env=env, stdout=out, stderr=out, process_group=0
        )


@pytest.fixture
async def pod(request):
    """An engine over two ranks, or as many as the test says, its agent, and an operator."""
    ranks = getattr(request, "param", 2)
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
        engine = [
            *("windrow_sidecar.engines.builtin", f"--model-path={MODEL}", f"--port={port}"),
            f"--tp={ranks}",
        ]
        agent = [
            "windrow_sidecar.agent",
            f"--operator-address=127.0.0.1:{operator.port}",
            f"--operator-ca={operator.cert.decode()}",
            f"--token-file={folder / 'token'}",
        ]
        running = [start(words, env, folder / "pod.log") for words in (engine, agent)]
        try:
            await until(lambda: operator.has_engine, 120)
            operator.set_policy(**POLICY)
            yield operator, f"http://127.0.0.1:{port}", folder, running
        finally:
            for process in reversed(running):
                process.terminate()
            for process in running:
                process.wait(30)
            await operator.stop()
            print((folder / "pod.log").read_text()[-6000:])


async def ask(client: httpx.AsyncClient, n: int) -> str:
    answer = await client.post(
        "/v1/completions",
        json={
            **{"prompt": f"Question {n}: " + "words " * 20, "max_tokens": 30},
            **{"temperature": 0, "ignore_eos": True},
        },
    )
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def answers(url: str) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return list(await asyncio.gather(*(ask(client, n) for n in range(2))))


def ranks_of(folder: Path, epoch: int) -> list[psutil.Process]:
    """Return the ranks of the worker of a placement: the first one has forked the others first."""
    started = re.findall(rf"epoch {epoch}: worker (\d+)", (folder / "pod.log").read_text())
    worker = psutil.Process(int(started[-1]))
    ranks = int(worker.cmdline()[worker.cmdline().index("--tp") + 1])
    others = sorted(worker.children(), key=lambda child: child.pid)
    return [worker, *others[: ranks - 1]]


def is_rank(process: psutil.Process, engine: int) -> bool:
    """Return whether a process is a fork of the engine, with its command line."""
    return process.cmdline() == psutil.Process(engine).cmdline()


def by_rank(folder: Path, metric: str) -> dict[str, float]:
    """Return the series of a metric by its rank, as the sidecar exports them now."""
    port = (folder / "metrics.port").read_text().strip()
    families = text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {s.labels["rank"]: s.value for s in samples if s.name == metric}


def events_of(operator: AttachedOperator, epoch: int, *kinds: int) -> list[attach_pb2.JobEvent]:
    """Return what was told of a placement, of these kinds or of its end in failure."""
    return [
        m.job_event
        for m in operator.heard
        if m.HasField("job_event")
        and m.job_event.epoch == epoch
        and m.job_event.kind in (*kinds, Event.FAILED)
    ]


async def first_of(operator: AttachedOperator, epoch: int, kind: int) -> attach_pb2.JobEvent:
    await until(lambda: events_of(operator, epoch, kind), 150)
    found = events_of(operator, epoch, kind)[0]
    assert found.kind == kind, found.detail
    return found


async def begun(operator: AttachedOperator, folder: Path, epoch: int) -> list[psutil.Process]:
    """Assign a job that has no end; return its worker's ranks, once it has a checkpoint."""
    operator.assign(job(folder, maxSteps=100_000), uid=f"uid-{epoch}", epoch=epoch)
    await first_of(operator, epoch, Event.CHECKPOINTED)
    return ranks_of(folder, epoch)


async def test_a_job_over_ranks_outlives_its_ranks_and_decode_answers_as_alone(pod):
    operator, url, folder, (engine, _) = pod
    before = await answers(url)
    operator.assign(job(folder, maxSteps=100_000))
    await first_of(operator, 1, Event.STARTED)
    assert await answers(url) == before
    await first_of(operator, 1, Event.CHECKPOINTED)
    assert "rank 1 of 2: sharing decode's weights" in (folder / "pod.log").read_text()
    await until(lambda: any(b.chunks_lent for b in operator.heartbeats), 60)
    lent = await until(
        lambda: (
            (found := by_rank(folder, "windrow_rank_lent_bytes")) and all(found.values()) and found
        ),
        60,
    )
    assert lent.keys() == {"0", "1"}
    computed = by_rank(folder, "windrow_rank_computed_seconds_total")
    assert computed.keys() == {"0", "1"}
    assert min(computed.values()) > 0

    # A rank of the worker is stopped in the middle of a step: decode waits for it nowhere, and the
    # job ends by the group's own bound.
    ranks_of(folder, 1)[1].send_signal(signal.SIGSTOP)
    assert await answers(url) == before
    failed = await until(lambda: operator.event(Event.FAILED), 100)
    assert "no rank has gone on with its part for 10 s: rank 1 is stopped" in failed.detail
    assert "the last good checkpoint is" in failed.detail
    step = failed.progress.checkpoint_step

    # The job goes on from there, to its end.
    operator.assign(job(folder, maxSteps=step + 2), epoch=2)
    done = await first_of(operator, 2, Event.SUCCEEDED)
    assert done.progress.step == step + 2
    assert read_header(Path(done.adapter_path) / "adapter_model.safetensors").tensors
    # What the first worker had died with came back as well.
    await until(lambda: operator.heartbeats[-1].chunks_lent == 0, 60)

    # The first rank of a worker takes the other along; a rank of decode ends the engine.
    first, other = await begun(operator, folder, 3)
    first.kill()
    await until(lambda: events_of(operator, 3), 60)  # its failure
    await until(lambda: not is_running(other.pid), 30)
    assert await answers(url) == before
    assert "harvesting is switched off" not in (folder / "pod.log").read_text()
    decodes = [p for p in psutil.Process(engine.pid).children() if is_rank(p, engine.pid)]
    assert len(decodes) == 1
    decodes[0].kill()
    assert await asyncio.to_thread(engine.wait, 30) == 1
    assert "rank 1 was ended by SIGKILL: so does the engine" in (folder / "pod.log").read_text()

    def logged() -> tuple[list[StepEvent], list[TaskletEvent]]:
        events = [event for _, event in read_events(folder)]
        return (
            [e for e in events if isinstance(e, StepEvent)],
            [e for e in events if isinstance(e, TaskletEvent)],
        )

    steps, tasklets = await until(lambda: (both := logged())[0] and both[1] and both)
    assert {s.finetune_units for s in steps} & {1, 2}  # granted during steps
    assert {t.phase for t in tasklets} >= {"fwd", "bwd", "opt"}


@pytest.mark.long
@pytest.mark.parametrize("pod", [4], indirect=True)
async def test_decode_over_four_ranks_answers_as_alone_whichever_part_is_killed_or_stopped(pod):
    operator, url, folder, (_, agent) = pod
    before = await answers(url)

    # A rank that is killed ends the job by its name.
    ranks = await begun(operator, folder, 1)
    assert len(ranks) == 4
    ranks[2].kill()
    failed = await until(lambda: events_of(operator, 1), 100)
    assert "rank 2 was ended by SIGKILL; the last good checkpoint is" in failed[0].detail
    assert await answers(url) == before

    # So does a last one that is stopped.
    ranks = await begun(operator, folder, 2)
    ranks[3].send_signal(signal.SIGSTOP)
    assert await answers(url) == before
    failed = await until(lambda: events_of(operator, 2), 100)
    assert "rank 3 is stopped" in failed[0].detail

    # A first rank that is stopped is silent for decode; it goes on, or the others end with it.
    ranks = await begun(operator, folder, 3)
    ranks[0].send_signal(signal.SIGSTOP)
    assert await answers(url) == before
    ranks[0].send_signal(signal.SIGCONT)
    seen = len(told_of_checkpoints(operator, 3))
    await until(lambda: len(told_of_checkpoints(operator, 3)) > seen, 100)
    ranks[0].send_signal(signal.SIGSTOP)
    ranks[0].kill()
    await until(lambda: events_of(operator, 3), 60)
    await until(lambda: not any(is_running(rank.pid) for rank in ranks), 60)
    assert await answers(url) == before

    # The agent takes the worker along, which gives its memory back; decode serves alone.
    ranks = await begun(operator, folder, 4)
    await until(lambda: operator.heartbeats[-1].chunks_lent, 60)
    agent.kill()
    await until(lambda: not any(is_running(rank.pid) for rank in ranks), 100)
    assert await answers(url) == before
    assert "harvesting is switched off" not in (folder / "pod.log").read_text()


def told_of_checkpoints(operator: AttachedOperator, epoch: int) -> list[attach_pb2.JobEvent]:
    return events_of(operator, epoch, Event.CHECKPOINTED)
