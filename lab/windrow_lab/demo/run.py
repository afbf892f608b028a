"""The whole system doing its job, from an empty machine to an adapter: `windrow demo`.

Read `run` from top to bottom: it is the story. Everything in it is real: the API server, the
operator, the injected pods, the load, the job.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from kubernetes import client as k8s
from rich.console import Console

from windrow.client import NotFound, WindrowClient, read_manifest
from windrow.errors import UserError, WindrowError
from windrow.eventlog import FLUSH_INTERVAL_S, StepEvent
from windrow.views import JobView
from windrow_lab.cluster import manifests, serving
from windrow_lab.cluster.local import ClusterSettings, LocalCluster
from windrow_lab.cluster.manifests import NAMESPACE
from windrow_lab.demo import measure
from windrow_lab.demo.disturbance import MachineSample, disturbances
from windrow_lab.demo.watcher import Watcher
from windrow_lab.figures.report import adapter_path, rows_of, write_report
from windrow_lab.figures.summary import DEDICATED, PODS, Events, run_log, summarize
from windrow_lab.load import generator
from windrow_lab.load.client import schedule, share_of
from windrow_lab.load.objective import (
    FACTOR,
    Objective,
    at_pace,
    bearable_rate,
    objective_for,
    pace_of,
    solo_model,
)
from windrow_lab.load.trace import TraceRequest
from windrow_lab.machine import resources
from windrow_lab.machine.devices import Device, bystanders, devices, on_cpus, usable_cores
from windrow_lab.machine.environment import environment
from windrow_lab.machine.processes import Keeper
from windrow_lab.realnode import pods as realpods
from windrow_lab.realnode.cluster import RealCluster
from windrow_lab.realnode.node import NodeInfo

POLICY = "demo"
PODS_WITHIN = timedelta(seconds=120)
SGLANG_WITHIN = timedelta(seconds=300)  # it imports for a minute where cores are busy
JOB_ENDS_WITHIN = timedelta(seconds=120)  # after the load and as much time again
WARM_UP_S = 10.0
# For a server that learns its latency profile from what it serves.
LEARN_S, LEARN_RATE, LEARN_LOADS = 15.0, 0.3, 4
LEARNED_WITHIN = timedelta(seconds=3)  # until the operator has heard of it
DRAIN = timedelta(seconds=90)  # for the requests that are still answered after the last arrival
_TAIL_LINES = 15


@dataclass(frozen=True)
class DemoSettings:
    """Settings of a demo.

    Attributes:
        out: folder of event logs, report and adapter; made by the run, must not exist.
        rate: None: what gives this machine's decode a batch in the middle of its range.
        pods: None: as many as the machine's cores make devices.
        objective_ms: None: by the rule of `windrow_lab.load.objective`.
        steps: of the job; None: as many as keep it busy through the load.
        like: of which trace requests are generated, where no file is given.
        busy: of a trace, not its begin but a stretch that has its mean rate.
        factor: the objective by rule, in solo steps.
        arena_bytes: of each decode pod; 0: the engine's default.
        tp: ranks of each decode engine, which share its pod's cores.
        sglang: the environment whose SGLang decodes; None: the built-in engine.
        node: the real node that this process runs on; None: pods run as processes.
    """

    out: Path
    seconds: float = 60.0
    rate: float | None = None
    seed: int = 7
    trace: Path | None = None
    pods: int | None = None
    policy: str = "windrow"
    model: Path | None = None
    rows: Path | None = None
    objective_ms: float | None = None
    steps: int | None = None
    like: generator.Like = "conv"
    busy: bool = False
    factor: float = FACTOR
    arena_bytes: int = 0
    tp: int = 1
    sglang: Path | None = None
    node: NodeInfo | None = None


class DemoFailed(WindrowError):
    """The run ended before its job succeeded; the message says where and shows the logs' ends."""


@dataclass
class DemoStage:
    """Stage of a run: a control plane, this machine's devices, the files it needs."""

    settings: DemoSettings
    cluster: LocalCluster | RealCluster
    client: WindrowClient
    keeper: Keeper
    watcher: Watcher
    devices: list[Device]
    model: Path
    example: dict[str, Any]
    rows: Path
    log_dir: Path
    environment: dict[str, Any]
    before: MachineSample
    rate: float = 1.0
    _doing: str = field(default="starting")

    def say(self, doing: str) -> None:
        """Name what comes next, on the screen and in an error."""
        self._doing = doing
        self.watcher.say(doing)

    @property
    def doing(self) -> str:
        """Activity that was named last."""
        return self._doing

    @property
    def load_plan(self) -> measure.LoadPlan:
        """Settings of the load client."""
        asked = self.settings
        cpus = bystanders(self.devices)
        return measure.LoadPlan(asked.seconds, self.rate, asked.seed, asked.trace, cpus, asked.busy)

    def schedule_of_a_device(self, rate: float) -> list[TraceRequest]:
        """Return the requests that the first pod gets at a rate."""
        n = len(self.devices)
        asked = self.settings
        requests = schedule(
            seconds=asked.seconds,
            rate=rate,
            seed=asked.seed,
            endpoints=n,
            trace=asked.trace,
            busy=asked.busy,
            like=asked.like,
        )
        return share_of(requests, 0, n)

    def shaped(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a pod or policy as the node needs it."""
        if self.settings.node is None:
            return body
        out = self.settings.out
        return realpods.on_the_node(body, out, out / PODS, self.rows)

    def job(self, destination: Path, steps: int) -> dict[str, Any]:
        """Return the run's FinetuneJob."""
        return manifests.finetune_job(
            self.example, model=self.model, rows=self.rows, destination=destination, steps=steps
        )


def run(settings: DemoSettings, console: Console) -> dict[str, Any]:
    """Run the demo and return its summary, which is also in `summary.json`.

    Raises DemoFailed, and whatever the control plane raises when it cannot start; nothing is left
    running in either case.
    """
    with stage(settings, console) as on:
        try:
            pods = serve(on)
            objective = settle_objective(on, pods)
            job = harvest(on, pods, objective)
        finally:
            if settings.node is not None:
                leave_clean(on)
    return conclude(on, job, objective)


def check_ranks(model: Path, ranks: int) -> None:
    """Refuse a number of ranks that a model's heads do not divide into; the engine checks the rest.

    Raises:
        UserError: naming `--tp`.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = int(config.get("num_attention_heads") or 0)
    if heads % ranks:
        raise UserError(
            f"the model has {heads} attention heads, which {ranks} ranks cannot share evenly",
            field="--tp",
            remedy="Use a number of ranks that divides it.",
        )


@contextlib.contextmanager
def stage(settings: DemoSettings, console: Console) -> Iterator[DemoStage]:
    """Check the input, start a control plane with operator and node, and end all of it."""
    before = environment()
    held = devices(usable_cores(), settings.pods)
    sampled = MachineSample.take(usable_cores())
    if held[0].oversubscribed:
        console.print(f"{len(held)} pods share the cores of fewer devices: figures mean nothing")
    if settings.tp > 1:
        console.print(f"{settings.tp} ranks share the cores of each pod: figures mean nothing")
    # Made here only to refuse a bad rate, length or trace before anything starts.
    schedule(
        seconds=settings.seconds,
        rate=1.0 if settings.rate is None else settings.rate,
        seed=settings.seed,
        endpoints=len(held),
        trace=settings.trace,
    )
    model = resources.find(resources.MODEL, option="--model", given=settings.model)
    check_ranks(model, settings.tp)
    rows = resources.find(resources.ROWS, option="--rows", given=settings.rows)
    if settings.node is not None:
        realpods.require_mounted(model, option="--model")
        realpods.require_mounted(rows, option="--rows")
    example = read_manifest(resources.find(resources.JOB, option="--job"))
    (settings.out / PODS).mkdir(parents=True)
    log_dir = settings.out / "logs"
    others = bystanders(held)
    with (
        Keeper() as keeper,
        _cluster(settings, others, keeper, console) as cluster,
        on_cpus(others),
    ):
        client = WindrowClient(cluster.kubeconfig)
        watcher = Watcher(
            WindrowClient(cluster.kubeconfig),
            console,
            kubernetes=cluster.version,
            policy=settings.policy,
        )
        on = DemoStage(
            settings=settings,
            cluster=cluster,
            client=client,
            keeper=keeper,
            watcher=watcher,
            devices=held,
            model=model,
            example=example,
            rows=rows,
            log_dir=log_dir,
            environment=before,
            before=sampled,
        )
        with watcher, _explained(on):
            yield on


def _cluster(
    settings: DemoSettings, cpus: list[int], keeper: Keeper, console: Console
) -> LocalCluster | RealCluster:
    """Return what the demo runs on, not started yet."""
    if settings.node is not None:
        return RealCluster(settings.node, keeper, settings.out)
    asked = ClusterSettings(
        log_dir=settings.out / "logs",
        event_log_root=settings.out / PODS,
        outputs=(settings.out,),
        cpus=cpus,
    )
    return LocalCluster(asked, console=console)


@contextlib.contextmanager
def _explained(on: DemoStage) -> Iterator[None]:
    try:
        yield
    except serving.NotReady as e:
        tails = [text for name in e.logs if (text := log_tail(on, name))]
        raise DemoFailed("\n".join([f"{on.doing}: {e}", *tails, f"logs: {on.log_dir}"])) from e


def log_tail(on: DemoStage, name: str) -> str:
    """Return the end of a log, or of each log of a folder, with its path."""
    found = [on.settings.out / name, *on.log_dir.rglob(name), *on.log_dir.rglob(f"{name}.log")]
    files = [f for path in found for f in ([path] if path.is_file() else path.glob("*.log"))]
    tails = []
    for path in files:
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        tails.append("\n".join([f"--- the end of {path}", *lines]))
    return "\n".join(tails)


def serve(on: DemoStage) -> serving.Pods:
    """Create the decode pods under a policy, and return once they serve and have a profile."""
    settings = on.settings
    pods = serving.plan_pods(
        on.devices,
        on.model,
        arena_bytes=settings.arena_bytes,
        sglang=settings.sglang,
        ranks=settings.tp,
        shaped=on.shaped,
    )
    serving.observe(on.client, pods, POLICY, settings.policy, PODS_WITHIN)
    on.say(f"{len(pods.decodes)} decode pod(s) start and take their latency profile")
    serving.create(on.client, pods)
    serving.await_ready(on.client, pods, PODS_WITHIN if settings.sglang is None else SGLANG_WITHIN)
    if settings.sglang is not None:
        learn(on, pods)
    return pods


def learn(on: DemoStage, pods: serving.Pods) -> None:
    """Play loads until every pod has learned its latency profile from them.

    A server that people use is not held up to be measured: SGLang's profile comes from live steps
    on each share of the device, which it takes under a policy that harvests. There is no job yet.

    Raises NotReady when one has not after `LEARN_LOADS` of them.
    """
    serving.await_observed(on.client, pods, PODS_WITHIN)
    policy = manifests.harvest_policy(POLICY, serving.PLACEHOLDER_MS, on.settings.policy)
    on.client.apply_policy(on.shaped(policy))
    for n in range(LEARN_LOADS):
        on.say(f"load for {LEARN_S:g} s, from which decode learns its latency profile ({n + 1})")
        play(on, pods, f"learning-{n + 1}", LEARN_S, on.settings.rate or LEARN_RATE)
        try:
            serving.await_slots(on.client, pods, LEARNED_WITHIN)
        except serving.NotReady:
            if n + 1 == LEARN_LOADS:
                raise
        else:
            return


def settle_objective(on: DemoStage, pods: serving.Pods) -> Objective:
    """Return the objective that the load deserves: the pods' profile, at the pace of live steps.

    Settles the load's rate as well, where none was asked for.
    """
    settings = on.settings
    profile = serving.await_profile(on.client, pods, PODS_WITHIN)
    # What the simulator needs to play the run again.
    path = settings.out / "profile.json"
    path.write_text(profile.model_dump_json(by_alias=True, indent=2) + "\n", encoding="utf-8")
    model = solo_model(profile)
    on.rate = settings.rate or bearable_rate(on.schedule_of_a_device, model)
    on.say(f"warm-up: load for {WARM_UP_S:g} s, decode alone")
    pace = pace_of(warm_up(on, pods), model)
    on.rate = settings.rate or bearable_rate(on.schedule_of_a_device, at_pace(model, pace))
    objective = objective_for(on.schedule_of_a_device(on.rate), model, pace, settings.factor)
    if settings.objective_ms is not None:
        objective = replace(objective, milliseconds=settings.objective_ms)
    on.watcher.objective(objective.milliseconds)
    return objective


def warm_up(on: DemoStage, pods: serving.Pods) -> list[StepEvent]:
    """Serve the beginning of the load while nothing is harvested, and return the steps."""
    began_ns = time.monotonic_ns()
    play(on, pods, "warm-up", WARM_UP_S, on.rate)
    time.sleep(2 * FLUSH_INTERVAL_S)
    events = Events.read(on.settings.out / PODS)
    return [step for _, step in events.steps if step.start_ns >= began_ns]


def play(on: DemoStage, pods: serving.Pods, name: str, seconds: float, rate: float) -> None:
    """Serve the beginning of the load, outside of what is measured."""
    folder = on.settings.out / name
    folder.mkdir()
    plan = replace(on.load_plan, seconds=seconds, rate=rate)
    measure.Load.start(on.keeper, plan, pods.endpoints, folder).await_end(drain_within=DRAIN)


def steps_through_load(on: DemoStage) -> int:
    """Measure the job alone on the device and return how many steps last through the load."""
    on.say(f"dedicated: the job alone on the whole device for {measure.DEDICATED_S:g} s")
    job = on.job(on.settings.out / "dedicated" / "adapter", 1_000_000)
    alone = measure.measure_dedicated(on.keeper, job, on.devices[0], on.settings.out)
    return manifests.steps_through(
        seconds=on.settings.seconds,
        dedicated_tokens_per_second=alone.tokens_per_second,
        tokens_per_step=alone.tokens / alone.steps,
    )


def harvest(on: DemoStage, pods: serving.Pods, objective: Objective) -> JobView:
    """Let the policy harvest, start load and job together; return the job once both have ended."""
    settings = on.settings
    serving.await_observed(on.client, pods, PODS_WITHIN)
    policy = manifests.harvest_policy(POLICY, objective.milliseconds, settings.policy)
    on.client.apply_policy(on.shaped(policy))
    serving.await_slots(on.client, pods, PODS_WITHIN)
    measured = steps_through_load(on)
    steps = settings.steps or measured
    on.say(f"load (rate {on.rate:g}) for {settings.seconds:g} s, a FinetuneJob of {steps} steps")
    load = measure.Load.start(on.keeper, on.load_plan, pods.endpoints, settings.out)
    job = on.client.submit(on.job(settings.out / "adapter", steps))
    on.watcher.follow(job.name)
    load.finish(run_log(settings.out), objective.milliseconds, drain_within=DRAIN)
    on.say("the load has ended, the job goes on to its end")
    try:
        within = JOB_ENDS_WITHIN + timedelta(seconds=settings.seconds)
        done = on.client.wait(job.name, namespace=NAMESPACE, within=within)
    except TimeoutError as e:
        raise serving.NotReady(str(e), logs=[*pods.logs, "operator"]) from e
    on.say(f"the job has ended: {done.state}")
    serving.delete(on.client, pods, PODS_WITHIN)
    return done


def leave_clean(on: DemoStage) -> None:
    """Delete the run's job and pods, and return once they are gone: the node stays.

    The next run's have the same names.
    """
    core = k8s.CoreV1Api(on.client.api)
    job, mine = on.example["metadata"]["name"], f"app={manifests.APP}"

    def left() -> list[str]:
        pods = core.list_namespaced_pod(NAMESPACE, label_selector=mine).items
        names = {one.name for one in on.client.jobs(namespace=NAMESPACE)} & {job}
        return [*names, *(pod.metadata.name for pod in pods)]

    with contextlib.suppress(NotFound):
        on.client.delete(job, namespace=NAMESPACE)
    core.delete_collection_namespaced_pod(NAMESPACE, label_selector=mine)
    if names := serving.poll(left, lambda names: not names, PODS_WITHIN):
        raise serving.NotReady(f"{', '.join(names)} still there after {PODS_WITHIN}")


def conclude(on: DemoStage, job: JobView, objective: Objective) -> dict[str, Any]:
    """Compute the summary from the event logs, write it and the report, and return it.

    Raises DemoFailed, after all is written, when the job has not succeeded.
    """
    settings = on.settings
    summary = summarize(settings.out)
    summary["kubernetes"] = {"version": on.cluster.version}
    summary["job"]["phase"] = job.state
    summary["adapter"] = {"path": job.adapter_path}
    summary["objective"] = objective.told(settings.factor)
    summary["environment"] = on.environment
    cores = usable_cores()
    summary["disturbances"] = disturbances(
        on.before,
        MachineSample.take(cores),
        Events.read(settings.out / DEDICATED).tasklets,
        cores=len(cores),
        oversubscribed=on.devices[0].oversubscribed,
        ranks=settings.tp,
    )
    summary["run"] = {
        "seconds": settings.seconds,
        "rate": on.rate,
        "seed": settings.seed,
        "policy": settings.policy,
        "engine": "builtin" if settings.sglang is None else "sglang",
        "trace": str(settings.trace) if settings.trace else None,
        "pods": len(on.devices),
        "ranks": settings.tp,
    }
    write_summary(settings.out / "summary.json", summary)
    adapter = ("Adapter", adapter_path(summary))
    write_report(settings.out, summary, [*rows_of(summary), adapter])
    if job.state != "Succeeded":
        raise DemoFailed(f"the job is {job.state}: {job.message}; logs: {on.log_dir}")
    return summary


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write a summary as indented JSON."""
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
