"""Finetune in the built-in engine's own process, from its command line and by an agent."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file
from waiting import wait_until
from worker_pod import MODEL, ROOT, UID, Agent, job_spec

from windrow.eventlog import StepEvent, read_events
from windrow.protocol import Ending
from windrow.rundir import ENV_LOG_DIR, ENV_RUN_DIR, RunDir

PROMPT = "The for statement"
JOB = ("--finetune-job", "job.json", "--finetune-objective", "40ms")


class Engine:
    """Engine process with its HTTP client and its log."""

    def __init__(self, folder: Path, *flags: str, run_dir: Path | None = None) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        self.folder, self.output = folder, folder / "engine.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WINDROW_")}
        environment[ENV_LOG_DIR] = str(folder)
        if run_dir is not None:
            environment[ENV_RUN_DIR] = str(run_dir)
        command = [sys.executable, "-m", "windrow_sidecar.engines.builtin"]
        command += ["--model-path", str(MODEL), "--port", str(self.port)]
        command += ["--profile", "roofline" if flags else "none", "--cpu-threads", "1", *flags]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        self.answer = ""  # of the last request, once it has ended
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def wait(self) -> Engine:
        wait_until(self._is_ready, "engine is ready", seconds=90)
        return self

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def complete(self) -> str:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def until_said(self, words: str) -> str:
        def said() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return words in self.output.read_text()

        wait_until(said, f"the engine says {words!r}", seconds=120)
        return self.output.read_text()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()


def manifest(folder: Path, name: str, **training) -> Path:
    spec = job_spec(folder / name)
    spec["training"] |= training
    path = folder / f"{name}.json"
    document = {"kind": "FinetuneJob", "metadata": {"name": name}, "spec": spec}
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    """Start an engine with a job that fails, one that ends and an endless one."""
    folder = tmp_path_factory.mktemp("in-engine")
    broken = manifest(folder, "broken")
    document = json.loads(broken.read_text())
    (folder / "rows.jsonl").write_text('{"messages": []}\n')
    document["spec"]["dataset"]["source"] = str(folder / "rows.jsonl")
    broken.write_text(json.dumps(document))
    jobs = [broken, manifest(folder, "good"), manifest(folder, "endless", maxSteps=100_000)]
    flags = [word for job in jobs for word in ("--finetune-job", str(job))]
    objective = ("--finetune-objective", "100ms", "--finetune-policy", "flexllm")
    started = Engine(folder, "--finetune", "fused", *objective, *flags)
    yield started.wait()
    started.close()


@pytest.mark.extended
def test_a_job_that_fails_ends_alone_and_the_next_one_succeeds(engine):
    answer = engine.complete()
    said = engine.until_said("job good SUCCEEDED")
    assert "job broken FAILED: DatasetInvalid" in said
    assert "rows.jsonl:1" in said
    assert load_file(engine.folder / "good" / "adapter_model.safetensors")
    assert engine.complete() == answer


def test_requests_are_answered_while_it_trains_in_the_gaps_before_steps(engine):
    engine.until_said("job endless STARTED")

    def shared() -> bool:
        engine.complete()
        return "a decode step has shared its products" in engine.output.read_text()

    wait_until(shared, "a step's products were shared with a forward", seconds=120)
    steps = [e for _, e in read_events(engine.folder) if isinstance(e, StepEvent)]
    assert any(step.finetune_units for step in steps)


@pytest.mark.extended
def test_the_end_of_the_engine_is_survived_by_a_checkpoint(engine):
    engine.until_said("job endless STARTED")
    wait_until(
        lambda: (
            "step 1 of" in engine.output.read_text() or "CHECKPOINTED" in engine.output.read_text()
        ),
        "a step is done",
        seconds=60,
    )
    engine.answer = engine.complete()
    assert engine.end() == 0, engine.output.read_text()
    said = engine.output.read_text()
    assert "job endless STOPPED: Stopped; the engine ends" in said
    assert "Traceback" not in said
    assert "freed with the process" not in said
    turns = re.search(r"(\d+) turns before a step, (\d+) with the step's products shared", said)
    assert int(turns[1]) >= int(turns[2]) > 0
    assert list((engine.folder / "endless").rglob("step-*"))


@pytest.mark.extended
def test_a_worker_of_the_agent_relays_its_job_to_the_engine(engine, tmp_path):
    sharing = engine  # has ended: it would train meanwhile
    run_dir = RunDir(tmp_path)
    agent = Agent(run_dir)
    engine = Engine(tmp_path, "--finetune", "in-engine", run_dir=tmp_path)
    try:
        engine.wait()
        alone = engine.complete()
        folder = run_dir.job_dir(UID)
        folder.mkdir(parents=True)
        job = {"namespace": "default", "name": UID, "uid": UID, "epoch": 1}
        job["spec"] = job_spec(tmp_path / "out")
        job["spec"]["training"]["maxSteps"] = 100_000
        (folder / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "windrow_sidecar.finetune.worker"]
        command += ["--run-dir", str(tmp_path), "--job-uid", UID, "--epoch", "1"]
        worker = subprocess.Popen(command, cwd=ROOT)
        wait_until(lambda: "STARTED" in agent.kinds(), "the job has started", seconds=90)
        assert [hello.pid for hello in agent.hellos] == [worker.pid]
        assert engine.complete() == alone
        assert sharing.answer == alone, "also where finetune rows were in the same products"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == Ending.STOPPED
        assert agent.kinds()[-1] == "STOPPED"
        assert engine.complete()
    finally:
        engine.close()
        agent.close()


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--finetune-job", "job.json"], "--finetune-job"),
        (["--finetune", "in-engine"], "--finetune"),
        (["--finetune", "in-engine", "--finetune-job", "job.json"], "--finetune-objective"),
        (["--finetune", "in-engine", "--device", "cuda"], "--finetune"),
        (["--finetune", "fused", "--decode-step", "static", *JOB], "--decode-step"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(flags, field):
    from windrow.errors import UserError
    from windrow_sidecar.engines.builtin.settings import EngineSettings

    with pytest.raises(UserError) as refused:
        EngineSettings.from_command_line(["--model-path", str(MODEL), *flags], {})
    assert refused.value.field == field
    assert refused.value.remedy
