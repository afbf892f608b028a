"""SGLang's own servers on cores, in its environment, and questions to them."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SGLANG_VENV", ROOT / ".venv-sglang")) / "bin" / "python"
MODEL = ROOT / "models" / "windrow-tiny"
OPTIONS = (
    *("--dtype=float32", "--device=cpu", "--attention-backend=torch_native", "--page-size=16"),
    *("--sampling-backend=pytorch", "--disable-cuda-graph", "--disable-radix-cache"),
    *("--max-running-requests=8", "--num-reserved-decode-tokens=64", "--sleep-on-idle"),
    "--host=127.0.0.1",
)
# Of a decode instance without a GPU: its copies of retracted requests are plain tensors.
DECODE = ("--disaggregation-mode=decode", "--disaggregation-decode-retraction-backup=cpu_tensor")
# Prefill sends KV to decode over loopback, by Mooncake's build without CUDA.
TRANSFER = "--disaggregation-transfer-backend=mooncake"
OVER_TCP = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "SGLANG_HOST_IP": "127.0.0.1"}


@dataclass(frozen=True)
class Ranks:
    """Options and environment of a server whose model is over two ranks on the same cores."""

    options: tuple[str, ...]
    environment: Mapping[str, str]


_CORES = sorted(os.sched_getaffinity(0))
OVER_RANKS = Ranks(
    ("--tp-size=2", "--max-total-tokens=16384"),
    {
        # Without it SGLang wants a NUMA node for each rank.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([",".join(map(str, _CORES))] * 2),
        # torch's build for CUDA brings NCCL, and SGLang would have it join ranks on cores.
        "SGLANG_NCCL_SO_PATH": os.devnull,
        # Threads of two ranks on the same cores wait for each other.
        "OMP_NUM_THREADS": "1",
    },
)


@cache
def require_transfer() -> None:
    """Skip a test where Mooncake's library cannot be loaded."""
    command = [PYTHON, "-c", "import mooncake.engine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no Mooncake: {done.stderr.splitlines()[-1]} (Debian: libibverbs1)")


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """One of SGLang's servers.

    Attributes:
        words: of its command line, as a container's command has them.
        bootstrap_port: where decode instances ask a prefill instance for its address.
    """

    words: list[str]
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    bootstrap_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_up(self) -> bool:
        """Return whether it answers; fails when it has ended."""
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        try:
            return httpx.get(f"{self.url}/v1/models", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def is_running(self) -> bool:
        """Return whether its first process has not ended."""
        return self.process.poll() is None

    def models(self) -> set[str]:
        """Return the names that requests may give: the base model and adapters."""
        answer = httpx.get(f"{self.url}/v1/models", timeout=30)
        return {model["id"] for model in answer.json()["data"]}

    def end(self) -> None:
        """End it, and print the last of its log."""
        self.process.terminate()
        self.process.wait(60)
        print(self.log.read_text()[-3000:])


def start_server(log: Path, *options: str, environment: Mapping[str, str] | None = None) -> Server:
    """Start `sglang.launch_server` with the test's model; it is not up yet."""
    port, bootstrap = free_port(), free_port()
    words = ["python", "-m", "sglang.launch_server", f"--model-path={MODEL}", f"--port={port}"]
    words += [*OPTIONS, *options]
    if "--disaggregation-mode=prefill" in options:
        words += [f"--disaggregation-bootstrap-port={bootstrap}"]
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "passive"}
    env.pop("WINDROW_RUN_DIR", None)
    env |= environment or {}
    with log.open("ab") as out:
        process = subprocess.Popen(
            [str(PYTHON), *words[1:]], env=env, stdout=out, stderr=out, process_group=0
        )
    return Server(words, port, process, log, bootstrap)


async def complete(
    client: httpx.AsyncClient, servers: tuple[Server, ...], model: str, prompt: str, tokens: int
) -> httpx.Response:
    """Ask for the greedy completion of a prompt; the last of the servers answers.

    Two servers are a prefill and a decode instance: both are asked, as a router does, and the
    prompt's KV goes from one to the other.
    """
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    if len(servers) == 2:
        body |= {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": servers[0].bootstrap_port,
            "bootstrap_room": random.getrandbits(62),
        }

    calls = [client.post(f"{server.url}/v1/completions", json=body) for server in servers]
    return (await asyncio.gather(*calls))[-1]


def text_of(answer: httpx.Response) -> str:
    """Return what a completion says."""
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])
