"""The operator as a process with many slots, on a real API server.

Pods are objects that no kubelet runs; each has a sidecar of its own, a light client in another
process (`benchmarks.operator_load`). All of them, the API server and etcd run beside the operator
on this machine, so figures include the load that they make. For each number of slots there is a new
API server and a new operator. A plot of the cost of a slot is left beside FILE (.svg).

Example: python -m benchmarks.scale --slots 200 1000 --json /tmp/scale.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pstats
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.engine.drawing import Panel, draw
from benchmarks.harness import (
    Result,
    arguments,
    environment,
    into_document,
    markdown,
    write,
)
from benchmarks.operator_load import (
    NAMESPACE,
    Operator,
    OwnPauses,
    Sidecars,
    Watch,
    authority_of,
    create_pod,
    in_parallel,
    job_of,
    pod_of,
    policy,
    token_of,
    until,
)
from windrow.crd import FINETUNE_JOB, HARVEST_POLICY, HARVEST_SLOT
from windrow_lab.cluster.local import apply_crds
from windrow_lab.controlplane.server import ControlPlane, ControlPlaneSettings
from windrow_lab.figures.summary import percentile
from windrow_lab.machine.build import ensure_tools
from windrow_lab.machine.progress import LineProgress
from windrow_operator.kube import Kube, kind_path

# Of the figures, those that should grow with the number of slots and no faster.
_PER_SLOT = {
    "memory with all streams": ("memory with all streams, KiB a slot", 1024.0),
    "at rest: share of one core": ("at rest, millionths of a core a slot", 1e6),
    "all sidecars attached for the first time": ("attached for the first time, ms a slot", 1e3),
}

# Of a shorter rest what memory gained says nothing.
LEVEL_AFTER_S = 600.0
# The operator collects and hands back what is free once a minute, and listings take some seconds.
_IN_ORDER_S = 90.0


def main() -> None:
    """Measure some numbers of slots; print and write the figures."""
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--slots", type=int, nargs="+", default=[200, 1000, 5000])
    parser.add_argument("--jobs", type=int, default=0, help="default: a fifth of the slots")
    parser.add_argument("--rate", type=float, default=20.0, help="jobs a second")
    parser.add_argument(
        "--rest", type=float, default=20.0, help="seconds at rest; 600 and more: what memory gains"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what FILE has of other numbers of slots"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile the operator until it is at rest, and end there; figures are of no use",
    )
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="write FILE's table and plot from --json; no run"
    )
    options = parser.parse_args()
    if options.docs:
        document(_known(options.json, []), options.docs)
        return
    if options.quick:
        options.slots, options.rest = [min(options.slots[0], 50)], 5.0
    env = environment()
    tools = ensure_tools(LineProgress(print))
    results = _known(options.json, options.slots) if options.add and options.json else []
    for slots in options.slots:
        with ControlPlane(ControlPlaneSettings(tools)) as plane:
            with plane.client() as client:
                apply_crds(client)
            results += asyncio.run(measure(plane, slots, options))
        if options.json and not options.profile:  # also of what ended before a larger number did
            write("scale", results, env, options.json)
            plot(results, options.json.with_suffix(".svg"))
    if options.profile:
        pstats.Stats(str(options.profile)).sort_stats("tottime").print_stats(30)
    elif not options.json:
        write("scale", results, env, None)


def _known(path: Path, slots: list[int]) -> list[Result]:
    """Return what a file has of other numbers of slots."""
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))["results"]
    kept = [entry for entry in found if int(entry["name"].split()[0]) not in slots]
    return [Result(**{name: v for name, v in e.items() if name != "met"}) for e in kept]


def plot(results: list[Result], to: Path) -> None:
    """Draw what a slot costs over the number of slots: level where nothing looks at all."""
    panels = []
    for name, (title, factor) in _PER_SLOT.items():
        points = [
            (float(slots), factor * result.value / slots)
            for result in results
            for slots, of in [(int(result.name.split()[0]), result.name.partition(": ")[2])]
            if of == name
        ]
        panels.append(Panel(title, {"operator": sorted(points)}, from_zero=True))
    draw(panels, "What a slot costs the operator, over the number of slots", to)


def document(results: list[Result], path: Path) -> None:
    """Write the table between the markers of a document, and the plot into its images."""
    columns = sorted({int(result.name.split()[0]) for result in results})
    found = {result.name: result for result in results}
    names = list(dict.fromkeys(result.name.partition(": ")[2] for result in results))
    head = ["", "goal", *(f"{slots:,} slots" for slots in columns)]
    rows = []
    for name in names:
        row = [found.get(f"{slots} slots: {name}") for slots in columns]
        first = next(result for result in row if result is not None)
        goal = "" if first.goal is None else f"{first.goal:g} {first.unit}".strip()
        rows.append([name, goal, *map(_cell, row)])
    table = markdown(head, rows, rest="--:")
    into_document(path, "<!-- scale -->", "<!-- /scale -->", table)
    plot(results, path.parent.parent / "images" / "scale.svg")


def _cell(result: Result | None) -> str:
    if result is None:
        return "not measured"
    said = f"{result.value:.3g} {result.unit}".strip()
    return f"**{said}**" if result.met is False else said


async def measure(plane: ControlPlane, slots: int, options: argparse.Namespace) -> list[Result]:
    """Return the figures of one number of slots."""
    kube = await Kube.connect(plane.kubeconfig)
    with tempfile.TemporaryDirectory() as folder:
        operator = Operator(plane.kubeconfig, Path(folder), options.profile)
        async with aiohttp.ClientSession() as http:
            try:
                return [r async for r in _phases(kube, operator, http, slots, options)]
            except BaseException:
                print((Path(folder) / "operator.log").read_text()[-6000:])
                raise
            finally:
                if operator.process is not None and operator.process.returncode is None:
                    await operator.end(kill=True)
                await kube.close()


async def _phases(
    kube: Kube,
    operator: Operator,
    http: aiohttp.ClientSession,
    slots: int,
    options: argparse.Namespace,
) -> Any:
    jobs = options.jobs or max(10, slots // 5)

    def result(name: str, value: float, unit: str, goal: float | None = None) -> Result:
        found = Result(f"{slots} slots: {name}", round(value, 4), unit, "lower", goal)
        print(f"{found.name}: {found.value:g} {unit}", flush=True)
        return found

    pods = await in_parallel([create_pod(kube, i) for i in range(slots)])
    await kube.create(kind_path(HARVEST_POLICY, NAMESPACE), policy())
    yield result("ready after a cold start with their pods", await operator.start(), "s", 10)
    authority = await authority_of(kube)
    tokens = await in_parallel([token_of(kube, pod) for pod in pods])
    began = time.monotonic()
    sidecars = Sidecars(pods, tokens, authority, operator.state_file)
    try:
        await until("all are attached", sidecars.all_attached)
        yield result("all sidecars attached for the first time", time.monotonic() - began, "s")
        watch, pauses = Watch(kube, http), OwnPauses()
        pauses.settle()
        beside = [asyncio.create_task(each.run()) for each in (watch, pauses)]
        await until("it watches", lambda: watch.ready)
        waits = await _arrivals(kube, watch, jobs, options.rate)
        yield result(f"jobs at {options.rate:g}/s: created to Placed, p50", waits[0], "s")
        yield result(f"jobs at {options.rate:g}/s: created to Placed, p99", waits[1], "s", 1)
        await _all_shown(kube, slots)
        yield result("attached, each slot with its figures", time.monotonic() - began, "s")
        pauses.take_longest()
        waits = await _arrivals(kube, watch, min(100, slots - jobs), 2.0, prefix="single")
        yield result("one job after the other, 2/s: created to Placed, p99", waits[1], "s", 0.15)
        yield result("meanwhile: longest pause of the load", pauses.take_longest(), "s")
        async for figure in _at_rest(operator, http, options.rest, pauses, result):
            yield figure
        if options.profile:
            await operator.end(kill=False)
            return
        yield result("memory with all streams", operator.ps().memory_info().rss / 2**20, "MiB", 700)
        before = await _epochs(kube)
        await operator.end(kill=True)
        began = time.monotonic()
        sidecars.count_anew()
        await operator.start()
        await until("all are attached again", sidecars.all_attached)
        yield result("killed: all attached again", time.monotonic() - began, "s", 60)
        await asyncio.sleep(5)
        after = await _epochs(kube)
        moved = sum(after[name] != epoch for name, epoch in before.items())
        yield result("killed: jobs that moved", moved, "jobs", 0)
        for task in beside:
            task.cancel()
        async for figure in _after_a_mass_disconnect(operator, sidecars, result):
            yield figure
    finally:
        sidecars.end()


async def _after_a_mass_disconnect(
    operator: Operator, sidecars: Sidecars, result: Callable[..., Result]
) -> Any:
    """End all streams at once; yield what stays in memory of them.

    The operator puts its memory in order once a minute, and both figures are of after that.
    """
    await asyncio.sleep(_IN_ORDER_S)
    yield result("memory after all came back", operator.ps().memory_info().rss / 2**20, "MiB", 700)
    sidecars.end()
    await asyncio.sleep(_IN_ORDER_S)
    yield result("memory after all went away", operator.ps().memory_info().rss / 2**20, "MiB", 700)


async def _all_shown(kube: Kube, slots: int) -> None:
    """Return once every slot has an object of its own whose status is written."""
    shown: set[str] = set()
    while len(shown) < slots:
        await asyncio.sleep(5)
        async for piece in kube.pieces(kind_path(HARVEST_SLOT, NAMESPACE)):
            shown |= {body["metadata"]["name"] for body in piece if body.get("status")}


async def _arrivals(
    kube: Kube, watch: Watch, count: int, rate: float, prefix: str = "job"
) -> tuple[float, float]:
    """Create jobs at a rate; return the median and the 99th percentile of the wait for a slot."""
    created: dict[str, float] = {}

    async def create(number: int) -> None:
        await asyncio.sleep(number / rate)
        name = f"{prefix}-{number}"
        created[name] = time.monotonic()
        await kube.create(kind_path(FINETUNE_JOB, NAMESPACE), job_of(name, number))

    await asyncio.gather(*(create(number) for number in range(count)))
    await until("all are placed", lambda: created.keys() <= watch.placed.keys())
    waits = sorted(watch.placed[name] - at for name, at in created.items())
    return statistics.median(waits), percentile(waits, 0.99)


async def _at_rest(
    operator: Operator,
    http: aiohttp.ClientSession,
    seconds: float,
    pauses: OwnPauses,
    result: Callable[..., Result],
) -> Any:
    await asyncio.sleep(5)
    name = "windrow_operator_api_requests_total"
    process, before = operator.ps(), await operator.metrics(http)
    cpu, began, held = process.cpu_times(), time.monotonic(), process.memory_info().rss
    await asyncio.sleep(seconds)
    after, used = await operator.metrics(http), process.cpu_times()
    elapsed = time.monotonic() - began
    busy = (used.user + used.system - cpu.user - cpu.system) / elapsed
    yield result("at rest: share of one core", busy, "", 0.30)
    yield result("at rest: API writes", (after[name] - before[name]) / elapsed, "1/s", 5)
    if seconds >= LEVEL_AFTER_S:
        gained = (process.memory_info().rss - held) / 2**20
        yield result(f"at rest: memory gained in {seconds / 60:g} min", gained, "MiB")
    context = ssl.create_default_context()  # a pause of its own
    pauses.take_longest()
    waits = await _reviews(operator, http, context)
    yield result("webhook at 100 pods/s, p99", waits, "s", 0.020)
    yield result("while it was asked: longest pause of the load", pauses.take_longest(), "s")


async def _reviews(
    operator: Operator, http: aiohttp.ClientSession, context: ssl.SSLContext
) -> float:
    """Ask the webhook about pods, 100 a second for six seconds; return the 99th percentile.

    Of the last five seconds: in the first one connections are made, which the API server keeps.
    """
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"https://127.0.0.1:{operator.state['webhookPort']}/mutate-pods"
    waits: list[float] = []

    async def ask(number: int) -> None:
        await asyncio.sleep(number / 100)
        pod = pod_of(number)
        pod["metadata"]["labels"] = {"app": "chat", "windrow.dev/inject": "enabled"}
        pod["spec"].pop("volumes")
        review = {"request": {"uid": str(number), "namespace": NAMESPACE, "object": pod}}
        began = time.monotonic()
        async with http.post(url, json=review, ssl=context) as answer:
            assert (await answer.json())["response"]["allowed"]
        if number >= 100:
            waits.append(time.monotonic() - began)

    await asyncio.gather(*(ask(number) for number in range(600)))
    return percentile(sorted(waits), 0.99)


async def _epochs(kube: Kube) -> dict[str, int]:
    found = await kube.list(kind_path(FINETUNE_JOB))
    return {body["metadata"]["name"]: body["status"]["epoch"] for body in found}


if __name__ == "__main__":
    main()
