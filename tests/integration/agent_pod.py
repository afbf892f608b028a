"""The agent as a process, between a stepping engine, workers that only talk, and an operator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import threading
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from windrow.proto import agent_pb2
from windrow.rundir import RunDir
from windrow_sidecar.engines.harvest import EngineAgentLink
from windrow_sidecar.engines.harvest.link import Profile
from windrow_sidecar.testing.attached_operator import AttachedOperator as Operator
from windrow_sidecar.testing.attached_operator import until
from windrow_sidecar.testing.stepping_engine import SteppingEngine


class Engine:
    """A stepping engine with its link to the agent; steps 200 times a second on a thread."""

    def __init__(self, folder: Path, slot: int = 0) -> None:
        self.engine = SteppingEngine(folder, slot=slot)
        hello = agent_pb2.EngineHello(
            protocol_version=1,
            slot=slot,
            pid=os.getpid(),
            engine="stepping",
            device="host:2-cores",
            driver="host",
            model="tiny",
            model_fingerprint="f" * 64,
            compute_units=2,
            finetune_levels=[1, 2],
            chunk_bytes=1 << 20,
            chunks=32,
            tensor_parallel=1,
            arena_socket=self.engine.socket,
        )
        self.link = EngineAgentLink(
            RunDir(folder).agent_socket,
            hello,
            self.engine.hook,
            Profile("key-1", '{"key": "key-1"}'),
            interval_s=0.05,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._decode)

    def start(self) -> None:
        self.link.start()
        self._thread.start()

    def _decode(self) -> None:
        while not self._stop.wait(0.005):
            self.engine.step()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.link.close()
        self.engine.close()


class Agent:
    """The program, with the worker that only talks."""

    def __init__(self, folder: Path, operator: Operator, *flags: str) -> None:
        self.folder = folder
        (folder / "token").write_text("secret-1\n")
        self._arguments = [
            f"--run-dir={folder}",
            f"--operator-address=127.0.0.1:{operator.port}",
            f"--operator-ca={operator.cert.decode()}",
            f"--token-file={folder / 'token'}",
            "--pod-namespace=serving",
            "--pod-name=decode-0",
            "--pod-uid=pod-uid-1",
            "--grace-seconds=3",
            "--worker-module=support.job_worker",
            "--no-standby",
            *flags,
        ]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.folder / "agent.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "windrow_sidecar.agent",
                *self._arguments,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    async def end(self, number: int = signal.SIGTERM) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        async with asyncio.timeout(15):
            return await self.process.wait()

    def worker_pids(self) -> list[int]:
        """Children of the agent, or of nobody any more, that run the worker in this directory."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if {b"support.job_worker", str(self.folder).encode()} <= set(words):
                    found.append(int(path.parent.name))
        return found

    @staticmethod
    def is_gone(pid: int) -> bool:
        try:
            return ") Z " in Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True

    @staticmethod
    def oom_score_adj(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    def metrics(self) -> str:
        port = int((self.folder / "metrics.port").read_text())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()

    def sample(self, name: str, **labels: str) -> float | None:
        """Return the slot's series of that name and further labels."""
        wanted = {"namespace": "serving", "slot": "decode-0"} | labels
        for family in text_string_to_metric_families(self.metrics()):
            for sample in family.samples:
                if sample.name == name and sample.labels == wanted:
                    return sample.value
        return None


@contextlib.asynccontextmanager
async def attached_pod(
    *flags: str, engine_calls: bool = True
) -> AsyncIterator[tuple[Operator, Agent, Engine]]:
    """Operator, engine and agent, attached to each other; `flags` are the agent's.

    `engine_calls`: whether the engine is started before the rest is handed out.
    """
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        operator = Operator()
        await operator.start()
        agent = Agent(folder, operator, *flags)
        engine = Engine(folder)
        await agent.start()
        if engine_calls:
            engine.start()
        try:
            await until(
                lambda: (
                    operator.has_engine if engine_calls else any(h.slots for h in operator.hellos)
                )
            )
            yield operator, agent, engine
            print((folder / "agent.log").read_text())
        finally:
            await agent.end()
            engine.close()
            await operator.stop()
        assert agent.worker_pids() == []
