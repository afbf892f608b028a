"""Measure the time from turning harvesting off to the last tasklet, also without an operator.

A cluster of this machine with one decode pod and a job that never ends. The operator is alone with
its work, frozen (SIGSTOP), cut off from the sidecar by a relay that passes nothing on, or gone. The
command is the switch of the cluster or of the pod; without one the lease of the policy ends. Times
are on one clock, from the command, or from the moment at which the operator was lost.
Example: python -m benchmarks.off --json /tmp/off.json
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Self

import psutil
from rich.console import Console

from benchmarks.harness import ROOT, Result, arguments, environment, middle, write
from windrow.client import WindrowClient, read_manifest
from windrow.errors import WindrowError
from windrow.eventlog import FLUSH_INTERVAL_S, TaskletEvent, read_events
from windrow.off import ClusterSwitch
from windrow.rundir import RunDir
from windrow_lab.cluster import manifests, serving
from windrow_lab.cluster.local import ClusterSettings, LocalCluster
from windrow_lab.machine.devices import devices, usable_cores

MODEL = ROOT / "models" / "windrow-tiny"
JOB, POLICY = "long", "off"
LEASE_S = 10.0
OBJECTIVE_MS = 1000.0  # decode has no request here: what is measured is when the worker ends
WITHIN_S = 300.0
# The sidecar is given the address of the relay.
RELAYED, OPERATOR = "127.0.0.2", "127.0.0.1"


class Relay:
    """Passes bytes between a port of one loopback address and the same of another, or none.

    Args:
        port: of both.
    """

    def __init__(self, port: int) -> None:
        self._port, self._cut = port, threading.Event()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((RELAYED, port))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def partitioned(self) -> Iterator[None]:
        """Pass nothing on; what is open stays open."""
        self._cut.set()
        try:
            yield
        finally:
            self._cut.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it and all that passes through it."""
        self._stopped.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._listener.close()

    def _run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while not self._stopped.is_set():
            if self._cut.is_set():
                time.sleep(0.05)
                continue
            for key, _ in self._selector.select(0.1):
                if key.data is None:
                    self._accept()
                else:
                    self._pass(key.fileobj, key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        ours, _ = self._listener.accept()
        try:
            theirs = socket.create_connection((OPERATOR, self._port), timeout=1)
        except OSError:
            ours.close()
            return
        self._selector.register(ours, selectors.EVENT_READ, theirs)
        self._selector.register(theirs, selectors.EVENT_READ, ours)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            data = source.recv(65536)
            sink.sendall(data)
        except OSError:
            data = b""
        if not data:
            for each in (source, sink):
                # Both ends may have closed at once, and the other one was taken out before.
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(each)
                each.close()


class Scene:
    """The cluster, with a job that runs.

    Args:
        cluster: that runs.
        folder: of everything that is written.
    """

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster, self._events = cluster, folder / "pods"
        self.client = WindrowClient(cluster.kubeconfig)
        self.switch = ClusterSwitch(self.client)
        pods = serving.plan_pods(devices(usable_cores(), 1), MODEL)
        serving.observe(self.client, pods, POLICY, "windrow", timedelta(seconds=60))
        serving.create(self.client, pods)
        serving.await_ready(self.client, pods, timedelta(seconds=240))
        serving.await_observed(self.client, pods, timedelta(seconds=60))
        policy = manifests.harvest_policy(POLICY, OBJECTIVE_MS, "windrow")
        policy["spec"]["lease"] = f"{LEASE_S:g}s"
        self.client.apply_policy(policy)
        serving.await_slots(self.client, pods, timedelta(seconds=60))
        job = manifests.finetune_job(
            read_manifest(ROOT / "examples" / "finetunejob.yaml"),
            model=MODEL,
            rows=Path(
                shutil.copy(
                    ROOT / "examples" / "support-tone" / "train.jsonl", folder / "rows.jsonl"
                )
            ),
            destination=folder / "out",
            steps=1_000_000,
            name=JOB,
        )
        job["spec"]["training"]["batchSize"] = 2
        job["spec"]["dataset"]["evalFraction"] = 0
        self.client.submit(job)

    @property
    def operator(self) -> int:
        """The operator's PID."""
        name = str(self.cluster.directory)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if "windrow_operator" in line and any(name in word for word in line):
                    return process.pid
        raise SystemExit("no operator runs")

    def pod_switch(self) -> Path:
        """The switch in the pod."""
        (socket_path,) = self.cluster.directory.rglob("agent.sock")
        return RunDir(socket_path.parent).off_switch

    def last_tasklet_ns(self) -> int:
        """Return when the newest tasklet ended."""
        ended = (e.end_ns for _, e in read_events(self._events) if isinstance(e, TaskletEvent))
        return max(ended, default=0)

    def await_work(self) -> None:
        """Wait until tasklets end again."""
        since = time.monotonic_ns()
        _until("tasklets end", lambda: self.last_tasklet_ns() > since)
        # Their log is cleared, so that each look reads little.
        for path in self._events.rglob("*.events.jsonl"):
            path.unlink(missing_ok=True)
        _until("tasklets end", lambda: self.last_tasklet_ns() > since)

    def seconds_to_the_last(self, since_ns: int, *, least_s: float) -> float:
        """Wait until no tasklet has ended for a while; returns when the last one did.

        Args:
            since_ns: of the command.
            least_s: before then nothing is expected to end.
        """
        quiet_s = 3 * FLUSH_INTERVAL_S
        deadline = time.monotonic() + WITHIN_S
        time.sleep(least_s)
        while time.monotonic() < deadline:
            time.sleep(quiet_s)
            last = self.last_tasklet_ns()
            if time.monotonic_ns() - last > quiet_s * 1e9 and not self._workers():
                return max(0.0, (last - since_ns) / 1e9)
        raise SystemExit(f"tasklets still end {WITHIN_S:g} s after the command")

    def _workers(self) -> list[Path]:
        return [*self.cluster.directory.rglob("worker-*.pid")]


@contextlib.contextmanager
def frozen(scene: Scene, _: Relay) -> Iterator[None]:
    """The operator's process is stopped."""
    pid = scene.operator
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        # One that was stopped for longer than it leads ends; in a pod the kubelet starts it again.
        scene.cluster.operator.stop(timedelta(seconds=5))
        scene.cluster.operator.resume()


@contextlib.contextmanager
def partitioned(_: Scene, relay: Relay) -> Iterator[None]:
    """The operator runs, and nothing passes between it and the sidecar."""
    with relay.partitioned():
        yield


@contextlib.contextmanager
def gone(scene: Scene, _: Relay) -> Iterator[None]:
    """The operator has ended, and nobody starts it again."""
    scene.cluster.operator.stop(timedelta(seconds=5))
    try:
        yield
    finally:
        scene.cluster.operator.resume()


@contextlib.contextmanager
def _nothing(*_: object) -> Iterator[None]:
    yield


Loss = Callable[[Scene, Relay], contextlib.AbstractContextManager[None]]
LOSSES: dict[str, Loss] = {"frozen": frozen, "partitioned": partitioned, "gone": gone}


def measure(scene: Scene, relay: Relay, repeats: int) -> list[Result]:
    """Turn harvesting off in every way, so many times each."""
    took: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, loss in {"alive": _nothing, **LOSSES}.items():
            scene.await_work()
            with loss(scene, relay):
                switch = scene.pod_switch()
                since = time.monotonic_ns()
                switch.touch()
                seconds = scene.seconds_to_the_last(since, least_s=0)
            took.setdefault(f"switch in the pod, operator {name}", []).append(seconds)
            switch.unlink()
        scene.await_work()
        since = time.monotonic_ns()
        scene.switch.turn_off("a benchmark")
        seconds = scene.seconds_to_the_last(since, least_s=0)
        took.setdefault("switch of the cluster, operator alive", []).append(seconds)
        scene.switch.turn_on()
        for name, loss in LOSSES.items():
            scene.await_work()
            since = time.monotonic_ns()
            with loss(scene, relay):
                seconds = scene.seconds_to_the_last(since, least_s=LEASE_S)
            took.setdefault(f"lease of {LEASE_S:g} s ends, operator {name}", []).append(seconds)
    results = []
    for name, repeated in took.items():
        value, spread = middle(repeated)
        # A sidecar looks at its switch four times a second, and a job finishes its step.
        goal = LEASE_S + 5.0 if name.startswith("lease") else 5.0
        results.append(Result(name, round(value, 3), "s", "lower", goal, round(spread, 3)))
    return results


def _until(what: str, read: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not read():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {WITHIN_S:g} s: {what}")
        time.sleep(FLUSH_INTERVAL_S / 2)


def main() -> None:
    """Run, measure, write."""
    options = arguments(__doc__).parse_args()
    env = environment()
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        settings = ClusterSettings(
            log_dir=folder / "logs",
            event_log_root=folder / "pods",
            outputs=(folder,),
            operator_arguments=(f"--advertise-address={RELAYED}",),
        )
        cluster = LocalCluster(settings, console=Console(stderr=True))
        try:
            with cluster:
                state = json.loads((cluster.directory / "operator.json").read_text())
                with Relay(state["webhookPort"]), Relay(state["attachPort"]) as relay:
                    results = measure(Scene(cluster, folder), relay, 1 if options.quick else 3)
        except WindrowError as error:
            raise SystemExit(str(error)) from error
    write("off", results, env, options.json)


if __name__ == "__main__":
    main()
