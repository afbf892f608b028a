"""Cost of hostile tenants: floods on the operator, malformed messages, rows read in confines.

`flood`: two pods whose sidecars send heartbeats, hellos, events and profiles as fast as they can,
made-up tokens and a stranger at the webhook, beside a tenant whose jobs are placed and end.
`fuzz`: malformed messages and reviews through the operator's own functions.
`rows`: a file read line by line by a path and through the descriptors of `ConfinedFiles`.

Example: python -m benchmarks.tenants --parts fuzz,rows --json /tmp/tenants.json
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import statistics
import sys
import tempfile
import threading
import time
import tracemalloc
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from kubernetes import client, config

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from windrow.proto import attach_pb2 as pb
from windrow_lab.controlplane.server import ControlPlane, ControlPlaneSettings
from windrow_lab.machine.build import ensure_tools
from windrow_lab.machine.progress import LineProgress
from windrow_operator import reports
from windrow_operator.cluster_state import ClusterState
from windrow_operator.model import Pod
from windrow_operator.webhook import Webhook
from windrow_sidecar.finetune.data.confined_files import ConfinedFiles, ConfinedFileSystem

# The chart's limit of the operator's memory.
LIMIT_MIB = 1024
NOW = datetime(2026, 1, 1, tzinfo=UTC)


# --- rows -----------------------------------------------------------------------------------------


def measure_rows(*, quick: bool) -> list[Result]:
    """Read the same files by their paths and through confined descriptors, in turns."""
    line = json.dumps({"prompt": "x" * 300, "completion": "y" * 300}) + "\n"
    n_files, n_lines = 8, 500 if quick else 5_000
    with tempfile.TemporaryDirectory(prefix="windrow-rows-") as folder:
        root = Path(folder)
        paths = [root / f"{n}.jsonl" for n in range(n_files)]
        for path in paths:
            path.write_text(line * n_lines)
        confined = ConfinedFileSystem(ConfinedFiles([root]))

        def plainly() -> int:
            n = 0
            for path in paths:
                with path.open("rb") as rows:
                    n += sum(len(json.loads(row)) for row in rows)
            return n

        def confinedly() -> int:
            n = 0
            for path in paths:
                with confined.open(str(path), "rb") as rows:
                    n += sum(len(json.loads(row)) for row in rows)
            return n

        assert plainly() == confinedly() == 2 * n_lines * n_files
        ratios, seconds = [], []
        for turn in range(5 if quick else 31):
            order = (plainly, confinedly) if turn % 2 else (confinedly, plainly)
            took = {}
            for read in order:
                began = time.perf_counter()
                read()
                took[read] = time.perf_counter() - began
            ratios.append(took[confinedly] / took[plainly])
            seconds.append(took[plainly])
    ratio, spread = middle(ratios)
    by_path = Baseline("seconds by a path", statistics.median(seconds))
    name = "rows through confined descriptors, of the time by a path"
    return [Result(name, ratio, "1", "lower", 1.02, spread, by_path)]


# --- fuzz -----------------------------------------------------------------------------------------


def _seeds() -> list[bytes]:
    running = [pb.RunningJob(job_uid="u", epoch=1, progress=pb.Progress(step=3, loss=1.5))]
    slots = [pb.SlotFacts(index=n, model="/m", finetune_levels=[1, 2]) for n in range(3)]
    beat = pb.SlotHeartbeat(
        slot=0,
        engine_state="serving",
        predicted_tokens_per_second=9.0,
        jobs=running,
        breaker="none",
    )
    event = pb.JobEvent(kind=pb.JobEvent.SUCCEEDED, job_uid="u", epoch=1, detail="done")
    event.progress.CopyFrom(running[0].progress)
    messages = (
        pb.SidecarMessage(hello=pb.SidecarHello(slots=slots, running=running)),
        pb.SidecarMessage(heartbeat=beat),
        pb.SidecarMessage(job_event=event),
        pb.SidecarMessage(profile=pb.ProfileReport(key="k", profile_json='{"a": [1]}')),
    )
    return [message.SerializeToString() for message in messages]


def _job_body() -> dict[str, Any]:
    metadata = {
        "namespace": "evil",
        "name": "own",
        "uid": "u",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    spec = {
        "model": {"name": "/m"},
        "dataset": {"source": "/rows"},
        "training": {"maxSteps": 1},
        "output": {"destination": "/out/own"},
    }
    return {"metadata": metadata, "spec": spec, "status": {"epoch": 1, "slot": "evil/decode-0"}}


def _spoilt(seed: bytes, dice: random.Random) -> bytes:
    wire = bytearray(seed)
    for _ in range(dice.randrange(1, 8)):
        match dice.randrange(3):
            case 0:
                wire[dice.randrange(len(wire))] = dice.randrange(256)
            case 1:
                wire.insert(dice.randrange(len(wire)), dice.randrange(256))
            case _ if len(wire) > 1:
                del wire[dice.randrange(len(wire))]
    return bytes(wire)


def _absurd(message: Any, dice: random.Random, depth: int = 0) -> None:
    """Give fields of a message values that no sidecar of ours sends."""
    for field in message.DESCRIPTOR.fields:
        if dice.random() < 0.6:
            continue
        if field.message_type is not None:
            inner = getattr(message, field.name)
            if depth < 4 and field.is_repeated:
                _absurd(inner.add(), dice, depth + 1)
            elif depth < 4:
                _absurd(inner, dice, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).append(_absurd_value(field, dice))
        else:
            setattr(message, field.name, _absurd_value(field, dice))


def _absurd_value(field: Any, dice: random.Random) -> Any:
    match field.cpp_type:
        case field.CPPTYPE_STRING:
            words = ("", "u", "/../..", "x" * 5000, "evil/decode-0", "\n", "{", "s3://x", "\u202e")
            return dice.choice(words)
        case field.CPPTYPE_DOUBLE:
            return dice.choice((0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf")))
        case field.CPPTYPE_BOOL:
            return True
        case field.CPPTYPE_UINT64:
            return dice.choice((0, 1, 2**53 + 1, 2**64 - 1))
        case field.CPPTYPE_UINT32:
            return dice.choice((0, 1, 63, 64, 2**32 - 1))
        case field.CPPTYPE_ENUM:
            return dice.choice(field.enum_type.values).number
        case _:
            return dice.choice((0, 1, 2**31 - 1))


def fuzz_stream(n_messages: int, dice: random.Random) -> tuple[int, int, float]:
    """Return how many messages were understood, how many broke something, and the growth in KiB.

    The growth is that of what Python holds between the first tenth and the end.
    """
    cluster = ClusterState(NOW)
    pod = cluster.pods["uid"] = Pod("evil", "decode-0", "uid")
    cluster.put_job(_job_body())
    cluster.assign("u", 1, "evil/decode-0", NOW)
    seeds, understood, broken, begun = _seeds(), 0, 0, 0
    tracemalloc.start()
    for n in range(n_messages):
        if n == n_messages // 10:
            gc.collect()
            begun = tracemalloc.get_traced_memory()[0]
        seed = dice.choice(seeds)
        try:
            message = pb.SidecarMessage.FromString(_spoilt(seed, dice) if n % 2 else seed)
        except Exception:  # noqa: BLE001 - what gRPC refuses before the operator sees it
            continue
        if n % 2 == 0:
            _absurd(getattr(message, str(message.WhichOneof("message"))), dice)
        try:
            _take(cluster, pod, message)
            understood += 1
        except Exception:
            broken += 1
            logging.getLogger(__name__).exception("a message broke something")
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - begun
    tracemalloc.stop()
    return understood, broken, grown / 1024


def _take(cluster: ClusterState, pod: Pod, message: pb.SidecarMessage) -> None:
    match message.WhichOneof("message"):
        case "hello":
            reports.take_hello(cluster, pod, message.hello, NOW, first=False)
        case "heartbeat":
            for live in cluster.slots_of(pod.uid)[:1]:
                reports.take_heartbeat(cluster, live, message.heartbeat, NOW)
        case "job_event":
            mine = [live.key for live in cluster.slots_of(pod.uid)]
            reports.take_event(cluster, mine, message.job_event, NOW)
        case _:
            pass


class _NoServer:
    """An API server that knows nothing."""

    async def get(self, path: str) -> dict[str, Any]:
        return {}

    async def try_create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return body


def _review() -> dict[str, Any]:
    decode = {
        "name": "decode",
        "image": "lmsysorg/sglang:v0.5.6",
        "command": ["python", "-m", "sglang.launch_server"],
        "args": ["--model-path", "/m", "--disaggregation-mode", "decode"],
        "env": [{"name": "HF_HOME", "value": "/cache"}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    pod = {
        "metadata": {"name": "decode-0", "labels": {"windrow.dev/inject": "enabled"}},
        "spec": {"containers": [decode], "volumes": [{"name": "cache", "emptyDir": {}}]},
    }
    return {"request": {"uid": "u", "namespace": "evil", "object": pod}}


def _spoil(body: Any, dice: random.Random, depth: int = 0) -> None:
    part = dice.choice(list(body) if isinstance(body, dict) else range(len(body)))
    if depth < 8 and isinstance(body[part], dict | list) and body[part] and dice.random() < 0.85:
        _spoil(body[part], dice, depth + 1)
    elif part != "uid":
        others: list[Any] = [None, 5, "x" * 1000, [], {}, [None], {"a": []}, True, -1.5, [[]], ""]
        body[part] = dice.choice(others)


async def fuzz_webhook(n_reviews: int, dice: random.Random) -> tuple[int, float]:
    """Return how many reviews did not admit their pod, and the growth in KiB."""
    from windrow_operator.injection import SidecarTemplate
    from windrow_operator.metrics import Metrics

    async def note(*_: Any) -> None:
        return

    template = SidecarTemplate("operator:8443", "")
    hook = Webhook(ClusterState(NOW), _NoServer(), lambda: template, Metrics(), note)  # type: ignore[arg-type]
    refused, begun = 0, 0
    logging.getLogger("windrow_operator.webhook").setLevel(logging.CRITICAL)
    tracemalloc.start()
    for n in range(n_reviews):
        if n == n_reviews // 10:
            gc.collect()
            begun = tracemalloc.get_traced_memory()[0]
        said = _review()
        for _ in range(dice.randrange(1, 4)):
            _spoil(said["request"], dice)
        answer = await hook.review(said)
        await asyncio.sleep(0)  # the loop forgets the timeouts that are over, as between calls
        refused += answer["response"]["allowed"] is not True
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - begun
    tracemalloc.stop()
    return refused, grown / 1024


def measure_fuzz(*, quick: bool) -> list[Result]:
    """Send malformed messages and reviews, each 10^5."""
    n = 2_000 if quick else 100_000
    logging.getLogger("windrow_operator").setLevel(logging.ERROR)
    understood, broken, grown = fuzz_stream(n, random.Random(1))
    refused, grown_by_reviews = asyncio.run(fuzz_webhook(n, random.Random(2)))
    return [
        Result("malformed messages of sidecars", n, "messages", "higher"),
        Result("of which were read", understood, "messages", "higher"),
        Result("of which broke something", broken, "messages", "lower", 0),
        Result("memory that they left", grown, "KiB", "lower", 512),
        Result("malformed reviews of the webhook", n, "reviews", "higher"),
        Result("of which kept a pod from its creation", refused, "reviews", "lower", 0),
        Result("memory that these left", grown_by_reviews, "KiB", "lower", 512),
    ]


# --- flood ----------------------------------------------------------------------------------------


def measure_flood(seconds: float) -> list[Result]:
    """Flood the operator, and place the jobs of another tenant meanwhile."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]
    from operator_process import HURRIED, Cluster, OperatorProcess, install_crds  # type: ignore

    tools = ensure_tools(LineProgress(print))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="windrow-flood-")))
        plane = stack.enter_context(ControlPlane(ControlPlaneSettings(tools)))
        kube = stack.enter_context(config.new_client_from_config(str(plane.kubeconfig)))
        install_crds(kube)
        operator = OperatorProcess(plane.kubeconfig, folder, *HURRIED)
        operator.start()
        stack.callback(operator.end)
        core = client.CoreV1Api(kube)
        tenants = {}
        for name in ("blue", "red"):
            core.create_namespace({"metadata": {"name": name}})
            tenants[name] = Cluster(kube, name, operator)
        return _flood(tenants["blue"], tenants["red"], operator, seconds)


def _flood(blue: Any, red: Any, operator: Any, seconds: float) -> list[Result]:
    for tenant in (blue, red):
        tenant.policy()
    sidecar = blue.attach(blue.pod())
    sidecar.beat()
    memory = psutil.Process(operator.process.pid)
    alone = [_place(blue, sidecar) for _ in range(20 if seconds > 60 else 5)]
    at_rest_mib = memory.memory_info().rss / 2**20
    stop, sent = threading.Event(), [0, 0]
    threads = [
        threading.Thread(target=_hostile_sidecar, args=(red, n, stop, sent)) for n in range(2)
    ]
    threads.append(threading.Thread(target=_stranger, args=(red, operator, stop, sent)))
    for thread in threads:
        thread.start()
    until, most_mib, beside = time.monotonic() + seconds, 0.0, []
    try:
        while time.monotonic() < until:
            beside.append(_place(blue, sidecar))
            most_mib = max(most_mib, memory.memory_info().rss / 2**20)
            stop.wait(1.0)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert operator.process.poll() is None, "the operator has ended"
    for tenant in (blue, red):
        tenant.close()
    ours, theirs = statistics.median(beside), statistics.median(alone)
    at_rest = Baseline("before the flood", at_rest_mib)
    return [
        Result("flood: its length", seconds, "s", "higher"),
        Result("flood: messages of hostile sidecars", sent[0], "messages", "higher"),
        Result("flood: calls and tokens of strangers", sent[1], "calls", "higher"),
        Result("operator's memory at most", most_mib, "MiB", "lower", LIMIT_MIB, baseline=at_rest),
        Result("jobs of the other tenant that were placed", len(beside), "jobs", "higher"),
        Result(
            "seconds until one is placed, median",
            ours,
            "s",
            "lower",
            baseline=Baseline("without a flood", theirs),
        ),
        Result("seconds until one is placed, at most", max(beside), "s", "lower", 10),
    ]


def _place(blue: Any, sidecar: Any) -> float:
    """Create a job; return the seconds until its sidecar has it. It ends at once."""
    name = f"job-{uuid.uuid4().hex[:8]}"
    began = time.monotonic()
    blue.job(name)
    assigned = sidecar.next("assign", what=lambda each: each.job_name == name)
    took = time.monotonic() - began
    sidecar.report(assigned, "STARTED")
    sidecar.report(assigned, "SUCCEEDED")
    blue.await_state("Succeeded", name)
    blue.delete_job(name)
    sidecar.beat()
    return took


def _hostile_sidecar(red: Any, number: int, stop: threading.Event, sent: list[int]) -> None:
    """Send whatever a sidecar can, as fast as the stream takes it; come back when it is ended."""
    dice, pod = random.Random(number), red.pod(f"decode-{number}")
    while not stop.is_set():
        attached = red.attach(pod)
        try:
            while not stop.is_set() and attached.error is None:
                if attached._outbox.qsize() > 2000:  # its own memory is not what is measured
                    time.sleep(0.01)
                    continue
                attached.say(**_hostile_message(dice))
                sent[0] += 1
        finally:
            attached.close()
            red.sidecars.remove(attached)
        time.sleep(0.2)


def _hostile_message(dice: random.Random) -> dict[str, Any]:
    match dice.randrange(5):
        case 0:
            slots = [pb.SlotFacts(index=n, model="/m" * 500) for n in range(64)]
            return {"hello": pb.SidecarHello(protocol_version=1, slots=slots)}
        case 1:
            words = "x" * dice.randrange(100_000)
            return {"heartbeat": pb.SlotHeartbeat(slot=dice.randrange(64), engine_state=words)}
        case 2:
            kind = dice.choice(pb.JobEvent.Kind.keys())
            event = pb.JobEvent(kind=kind, job_uid=uuid.uuid4().hex, epoch=dice.randrange(2**63))
            event.detail = "x" * 100_000
            return {"job_event": event}
        case 3:
            report = pb.ProfileReport(key=uuid.uuid4().hex, profile_json="[" * 100_000)
            return {"profile": report} if dice.random() < 0.001 else {"job_event": pb.JobEvent()}
        case _:
            jobs = [pb.RunningJob(job_uid=uuid.uuid4().hex, epoch=n) for n in range(1000)]
            return {"heartbeat": pb.SlotHeartbeat(slot=0, jobs=jobs, breaker="y" * 1000)}


def _stranger(red: Any, operator: Any, stop: threading.Event, sent: list[int]) -> None:
    """Come with made-up tokens, and call the webhook without its path."""
    import ssl
    import urllib.error
    import urllib.request

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{operator.state['webhookPort']}/mutate-pods"
    pod = red.pod("stranger")
    while not stop.is_set():
        request = urllib.request.Request(url, b"x" * 2**20)
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(request, context=context, timeout=5).close()
        attached = red.attach(pod, token=f"ey{uuid.uuid4().hex}.x.y")
        stop.wait(0.05)
        attached.close()
        red.sidecars.remove(attached)
        sent[1] += 2


def main() -> None:
    """Measure and write."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--parts", default="rows,fuzz,flood", help="by commas (default rows,fuzz,flood)"
    )
    parser.add_argument("--seconds", type=float, help="of the flood (default 600; quick: 15)")
    options = parser.parse_args()
    env, parts = environment(), options.parts.split(",")
    results: list[Result] = []
    if "rows" in parts:
        results += measure_rows(quick=options.quick)
    if "fuzz" in parts:
        results += measure_fuzz(quick=options.quick)
    if "flood" in parts:
        results += measure_flood(options.seconds or (15 if options.quick else 600))
    write("tenants", results, env, options.json)


if __name__ == "__main__":
    main()
