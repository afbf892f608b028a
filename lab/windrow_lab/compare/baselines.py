"""Measure what all arms of a comparison share: the dedicated rate, and each one's memory.

Taken once for a machine and job, before any load is played:

- how fast the machine is in quiet moments (`windrow_lab.machine.pace`);
- the best plain PEFT loop alone on the device, of a small set that is tried (`TRIED`);
- what a plain loop holds of its own (weights, activations, gradients, optimizer), and what our
  worker holds outside of the arena: its intermediates; frozen weights are decode's own.

Every arm has `device_bytes`. What its trainer holds comes out of decode's arena, as it would on a
device. They are so many that beside a plain loop decode keeps 60% of them, the share of Harli's
static mode; beside our worker it keeps what that leaves, and lends and takes back from it.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from windrow_lab.cluster import serving
from windrow_lab.cluster.manifests import NAMESPACE
from windrow_lab.compare.arms import TrainerProgress, folder_of
from windrow_lab.demo import measure
from windrow_lab.demo import run as demo
from windrow_lab.demo.measure import LoopForm
from windrow_lab.figures.summary import Events
from windrow_lab.machine.pace import MachinePace

DECODE_KEEPS = 0.6
TRIED: dict[str, LoopForm] = {
    "all cores, spinning": LoopForm(passive=False),
    "all cores, sleeping": LoopForm(),
    "all cores, checkpointing": LoopForm(passive=False, checkpointing=True),
    "one core": LoopForm(units=1),
}
# The arm beside decode that runs the plain loop.
BESIDE_DECODE = "all cores, sleeping"
TRIED_S = 6.0
FIRST_STEP = timedelta(seconds=120)
WATCHED_S = 6.0
SETTLED_S = 3.0  # a worker that still loads its libraries grows within so long
_MIB = 1 << 20
_WORKER = "windrow_sidecar.finetune.worker"
# It names them, and is none.
_FORK_SERVER = "windrow_sidecar.agent.fork_server"


def take(on: demo.DemoStage, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Measure it; `job` trains without end."""
    on.say("how fast the machine is")
    pass_us = MachinePace(on.devices[0].cores).usual_us()
    rates: dict[str, float] = {}
    held: dict[str, int] = {}
    for name, form in TRIED.items():
        on.say(f"a plain loop alone: {name}")
        trainer = measure.plain_loop(
            on.keeper, job, on.devices[0], at := folder / folder_of(name), form
        )
        try:
            trainer.finish_step(FIRST_STEP)
            begin_ns = time.monotonic_ns()
            trainer.go()
            time.sleep(TRIED_S)
            end_ns = time.monotonic_ns()
            trainer.finish_step(FIRST_STEP)
            held[name] = trainer.own_bytes()
        finally:
            trainer.end()
        last_ns = time.monotonic_ns()
        rates[name] = TrainerProgress(Events.read(at).tasklets, [(0, last_ns)]).rate(
            (begin_ns, end_ns)
        )
    best = max(rates, key=lambda name: rates[name])
    return {
        "pass_us": round(pass_us, 1),
        "peft_tokens_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "peft_best": best,
        "peft_best_form": asdict(TRIED[best]),
        "loop_bytes": held[BESIDE_DECODE],
    }


def worker_bytes(on: demo.DemoStage, pods: serving.Pods, job: dict[str, Any]) -> int:
    """Return the most that our worker holds of its own while decode is idle and lends it all.

    Anonymous memory beyond what it held before it got the job: arena and weights are shared.
    """
    name = job["metadata"]["name"]
    before = _standing_by(on, pods)
    on.client.submit(job)
    peaks: dict[int, int] = {}
    deadline = time.monotonic() + FIRST_STEP.total_seconds()
    until: float | None = None
    while until is None or time.monotonic() < until:
        for process in _workers(on):
            peaks[process.pid] = max(peaks.get(process.pid, 0), _anonymous(process))
        found = on.client.get(name)
        if until is None and found.step >= 1:
            until = time.monotonic() + WATCHED_S
        if until is None and (found.finished or time.monotonic() > deadline):
            raise serving.NotReady(
                f"the job makes no step: {found.state} {found.message}", logs=pods.logs
            )
        time.sleep(0.1)
    on.client.delete(name)
    serving.poll(
        lambda: {job.name for job in on.client.jobs(namespace=NAMESPACE)},
        lambda names: name not in names,
        FIRST_STEP,
    )
    return max(peak - before.get(pid, peak) for pid, peak in peaks.items())


def _standing_by(on: demo.DemoStage, pods: serving.Pods) -> dict[int, int]:
    """Return what each worker that waits for a job holds, once it has loaded all but that."""
    deadline = time.monotonic() + FIRST_STEP.total_seconds()
    before: dict[int, int] = {}
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        held = {process.pid: _anonymous(process) for process in _workers(on)}
        if held and held.keys() == before.keys():
            grown = [held[pid] - before[pid] for pid in held]
            if max(map(abs, grown)) < _MIB:
                return held
        before = held
    raise serving.NotReady("no worker waits for a job", logs=pods.logs)


def _workers(on: demo.DemoStage) -> list[psutil.Process]:
    """Return the worker processes of this run's pods, those that wait for a job included."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            ours = (
                _WORKER in words
                and _FORK_SERVER not in words
                and str(on.cluster.directory)
                in process.environ().get("WINDROW_RUN_DIR", "") + " ".join(words)
            )
        except psutil.Error:
            continue
        if ours:
            found.append(process)
    return found


def _anonymous(process: psutil.Process) -> int:
    try:
        return measure.status_bytes(process.pid, "RssAnon")
    except (OSError, serving.NotReady):
        return 0


def memory(loop_bytes: int, own_worker_bytes: int) -> dict[str, int]:
    """Return the device's bytes, and what of them decode's arena has in each kind of arm.

    Whole MiB.
    """
    device = loop_bytes / (1 - DECODE_KEEPS)
    parts = {
        "device": device,
        "alone": device,
        "loop": device - loop_bytes,
        "policy": device - own_worker_bytes,
    }
    return {name: int(n_bytes // _MIB) * _MIB for name, n_bytes in parts.items()}


def kv_tokens(arena_bytes: int, model: Path) -> int:
    """Return how many tokens of a model's KV an arena of the host holds (float32)."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(arena_bytes // (2 * config["num_hidden_layers"] * heads * head * 4))
