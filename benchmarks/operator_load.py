"""Load on the operator in `benchmarks.scale`: many pods, their sidecars and their objects.

Pods are objects that no kubelet runs. A sidecar here is a gRPC stream with a token that is
reviewed; it takes jobs and reports them by the rule of a real one, and trains nothing. All sidecars
live in a process of their own (`Sidecars`), for thousands of them stop it for tens of milliseconds
now and then, and a timed answer should not stop with them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import multiprocessing
import random
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import psutil
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families

from windrow.crd import FINETUNE_JOB, LABEL_DECODE
from windrow.proto import attach_pb2 as pb
from windrow.proto import attach_pb2_grpc as pb_grpc
from windrow.rundir import TOKEN_AUDIENCE
from windrow_operator.decode_pods import RUN_VOLUME
from windrow_operator.kube import ApiError, Kube, kind_path
from windrow_sidecar.agent.operator_link import is_at_rest

NAMESPACE = "default"
OWN_NAMESPACE = "windrow-system"
MODELS = ("/models/a", "/models/b", "/models/c")
WITHIN_S = 600.0  # of whatever is awaited; how long it took is a figure of its own
_LOOK_EVERY_S = 0.002
AT_ONCE = 50  # requests of ours at a time


class Operator:
    """`python -m windrow_operator` as users run it, with what can be read of it from outside."""

    def __init__(self, kubeconfig: Path, folder: Path, profile: Path | None = None) -> None:
        self._folder, self.state_file = folder, folder / "state.json"
        python = [sys.executable, *(["-m", "cProfile", "-o", str(profile)] if profile else [])]
        ports = [f"--{name}-port=0" for name in ("attach", "webhook", "metrics")]
        self._command = [
            *(*python, "-m", "windrow_operator", f"--kubeconfig={kubeconfig}"),
            *("--attach-host=127.0.0.1", "--advertise-address=127.0.0.1", "--identity=scale"),
            *(*ports, f"--namespace={OWN_NAMESPACE}", f"--state-file={self.state_file}"),
        ]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> float:
        """Start it; return the seconds until it leads."""
        began = time.monotonic()
        with (self._folder / "operator.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log
            )
        pid = self.process.pid
        await until("it leads", lambda: self.state.get("leads") and self.state["pid"] == pid)
        return time.monotonic() - began

    async def end(self, *, kill: bool) -> None:
        """End it, by force or not."""
        assert self.process is not None
        self.process.kill() if kill else self.process.terminate()
        await self.process.wait()

    @property
    def state(self) -> dict[str, Any]:
        """State that it writes of itself."""
        return _state_in(self.state_file)

    def ps(self) -> psutil.Process:
        """The process."""
        assert self.process is not None
        return psutil.Process(self.process.pid)

    async def metrics(self, http: aiohttp.ClientSession) -> dict[str, float]:
        """Sums of its series by name; of calls to the API server, of those that write."""
        async with http.get(f"http://127.0.0.1:{self.state['metricsPort']}/metrics") as answer:
            text = await answer.text()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                reads = sample.labels.get("method") == "GET"
                name = f"{sample.name}:reads" if reads else sample.name
                sums[name] = sums.get(name, 0.0) + sample.value
        return sums


class Sidecars:
    """A process in which each pod has a light sidecar; it ends with the process that made it."""

    def __init__(
        self, pods: list[dict[str, Any]], tokens: list[str], authority: bytes, state_file: Path
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._here, there = spawn.Pipe()
        self._attached, self._pods = spawn.Value("i", 0), len(pods)
        of = [
            _Sidecar(pod["metadata"]["uid"], token, MODELS[i % len(MODELS)])
            for i, (pod, token) in enumerate(zip(pods, tokens, strict=True))
        ]
        self._process = spawn.Process(
            target=_live, args=(of, authority, state_file, self._attached, there), daemon=True
        )
        self._process.start()

    def all_attached(self) -> bool:
        """Return whether all are, as of a tenth of a second ago at most. Raises if they ended."""
        if not self._process.is_alive():
            raise RuntimeError(f"the sidecars' process ended with {self._process.exitcode}")
        return bool(self._attached.value == self._pods)

    def count_anew(self) -> None:
        """Take none for attached, until it attaches again: their operator is gone."""
        self._here.send("count again")
        self._here.recv()

    def end(self) -> None:
        """End all streams at once, and the process."""
        self._process.terminate()
        self._process.join()


def _live(*of: Any) -> None:
    asyncio.run(_run_all(*of))


async def _run_all(
    sidecars: list[_Sidecar], authority: bytes, state_file: Path, attached: Any, asked: Connection
) -> None:
    gc.disable()  # full collections stop it for a second, and it ends with the benchmark
    async with asyncio.TaskGroup() as group:
        for sidecar in sidecars:
            group.create_task(sidecar.run(state_file, authority))
        while True:
            if asked.poll():
                asked.recv()
                for sidecar in sidecars:
                    sidecar.attached = False
                asked.send("done")
            attached.value = sum(sidecar.attached for sidecar in sidecars)
            await asyncio.sleep(0.1)


class _Sidecar:
    """One stream: attaches, takes what it is given, reports it at the agreed interval."""

    def __init__(self, pod_uid: str, token: str, model: str) -> None:
        self._pod_uid, self._token, self._model = pod_uid, token, model
        self._jobs: dict[str, pb.RunningJob] = {}
        self._term = 0
        self.attached = False

    async def run(self, state_file: Path, authority: bytes) -> None:
        """Attach, again and again."""
        pause_s = 0.5
        while True:
            with contextlib.suppress(
                grpc.RpcError, asyncio.InvalidStateError, KeyError, ValueError
            ):
                await self._attach(_state_in(state_file)["attachPort"], authority)
            pause_s = 0.5 if self.attached else min(2 * pause_s, 10.0)
            self.attached = False
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _attach(self, port: int, authority: bytes) -> None:
        credentials = grpc.ssl_channel_credentials(authority)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            stub = pb_grpc.AttachStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Attach(metadata=(("authorization", f"Bearer {self._token}"),))
            await call.write(pb.SidecarMessage(hello=self._hello()))
            first = await call.read()
            if first is grpc.aio.EOF:
                return
            self._term, self.attached = first.hello.leader_term, True
            beats = asyncio.create_task(self._beat(call, first.hello))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    await self._obey(call, message)
            finally:
                beats.cancel()

    def _hello(self) -> pb.SidecarHello:
        facts = pb.SlotFacts(
            index=0, model=self._model, compute_units=2, tensor_parallel=1, output_trees=["/out"]
        )
        return pb.SidecarHello(
            protocol_version=1,
            pod_uid=self._pod_uid,
            slots=[facts],
            running=self._jobs.values(),
            leader_term=self._term,
            rests=True,
        )

    async def _beat(self, call: Any, agreed: pb.OperatorHello) -> None:
        """Report by the rule of a real sidecar, which looks at each interval what has changed."""
        told, before = 0.0, pb.SlotHeartbeat()
        while True:
            for job in self._jobs.values():
                job.progress.step += 1
            beat = pb.SlotHeartbeat(
                engine_state="serving",
                predicted_tokens_per_second=random.randint(8000, 10000),
                tpot_p99_seconds=random.uniform(0.01, 0.03),
                chunks_free=100,
                jobs=self._jobs.values(),
            )
            due = time.monotonic() - told >= agreed.rest_heartbeat_seconds
            if due or not is_at_rest(before, beat):
                told, before = time.monotonic(), beat
                await call.write(pb.SidecarMessage(heartbeat=beat))
            await asyncio.sleep(agreed.heartbeat_seconds)

    async def _obey(self, call: Any, message: pb.OperatorMessage) -> None:
        kind = pb.JobEvent.STARTED
        match message.WhichOneof("message"):
            case "assign":
                order: Message = message.assign
                uid, epoch = message.assign.job_uid, message.assign.epoch
                progress = pb.Progress(step=1, total_steps=100_000, loss=2.0)
                self._jobs[uid] = pb.RunningJob(job_uid=uid, epoch=epoch, progress=progress)
            case "command":
                order, uid, epoch = message.command, message.command.job_uid, message.command.epoch
                kind = pb.JobEvent.STOPPED
                self._jobs.pop(uid, None)
            case _:
                return
        assert order is not None
        event = pb.JobEvent(kind=kind, job_uid=uid, epoch=epoch)
        await call.write(pb.SidecarMessage(job_event=event))


class OwnPauses:
    """Pauses of this process's own loop: what is timed in it includes them.

    Python's collector is switched off here (`settle`), and what is left is a figure beside those
    that it is part of.
    """

    def __init__(self) -> None:
        self._longest_s = 0.0

    def settle(self) -> None:
        """Collect nothing any more: this process ends with the benchmark."""
        gc.collect()
        gc.disable()

    async def run(self) -> None:
        """Look every few milliseconds whether it was late, until cancelled."""
        while True:
            asleep_at = time.monotonic()
            await asyncio.sleep(_LOOK_EVERY_S)
            late_s = time.monotonic() - asleep_at - _LOOK_EVERY_S
            self._longest_s = max(self._longest_s, late_s)

    def take_longest(self) -> float:
        """Return the longest pause in seconds since the last call."""
        longest, self._longest_s = self._longest_s, 0.0
        return longest


class Watch:
    """Moments when each job was first seen with a slot, by a client of the API server."""

    def __init__(self, kube: Kube, http: aiohttp.ClientSession) -> None:
        self._kube, self._http = kube, http
        self.placed: dict[str, float] = {}
        self.ready = False

    async def run(self) -> None:
        """Watch until cancelled."""
        access = await self._kube.credentials()
        context = ssl.create_default_context(cafile=access.ca_path)
        headers = {"Authorization": f"{access.scheme or 'Bearer'} {access.token}"}
        url = f"{access.server}{kind_path(FINETUNE_JOB)}?watch=true"
        async with self._http.get(
            url, headers=headers, ssl=context, timeout=aiohttp.ClientTimeout(total=None)
        ) as stream:
            self.ready = True
            async for line in stream.content:
                body = json.loads(line)["object"]
                if (body.get("status") or {}).get("slot"):
                    self.placed.setdefault(body["metadata"]["name"], time.monotonic())


def _state_in(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


async def until(what: str, holds: Callable[[], object]) -> None:
    """Return once something holds."""
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
        await asyncio.sleep(0.02)


async def in_parallel(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Do all of them, some at a time; return what they return."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[Any]) -> Any:
        async with places:
            return await call

    return list(await asyncio.gather(*map(one, calls)))


async def create_pod(kube: Kube, number: int) -> dict[str, Any]:
    """Create a decode pod; return it."""
    return await kube.create(f"/api/v1/namespaces/{NAMESPACE}/pods", pod_of(number))


def pod_of(number: int) -> dict[str, Any]:
    """Return a decode pod as the webhook leaves it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"decode-{number}",
            "labels": {"app": "chat", LABEL_DECODE: "true"},
        },
        "spec": {
            "containers": [
                {
                    "name": "decode",
                    "image": "none",
                    "args": ["--disaggregation-mode", "decode"],
                }
            ],
            "volumes": [{"name": RUN_VOLUME, "emptyDir": {"medium": "Memory"}}],
        },
    }


async def token_of(kube: Kube, pod: dict[str, Any]) -> str:
    """Return a token that is bound to `pod`, as the kubelet projects one."""
    bound = {"apiVersion": "v1", "kind": "Pod"}
    bound |= {name: pod["metadata"][name] for name in ("name", "uid")}
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [TOKEN_AUDIENCE], "expirationSeconds": 7200, "boundObjectRef": bound},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default/token"
    return str((await kube.create(path, body))["status"]["token"])


async def authority_of(kube: Kube) -> bytes:
    """Return the certificate that the operator's is signed by."""
    path = f"/api/v1/namespaces/{OWN_NAMESPACE}/secrets/windrow-operator-ca"
    for _ in range(100):
        try:
            return base64.b64decode((await kube.get(path))["data"]["tls.crt"])
        except ApiError:
            await asyncio.sleep(0.1)
    raise TimeoutError("the operator has made no authority")


def policy() -> dict[str, Any]:
    """Return the HarvestPolicy of all pods."""
    return {
        "apiVersion": "windrow.dev/v1alpha1",
        "kind": "HarvestPolicy",
        "metadata": {"name": "chat"},
        "spec": {
            "selector": {"matchLabels": {"app": "chat"}},
            "objective": {"tpot": "40ms"},
            "mode": "harvest",
        },
    }


def job_of(name: str, number: int) -> dict[str, Any]:
    """Return a FinetuneJob of one of the models."""
    return {
        "apiVersion": "windrow.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": {"name": name, "labels": {"at": datetime.now(UTC).strftime("%H%M%S")}},
        "spec": {
            "model": {"name": MODELS[number % len(MODELS)]},
            "dataset": {"source": "/d/rows.jsonl"},
            "training": {"maxSteps": 100_000, "learningRate": "2e-4"},
            "output": {"destination": f"/out/{name}"},
        },
    }
