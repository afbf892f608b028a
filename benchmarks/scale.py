"""The operator as a process with many slots, on a real API server.

Pods are objects that no kubelet runs; each has a sidecar of its own: a gRPC stream with a token
that is reviewed, which takes jobs and reports them as a real one does and trains nothing. All of
them run beside the operator on this machine, so figures include the load that they make.

Example: python -m benchmarks.scale --slots 200 --jobs 40 --json /tmp/scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import random
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import psutil
from google.protobuf.message import Message
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness import Result, arguments, environment, write
from windrow.crd import FINETUNE_JOB, HARVEST_POLICY, LABEL_DECODE
from windrow.local.build import ensure_tools
from windrow.local.controlplane import ControlPlane, ControlPlaneSettings
from windrow.local.crds import apply_crds
from windrow.local.progress import LineProgress
from windrow.proto import attach_pb2 as pb
from windrow.proto import attach_pb2_grpc as pb_grpc
from windrow.rundir import TOKEN_AUDIENCE
from windrow_operator.injection import RUN_VOLUME
from windrow_operator.kube import ApiError, Kube, kind_path
from windrow_sidecar.agent.operator_link import is_at_rest

NAMESPACE = "default"
OWN_NAMESPACE = "windrow-system"
MODELS = ("/models/a", "/models/b", "/models/c")
WITHIN_S = 300.0
AT_ONCE = 50  # requests of ours at a time


def main() -> None:
    """Measure one number of slots; print and write the figures."""
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--slots", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=0, help="default: a fifth of the slots")
    parser.add_argument("--rate", type=float, default=20.0, help="jobs a second")
    parser.add_argument("--rest", type=float, default=20.0, help="seconds at rest")
    options = parser.parse_args()
    if options.quick:
        options.slots, options.rest = min(options.slots, 50), 5.0
    options.jobs = options.jobs or max(10, options.slots // 5)
    env = environment()
    tools = ensure_tools(LineProgress(print))
    with ControlPlane(ControlPlaneSettings(tools)) as plane:
        with plane.client() as client:
            apply_crds(client)
        results = asyncio.run(measure(plane, options))
    write("scale", results, env, options.json)


class Operator:
    """`python -m windrow_operator` as users run it, with what can be read of it from outside."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._folder, self.state_file = folder, folder / "state.json"
        ports = [f"--{name}-port=0" for name in ("attach", "webhook", "metrics")]
        self._command = [
            *(sys.executable, "-m", "windrow_operator", f"--kubeconfig={kubeconfig}"),
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
        """What it writes of itself."""
        return dict(json.loads(self.state_file.read_text())) if self.state_file.exists() else {}

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


class Sidecar:
    """One stream: attaches, takes what it is given, reports it at the agreed interval."""

    def __init__(self, pod: dict[str, Any], token: str, model: str) -> None:
        self._pod, self._token, self._model = pod, token, model
        self._jobs: dict[str, pb.RunningJob] = {}
        self._term = 0
        self.attached = False

    async def run(self, operator: Operator, authority: bytes) -> None:
        """Attach, again and again."""
        pause_s = 0.5
        while True:
            with contextlib.suppress(
                grpc.RpcError, asyncio.InvalidStateError, KeyError, ValueError
            ):
                await self._attach(operator, authority)
            pause_s = 0.5 if self.attached else min(2 * pause_s, 10.0)
            self.attached = False
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _attach(self, operator: Operator, authority: bytes) -> None:
        credentials = grpc.ssl_channel_credentials(authority)
        address = f"127.0.0.1:{operator.state['attachPort']}"
        async with grpc.aio.secure_channel(address, credentials) as channel:
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
            pod_uid=self._pod["metadata"]["uid"],
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


async def measure(plane: ControlPlane, options: argparse.Namespace) -> list[Result]:
    """Return the figures of one number of slots."""
    kube = await Kube.connect(plane.kubeconfig)
    with tempfile.TemporaryDirectory() as folder:
        operator = Operator(plane.kubeconfig, Path(folder))
        async with aiohttp.ClientSession() as http:
            try:
                return [r async for r in _phases(kube, operator, http, options)]
            except BaseException:
                print((Path(folder) / "operator.log").read_text()[-6000:])
                raise
            finally:
                if operator.process is not None and operator.process.returncode is None:
                    await operator.end(kill=True)
                await kube.close()


async def _phases(
    kube: Kube, operator: Operator, http: aiohttp.ClientSession, options: argparse.Namespace
) -> Any:
    slots, jobs = options.slots, options.jobs

    def result(name: str, value: float, unit: str, goal: float | None = None) -> Result:
        return Result(f"{slots} slots: {name}", round(value, 4), unit, "lower", goal)

    pods = await in_parallel([_create_pod(kube, i) for i in range(slots)])
    await kube.create(kind_path(HARVEST_POLICY, NAMESPACE), _policy())
    yield result("ready after a cold start with their pods", await operator.start(), "s", 10)
    authority = await _authority(kube)
    tokens = await in_parallel([_token(kube, pod) for pod in pods])
    sidecars = [
        Sidecar(pod, token, MODELS[i % len(MODELS)])
        for i, (pod, token) in enumerate(zip(pods, tokens, strict=True))
    ]
    began = time.monotonic()
    tasks = [asyncio.create_task(sidecar.run(operator, authority)) for sidecar in sidecars]
    try:
        await until("all are attached", lambda: all(one.attached for one in sidecars))
        yield result("all sidecars attached for the first time", time.monotonic() - began, "s")
        watch = Watch(kube, http)
        watching = asyncio.create_task(watch.run())
        await until("it watches", lambda: watch.ready)
        waits = await _arrivals(kube, watch, jobs, options.rate)
        yield result(f"{jobs} jobs at {options.rate:g}/s: created to Placed, p50", waits[0], "s")
        yield result(f"{jobs} jobs at {options.rate:g}/s: created to Placed, p99", waits[1], "s", 1)
        waits = await _arrivals(kube, watch, 20, 1.0, prefix="single")
        yield result("one job a second: created to Placed, p99", waits[1], "s", 0.15)
        async for figure in _at_rest(operator, http, options.rest, result):
            yield figure
        yield result("memory with all streams", operator.ps().memory_info().rss / 2**20, "MiB", 700)
        before = await _epochs(kube)
        await operator.end(kill=True)
        began = time.monotonic()
        for sidecar in sidecars:
            sidecar.attached = False
        await operator.start()
        await until("all are attached again", lambda: all(one.attached for one in sidecars))
        yield result("killed: all attached again", time.monotonic() - began, "s", 60)
        await asyncio.sleep(5)
        after = await _epochs(kube)
        moved = sum(after[name] != epoch for name, epoch in before.items())
        yield result("killed: jobs that moved", moved, "jobs", 0)
        watching.cancel()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Watch:
    """When each job was first seen with a slot, as a client of the API server sees it."""

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


async def _arrivals(
    kube: Kube, watch: Watch, count: int, rate: float, prefix: str = "job"
) -> tuple[float, float]:
    """Create jobs at a rate; return the median and the 99th percentile of the wait for a slot."""
    created: dict[str, float] = {}

    async def create(number: int) -> None:
        await asyncio.sleep(number / rate)
        name = f"{prefix}-{number}"
        created[name] = time.monotonic()
        await kube.create(kind_path(FINETUNE_JOB, NAMESPACE), _job(name, number))

    await asyncio.gather(*(create(number) for number in range(count)))
    await until("all are placed", lambda: created.keys() <= watch.placed.keys())
    waits = sorted(watch.placed[name] - at for name, at in created.items())
    return statistics.median(waits), waits[min(len(waits) - 1, int(0.99 * len(waits)))]


async def _at_rest(
    operator: Operator,
    http: aiohttp.ClientSession,
    seconds: float,
    result: Callable[..., Result],
) -> Any:
    await asyncio.sleep(5)
    name = "windrow_operator_api_requests_total"
    process, before = operator.ps(), await operator.metrics(http)
    cpu, began = process.cpu_times(), time.monotonic()
    await asyncio.sleep(seconds)
    after, used = await operator.metrics(http), process.cpu_times()
    elapsed = time.monotonic() - began
    busy = (used.user + used.system - cpu.user - cpu.system) / elapsed
    yield result("at rest: share of one core", busy, "", 0.30)
    yield result("at rest: API writes", (after[name] - before[name]) / elapsed, "1/s", 5)
    waits = await _reviews(operator, http)
    yield result("webhook at 100 pods/s, p99", waits, "s", 0.020)


async def _reviews(operator: Operator, http: aiohttp.ClientSession) -> float:
    """Ask the webhook about pods, 100 a second for five seconds; return the 99th percentile."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{operator.state['webhookPort']}/mutate-pods"
    waits: list[float] = []

    async def ask(number: int) -> None:
        await asyncio.sleep(number / 100)
        pod = _pod(number)
        pod["metadata"]["labels"] = {"app": "chat", "windrow.dev/inject": "enabled"}
        pod["spec"].pop("volumes")
        review = {"request": {"uid": str(number), "namespace": NAMESPACE, "object": pod}}
        began = time.monotonic()
        async with http.post(url, json=review, ssl=context) as answer:
            assert (await answer.json())["response"]["allowed"]
        waits.append(time.monotonic() - began)

    await asyncio.gather(*(ask(number) for number in range(500)))
    return sorted(waits)[int(0.99 * len(waits))]


async def _epochs(kube: Kube) -> dict[str, int]:
    found = await kube.list(kind_path(FINETUNE_JOB))
    return {body["metadata"]["name"]: body["status"]["epoch"] for body in found}


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


async def _create_pod(kube: Kube, number: int) -> dict[str, Any]:
    return await kube.create(f"/api/v1/namespaces/{NAMESPACE}/pods", _pod(number))


def _pod(number: int) -> dict[str, Any]:
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


async def _token(kube: Kube, pod: dict[str, Any]) -> str:
    bound = {"apiVersion": "v1", "kind": "Pod"}
    bound |= {name: pod["metadata"][name] for name in ("name", "uid")}
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [TOKEN_AUDIENCE], "expirationSeconds": 7200, "boundObjectRef": bound},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default/token"
    return str((await kube.create(path, body))["status"]["token"])


async def _authority(kube: Kube) -> bytes:
    path = f"/api/v1/namespaces/{OWN_NAMESPACE}/secrets/windrow-operator-ca"
    for _ in range(100):
        try:
            return base64.b64decode((await kube.get(path))["data"]["tls.crt"])
        except ApiError:
            await asyncio.sleep(0.1)
    raise TimeoutError("the operator has made no authority")


def _policy() -> dict[str, Any]:
    return {
        "apiVersion": "windrow.dev/v1alpha1",
        "kind": "HarvestPolicy",
        "metadata": {"name": "chat"},
        "spec": {"selector": {"matchLabels": {"app": "chat"}}, "objective": {"tpot": "40ms"}},
    }


def _job(name: str, number: int) -> dict[str, Any]:
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


if __name__ == "__main__":
    main()
