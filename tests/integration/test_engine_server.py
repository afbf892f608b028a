"""The built-in engine as its users meet it: two processes, a port, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from torch.utils.dlpack import from_dlpack
from waiting import wait_until

from windrow.crd import LatencyProfileSpec
from windrow.eventlog import RequestEvent, StepEvent, read_events
from windrow.proto import agent_pb2
from windrow.rundir import ENV_LOG_DIR, ENV_RUN_DIR, RunDir
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.fingerprint import model_fingerprint
from windrow_sidecar.engines.harvest.link import EngineAgentLink
from windrow_sidecar.testing.models import save_random_llama

START_S, END_S = 90.0, 5.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A running engine and its front."""

    def __init__(self, model_dir: Path, log_dir: Path, *flags: str, run_dir: Path | None = None):
        self.port = free_port()
        self.log_dir = log_dir
        self.output = log_dir / f"{self.port}.txt"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WINDROW_")}
        environment[ENV_LOG_DIR] = str(log_dir)
        if run_dir is not None:
            environment[ENV_RUN_DIR] = str(run_dir)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command(model_dir, self.port, *flags),
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    def wait(self) -> Server:
        wait_until(self.is_ready, "engine is ready", seconds=START_S)
        (self.front,) = psutil.Process(self.process.pid).children()
        return self

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.output.read_text()
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def complete(self, **body) -> dict:
        answer = self.http.post("/v1/completions", json={"temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, kind: type) -> list:
        return [event for _, event in read_events(self.log_dir) if isinstance(event, kind)]

    def ended(self, request_id: str) -> RequestEvent:
        """Return what the log says of a request, as soon as it says it."""

        def found() -> list[RequestEvent]:
            return [event for event in self.events(RequestEvent) if event.id == request_id]

        return wait_until(found, f"{request_id} is in the log", seconds=15)[0]

    def kill(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def command(model_dir: Path, port: int, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "windrow_sidecar.engines.builtin", "--model-path", str(model_dir)),
        *("--host", "127.0.0.1", "--port", str(port), "--disaggregation-mode", "decode"),
        *("--disaggregation-transfer-backend", "fake", "--block-bytes", "16KiB"),
        *flags,
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_random_llama(folder)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[Server]:
    """Start a server with an arena of 512 tokens: a few requests at once do not fit."""
    running = Server(
        model[0],
        tmp_path_factory.mktemp("log"),
        "--arena-bytes",
        "768KiB",
        "--stream-interval",
        "2",
    )
    try:
        yield running.wait()
    finally:
        running.kill()


@pytest.fixture
def fresh(model, tmp_path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*flags: str, **options) -> Server:
        started.append(Server(model[0], tmp_path, *flags, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


PROMPT = "The quick brown fox"


def greedy_text(model, n: int) -> str:
    """Return what transformers answers: the tokenizer has one token per byte."""
    alphabet = json.loads((model[0] / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(alphabet) == 256
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model[0] / "tokenizer.json"))
    tokens = tokenizer.encode(PROMPT).ids
    with torch.inference_mode():
        for _ in range(n):
            tokens.append(int(model[1](torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokenizer.decode(tokens[len(PROMPT) :])


def test_a_greedy_answer_is_what_transformers_says(model, server):
    answer = server.complete(prompt=PROMPT, max_tokens=12, ignore_eos=True)
    assert answer["choices"][0]["text"] == greedy_text(model, 12)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 19, "completion_tokens": 12, "total_tokens": 31}
    assert 0 < answer["windrow"]["ttft_ms"] < answer["windrow"]["latency_ms"]


def test_a_stream_says_the_same_as_the_whole_answer(server):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = server.complete(**body)["choices"][0]["text"]
    lines = []
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={**body, "stream": True, "stream_options": {"include_usage": True}},
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks.pop()["usage"]["completion_tokens"] == 12
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    assert len(chunks) < 12  # two tokens a chunk


def test_a_prompt_whose_kv_arrives_is_not_computed(server):
    prompt = [7] * 200
    answer = server.complete(
        prompt=prompt, max_tokens=5, ignore_eos=True, bootstrap_host="2.2.2.2", bootstrap_room=1
    )
    assert answer["usage"]["completion_tokens"] == 5
    told = server.ended(answer["id"])
    steps = [
        step
        for step in server.events(StepEvent)
        if told.first_token_ns <= step.end_ns <= told.end_ns
    ]
    assert [step.prefill_tokens for step in steps] == [0] * 5
    assert [step.context_tokens for step in steps] == [199, 200, 201, 202, 203]


def test_a_stop_string_ends_the_answer_before_it(server):
    whole = server.complete(prompt=PROMPT, max_tokens=20, ignore_eos=True)["choices"][0]["text"]
    stop = whole[4:6]
    answer = server.complete(prompt=PROMPT, max_tokens=20, ignore_eos=True, stop=stop)
    assert answer["choices"][0]["text"] == whole[: whole.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"{", None),
        (b'{"max_tokens": 3}', "prompt"),
        (b'{"prompt": "x", "temperature": "hot"}', "temperature"),
        (b'{"prompt": "x", "max_tokens": 100000}', "max_tokens"),
        (b'{"prompt": [5000]}', "prompt"),
        (b'{"prompt": "x", "frequency_penalty": 1}', "frequency_penalty"),
    ],
)
def test_a_bad_request_gets_an_openai_error_that_names_the_field(server, content, field):
    answer = server.http.post("/v1/completions", content=content)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"]


def test_the_model_is_listed_and_unknown_paths_are_errors_too(server):
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["max_model_len"] == 512
    assert server.http.get("/health_generate").status_code == 200
    assert server.http.get("/nothing").json()["error"]["message"]


async def test_more_requests_than_fit_are_all_answered_in_full(server):
    async with httpx.AsyncClient(base_url=server.http.base_url, timeout=60) as http:
        answers = await asyncio.gather(
            *(
                http.post(
                    "/v1/completions",
                    json={
                        "prompt": [i] * 60,
                        "max_tokens": 100,
                        "ignore_eos": True,
                        "bootstrap_room": i,
                    },
                )
                for i in range(12)
            )
        )
    assert [a.json()["usage"]["completion_tokens"] for a in answers] == [100] * 12


async def test_a_client_that_hangs_up_frees_its_place(server):
    async with (
        httpx.AsyncClient(base_url=server.http.base_url, timeout=30) as http,
        http.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "x", "max_tokens": 510, "ignore_eos": True, "stream": True},
        ) as response,
    ):
        first = await anext(response.aiter_lines())
    ended = server.ended(json.loads(first.removeprefix("data: "))["id"])
    assert ended.error == "cancelled"
    assert ended.completion_tokens < 510


def test_sigterm_ends_both_processes_and_removes_the_socket(fresh):
    # Unix sockets have short names: the test's own folder may be too deep.
    with tempfile.TemporaryDirectory(prefix="wdr") as root:
        run_dir = RunDir(Path(root))
        server = fresh("--arena-bytes", "6MiB", "--profile", "quick", run_dir=run_dir.root).wait()
        assert run_dir.arena_socket().is_socket()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(END_S) == 0, server.output.read_text()
        assert not run_dir.arena_socket().exists()
    assert not server.front.is_running()
    assert "Traceback" not in server.output.read_text()


def test_a_decode_pod_shows_profile_weights_and_arena_to_its_sidecar(fresh, model):
    with tempfile.TemporaryDirectory(prefix="wdr") as root:
        run_dir = RunDir(Path(root))
        fresh("--arena-bytes", "6MiB", run_dir=run_dir.root).wait()
        profile = json.loads((run_dir.root / "profile-0.json").read_text())
        spec = LatencyProfileSpec.model_validate(profile)
        assert [level.units for level in spec.solo] == list(range(1, len(spec.solo) + 1))
        manifest = json.loads(run_dir.weights_manifest().read_text())
        assert manifest["fingerprint"] == spec.model_fingerprint == model_fingerprint(model[0])
        arena = Arena.attach(str(run_dir.arena_socket()))
        try:
            check_weights(arena, manifest, model[1])
            assert arena.geometry.chunks == 64
        finally:
            arena.close()


def check_weights(arena: Arena, manifest: dict, model) -> None:
    raw = from_dlpack(arena.imported("weights"))
    parameters = dict(model.named_parameters())
    assert set(manifest["tensors"]) == set(parameters)
    for name, place in manifest["tensors"].items():
        shared = raw[place["offset"] :][: parameters[name].nbytes].view(torch.float32)
        assert torch.equal(shared.view(place["shape"]), parameters[name]), name


def test_the_front_ends_when_the_engine_is_killed(fresh):
    server = fresh().wait()
    server.process.kill()
    server.process.wait()
    server.front.wait(END_S)
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", server.port)) != 0


def test_the_engine_ends_with_an_error_when_the_front_is_killed(fresh):
    server = fresh().wait()
    server.front.kill()
    assert server.process.wait(END_S) == 1
    assert "front has ended" in server.output.read_text()


def test_a_port_in_use_is_refused_before_anything_is_loaded(model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused = run_to_its_end(command(model[0], taken.getsockname()[1]))
    assert refused.returncode == 2
    assert "--port" in refused.stderr
    assert "Choose another port" in refused.stderr


def test_an_unsupported_architecture_is_refused_with_what_is_supported(model, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    refused = run_to_its_end(command(tmp_path, free_port()))
    assert refused.returncode == 2
    assert "GPT2LMHeadModel" in refused.stderr
    assert "LlamaForCausalLM" in refused.stderr


def run_to_its_end(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False)


@pytest.mark.parametrize("lacks", ["cores", "run directory"])
def test_a_server_that_cannot_be_harvested_serves_as_if_windrow_were_not_there(fresh, lacks):
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="wdr") as root:
        run_dir = Path(root) if lacks == "cores" else Path(root) / "none"
        if lacks == "cores":
            os.sched_setaffinity(0, {min(allowed)})
        try:
            server = fresh(run_dir=run_dir)
        finally:
            os.sched_setaffinity(0, allowed)
        server.wait()
        answer = server.complete(prompt=PROMPT, max_tokens=4, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 4
        assert list(Path(root).iterdir()) == []
        (line,) = [x for x in server.output.read_text().splitlines() if "harvesting is off" in x]
        wanted = {"cores": "1 core(s) cannot be shared", "run directory": "cannot write"}
        assert wanted[lacks] in line


def test_an_engine_that_no_agent_comes_to_says_so_once(tmp_path, caplog):
    caplog.set_level("INFO", logger="windrow_sidecar.engines.harvest.link")
    dialled = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "a.sock"))
        listening.listen()
        listening.settimeout(30)
        link = EngineAgentLink(tmp_path / "a.sock", agent_pb2.EngineHello(), hook=None)
        link.start()
        while len(dialled) < 3:
            caller, _ = listening.accept()
            caller.close()  # not an agent
            dialled.append(caller)
        link.close()
    assert len(caplog.records) == 1
