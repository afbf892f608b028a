"""Cost of control plane, operator, node and display for the decode that they show.

One decode server under the demo's load, in blocks of time that alternate: with nothing else on the
machine but the load client, and beside a running cluster whose objects the display reads twice a
second. Steps are compared by batch, since a slower step also makes the next batch larger.
Example: python -m benchmarks.disturbance --json /tmp/disturbance.json
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write
from windrow.client import WindrowClient
from windrow.eventlog import StepEvent, read_events
from windrow.rundir import ENV_LOG_DIR
from windrow_lab.cluster.local import ClusterSettings, LocalCluster
from windrow_lab.demo.watcher import Watcher
from windrow_lab.machine.devices import bystanders, devices, on_cpus, usable_cores
from windrow_lab.machine.ports import LOOPBACK, ReservedPort

BLOCK_S = 12.0
GOAL_PERCENT = 5.0
FEWEST_STEPS = 30  # of one batch in one block, to be compared


def main() -> None:
    """Run, compare, write."""
    options = arguments(__doc__).parse_args()
    env = environment()
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        with engine(folder) as endpoint:
            pairs = [_pair(endpoint, folder) for _ in range(1 if options.quick else 4)]
    write("disturbance", [_result(pairs)], env, options.json)


@contextlib.contextmanager
def engine(folder: Path, **variables: str) -> Iterator[str]:
    """Run a decode server with its event log in `folder`; yields its address."""
    with ReservedPort() as port:
        number = port.number
    endpoint = f"http://{LOOPBACK}:{number}"
    argv = [sys.executable, "-m", "windrow_sidecar.engines.builtin", f"--port={number}"]
    argv += [f"--model-path={ROOT / 'models' / 'windrow-tiny'}", "--stream-interval=32"]
    argv += ["--disaggregation-mode=decode", "--disaggregation-transfer-backend=fake"]
    process = subprocess.Popen(
        argv,
        env={**os.environ, ENV_LOG_DIR: str(folder), **variables},
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        _await_ready(endpoint)
        yield endpoint
    finally:
        process.terminate()
        process.wait()


def _await_ready(endpoint: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{endpoint}/health", timeout=1).is_success:
                return
        time.sleep(0.1)
    raise SystemExit("the engine is not ready after 60 s")


def _pair(endpoint: str, folder: Path) -> tuple[list[StepEvent], list[StepEvent]]:
    """Steps of one block alone, and of one beside a cluster that is watched."""
    others = bystanders(devices(usable_cores()))
    with on_cpus(others):
        alone = block(endpoint, folder)
    quiet = Console(file=io.StringIO(), force_terminal=True, width=120)
    asked = ClusterSettings(cpus=others)
    with LocalCluster(asked, console=Console(stderr=True)) as cluster, on_cpus(others):
        client = WindrowClient(cluster.kubeconfig)
        with Watcher(client, quiet, kubernetes=cluster.version, policy="none"):
            return alone, block(endpoint, folder)


def block(endpoint: str, folder: Path) -> list[StepEvent]:
    """Load the server for a while; return its steps without a prompt in them."""
    begin_ns = time.monotonic_ns()
    argv = [sys.executable, "-m", "windrow_lab.load", f"--endpoint={endpoint}"]
    argv += [f"--seconds={BLOCK_S:g}", "--seed=7", f"--json={folder / 'load.json'}"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1.5)  # the engine writes its events once a second
    steps = (event for _, event in read_events(folder) if isinstance(event, StepEvent))
    return [event for event in steps if event.start_ns >= begin_ns and not event.admitted]


def _result(pairs: list[tuple[list[StepEvent], list[StepEvent]]]) -> Result:
    found = [ratio for alone, beside in pairs for ratio in ratios(alone, beside)]
    value, spread = middle([100 * (ratio - 1) for ratio in found])
    alone_ms = statistics.median(_ms(event) for alone, _ in pairs for event in alone)
    return Result(
        "step beside a watched cluster, against alone, at equal batch",
        round(value, 2),
        "%",
        "lower",
        GOAL_PERCENT,
        round(spread, 2),
        Baseline("step alone, ms", round(alone_ms, 2)),
    )


def ratios(alone: list[StepEvent], beside: list[StepEvent]) -> list[float]:
    """Return how much longer steps of each batch take, where there are enough of both."""
    by_batch: list[dict[int, list[float]]] = []
    for steps in (alone, beside):
        found: dict[int, list[float]] = defaultdict(list)
        for event in steps:
            found[event.batch].append(_ms(event))
        by_batch.append(found)
    return [
        statistics.median(by_batch[1][batch]) / statistics.median(latencies)
        for batch, latencies in by_batch[0].items()
        if min(len(latencies), len(by_batch[1][batch])) >= FEWEST_STEPS
    ]


def _ms(event: StepEvent) -> float:
    return (event.end_ns - event.start_ns) / 1e6


if __name__ == "__main__":
    main()
