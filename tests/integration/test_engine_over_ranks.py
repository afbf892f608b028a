"""The built-in engine with its model cut over ranks, as its users meet it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from waiting import wait_until

from windrow.errors import UserError
from windrow.rundir import ENV_RUN_DIR, RunDir
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.ranks import serving
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.testing.models import save_random_llama

TINY = Path(__file__).parents[2] / "models" / "windrow-tiny"
START_S, END_S = 90.0, 20.0
# Long enough for parts of prompts, and more at once than the arena holds: requests are retracted.
PROMPTS = ["The for statement", "def f(x):", "a" * 70, "import os"]
FLAGS = ("--arena-bytes", "768KiB", "--block-bytes", "16KiB", "--chunked-prefill-size", "32")


class Server:
    """A running engine over so many ranks."""

    def __init__(
        self, model: Path, folder: Path, ranks: int, *flags: str, run_dir: Path | None = None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WINDROW_")}
        if run_dir is not None:
            environment[ENV_RUN_DIR] = str(run_dir)
        self.output = folder / f"{port}.txt"
        module = ("-m", "windrow_sidecar.engines.builtin")
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, *module, "--model-path", str(model), "--port", str(port)),
                    *("--tp", str(ranks), "--cpu-threads", "1", *FLAGS, *flags),
                ],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        wait_until(self._is_ready, "engine is ready", seconds=START_S)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def ranks(self) -> list[psutil.Process]:
        """Return the other ranks: forks of the engine, with its command line."""
        engine = psutil.Process(self.process.pid)
        return [p for p in engine.children() if p.cmdline() == engine.cmdline()]

    def answers(self, **options: object) -> list[str]:
        """Return the texts that follow the prompts, asked for at once."""

        def ask(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "seed": 3, **options}
            found = self.http.post("/v1/completions", json={"temperature": 0, **body})
            return str(found.raise_for_status().json()["choices"][0]["text"])

        with ThreadPoolExecutor(len(PROMPTS)) as asking:
            return list(asking.map(ask, PROMPTS))

    def kill(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # Words that no number of ranks divides; a head of its own.
    overrides = {"tie_word_embeddings": False, "vocab_size": 267, "num_key_value_heads": 2}
    save_random_llama(folder, **overrides)
    return folder


@pytest.fixture(scope="module")
def one_rank(model, tmp_path_factory) -> dict[str, list[str]]:
    server = Server(model, tmp_path_factory.mktemp("one"), 1)
    try:
        return {"greedy": server.answers(), "drawn": server.answers(temperature=0.8)}
    finally:
        server.kill()


@pytest.mark.parametrize("ranks", [2, 4])
def test_answers_are_those_of_one_rank(model, one_rank, ranks, tmp_path):
    """Neighbours share a key-value head: with 4 ranks there are two of them."""
    server = Server(model, tmp_path, ranks)
    try:
        assert len(server.ranks()) == ranks - 1
        assert server.answers() == one_rank["greedy"]
        assert server.answers(temperature=0.8) == one_rank["drawn"]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0
    finally:
        server.kill()


@pytest.mark.extended
def test_a_rank_that_ends_ends_the_engine_which_names_it(model, tmp_path):
    run_dir = RunDir(tmp_path)
    server = Server(model, tmp_path, 2, run_dir=tmp_path)
    try:
        # In a pod it is open to a worker, rank by rank.
        assert run_dir.of_rank(1).arena_socket().exists()
        assert json.loads(run_dir.of_rank(1).weights_manifest().read_text())["ranks"] == 2
        (other,) = server.ranks()
        other.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as asking:
            answer = asking.submit(server.http.post, "/v1/completions", json={"prompt": "x"})
            other.send_signal(signal.SIGKILL)
            assert server.process.wait(END_S) == 1
            assert not answer.exception() or isinstance(answer.exception(), httpx.TransportError)
        assert "rank 1 was ended by SIGKILL" in server.output.read_text()
        assert not other.is_running()
    finally:
        server.kill()


@pytest.mark.extended
def test_a_stopped_rank_ends_the_engine_after_the_watchdogs_time(model, tmp_path):
    server = Server(model, tmp_path, 2, "--watchdog-timeout", "1")
    try:
        (other,) = server.ranks()
        other.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as asking:
            answer = asking.submit(server.http.post, "/v1/completions", json={"prompt": "x"})
            assert server.process.wait(END_S) == 1
            assert not answer.exception() or isinstance(answer.exception(), httpx.TransportError)
        assert "rank 1 is stopped by a signal" in server.output.read_text()
        assert not other.is_running()
    finally:
        server.kill()


@pytest.mark.extended
def test_when_rank_0_is_killed_the_others_end_with_it(model, tmp_path):
    server = Server(model, tmp_path, 2)
    try:
        (other,) = server.ranks()
        server.process.kill()
        wait_until(lambda: not other.is_running(), "the other rank has ended", seconds=END_S)
    finally:
        server.kill()


def test_weights_that_are_cut_short_are_refused_before_there_are_ranks(tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, tmp_path)
    os.truncate(tmp_path / "model.safetensors", 100_000)
    settings = EngineSettings.from_command_line(["--model-path", str(tmp_path), "--tp", "2"], {})
    monkeypatch.setattr(serving, "fork_ranks", lambda *_, **__: pytest.fail("ranks were forked"))
    with pytest.raises(UserError, match="cut short") as refused:
        serving.start_ranks(settings, read_config(tmp_path))
    assert refused.value.field == "--model-path"
