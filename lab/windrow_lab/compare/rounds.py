"""Play the arms of a comparison in turns: the pods and trainers of all of them, on one device.

Pods and trainers stay up through all rounds: those that are not at their turn serve nothing, are
paused by the policy's limit (`PAUSED`) or stopped (SIGSTOP).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from windrow.eventlog import FLUSH_INTERVAL_S
from windrow_lab.cluster import manifests, serving
from windrow_lab.compare.arms import (
    A_LOOP_A_CORE,
    AGAIN,
    ALONE,
    DEDICATED,
    HARVESTED_JOB,
    IDLE,
    NAIVE,
    SEGMENTS,
    TRAINERS,
    TUNED,
    Arm,
    Place,
    Segment,
    folder_of,
)
from windrow_lab.demo import measure
from windrow_lab.demo import run as demo
from windrow_lab.figures.paired import order_of
from windrow_lab.machine.devices import Device
from windrow_lab.machine.pace import SLOWER, MachinePace

# libgomp spins 300,000 rounds before it sleeps when nothing is set; the engine asks for sleep, so
# the naive arm sets decode back to what a plain server would have.
SPINNING = (("GOMP_SPINCOUNT", "300000"),)
# From a turn's begin until its first request: the load client's own start.
CLIENT_STARTS_S = 1.2
# After the window: decode and trainer go on for so long, so that nothing in it is cut short.
TAIL_S = 0.3
CANCELS_S = 0.3  # requests that were hung up on leave the engine
# A turn counts where the machine was as fast as usual before it and after it; else it is played
# again. The same for every arm, and blind to what the arm did.
AGAIN_AT_MOST = 2
PACE_WITHIN_S = 20.0
STEP_WITHIN = timedelta(seconds=90)
LOAD_ENDS = timedelta(seconds=15)
WITHOUT_END = 1_000_000
# Percent of the cores that the job may have. Of a device with fewer than a hundred, 1% is none: the
# job keeps its slot and its worker, and waits. (A policy that only observes would take both away.)
RUNS, PAUSED = 100, 1


class RoundPlayer:
    """Pods and trainers of all arms, and their turns. A context manager: all of it ends with it."""

    def __init__(
        self, on: demo.DemoStage, plan: dict[str, Any], arms: Sequence[Arm], folder: Path
    ) -> None:
        self._on, self._plan, self._arms, self._folder = on, plan, arms, folder
        self._objectives_ms: dict[float, float] = {
            at["factor"]: at["milliseconds"] for at in plan["objectives"]
        }
        self._factor = next(iter(self._objectives_ms))  # of the objective that is in force
        self._pods: dict[str, serving.Pods] = {}  # by the name of the arms' pod
        self._trainers: dict[str, list[measure.Trainer]] = {}
        self._pace = MachinePace(on.devices[0].cores)
        self._places = list(dict.fromkeys(arm.place for arm in arms if arm.kind == "policy"))
        self._ends = ExitStack()

    def __enter__(self) -> RoundPlayer:
        """Start everything, and halt it."""
        on = self._on
        for place in self._places:
            self._start_harvested(place)
        for arm in self._arms:
            name = _pod_of(arm)
            if name and name not in self._pods:
                self._start_pod(name)
        for arm in self._arms:
            if arm.kind in ("loop", "dedicated"):
                on.say(f"the trainer of {arm.name} loads")
                self._trainers[arm.name] = trainers = []
                for n in range(len(on.devices[0].cores) if arm.name == A_LOOP_A_CORE else 1):
                    trainers.append(trainer := self._start_trainer(arm, n))
                    self._ends.callback(trainer.end)
                    trainer.finish_step(STEP_WITHIN)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def play(self, rounds: Sequence[int], of: int) -> None:
        """Play some of so many rounds, then let every trainer finish the step that it is in."""
        turns = {
            _name_of(arm, factor): (arm, factor)
            for arm, factor in turns_of(self._arms, self._objectives_ms)
        }
        usual_us = self._plan["footing"]["pass_us"]
        for n in rounds:
            order = order_of(
                list(turns), first=[ALONE], last=[AGAIN], seed=self._on.settings.seed, round_=n
            )
            for i, name in enumerate(order):
                told = f"round {n + 1} of {of}: {name} ({i + 1} of {len(order)})"
                for left in range(AGAIN_AT_MOST, -1, -1):
                    slower = [self._await_pace(told, usual_us)]
                    self._on.say(told)
                    turn = self._turn(*turns[name], n)
                    slower.append(self._pace.now_us() / usual_us)
                    counts = max(slower) <= SLOWER or not left
                    self._note(replace(turn, slower=max(slower), counts=counts))
                    if counts:
                        break
                    told = f"{told}, again: the machine was slower"
        for trainer in (one for of in self._trainers.values() for one in of):
            trainer.finish_step(STEP_WITHIN)
        for place in self._places:
            self._let(place, _ANY_POLICY[place], RUNS)
            self._await_steps(place, 1)
            self._let(place, _ANY_POLICY[place], PAUSED)
        time.sleep(2 * FLUSH_INTERVAL_S)

    def _await_pace(self, told: str, usual_us: float) -> float:
        """Wait for a moment in which the machine is as fast as usual; return how slow it is."""
        end = time.monotonic() + PACE_WITHIN_S
        while (slower := self._pace.now_us() / usual_us) > SLOWER and time.monotonic() < end:
            self._on.say(f"{told}: waits, the machine is slower than usual")
            time.sleep(0.5)
        return slower

    def _turn(self, arm: Arm, factor: float, n: int) -> Segment:
        """Play one arm: load and trainer begin, the window passes, both end."""
        self._factor = factor or self._factor
        begin_ns = time.monotonic_ns()
        load_ns = begin_ns + round(CLIENT_STARTS_S * 1e9)
        lead_ns, counted_ns = (
            round(1e9 * self._plan["asked"][name]) for name in ("lead_s", "window_s")
        )
        window = (load_ns + lead_ns, load_ns + lead_ns + counted_ns)
        load = None
        if pod := _pod_of(arm):
            folder = self._folder / "loads" / f"{n}-{folder_of(_name_of(arm, factor))}"
            shutil.rmtree(folder, ignore_errors=True)  # of the turn that this one replaces
            folder.mkdir(parents=True)
            load = measure.Load.start(
                self._on.keeper,
                self._on.load_plan,
                self._pods[pod].endpoints,
                folder,
                begin_ns=load_ns,
                cut=True,
            )
        if arm.kind == "policy":
            self._let(arm.place, arm.policy, RUNS)
        for trainer in self._trainers.get(arm.name, ()):
            trainer.go()
        time.sleep(max(0.0, window[1] / 1e9 + TAIL_S - time.monotonic()))
        if arm.kind == "policy":
            self._let(arm.place, arm.policy, PAUSED)
        for trainer in self._trainers.get(arm.name, ()):
            trainer.halt()
        end_ns = time.monotonic_ns()
        if load is not None:
            load.await_end(drain_within=LOAD_ENDS)
            time.sleep(CANCELS_S)
        return Segment(
            round=n,
            arm=arm.name,
            source=_pod_of(arm),
            trainer=_trainer_of(arm),
            active_ns=(begin_ns, end_ns),
            window_ns=window,
            factor=factor,
        )

    def _note(self, segment: Segment) -> None:
        with (self._folder / SEGMENTS).open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(segment)) + "\n")

    def _start_harvested(self, place: Place) -> None:
        """Start an injected pod and its job, and pause it once it is under way.

        Pods of each place have a label and a policy of their own, which their job names.
        """
        on, name, policy = self._on, HARVESTED[place], _ANY_POLICY[place]
        self._pods[name] = pods = serving.plan_pods(
            on.devices,
            on.model,
            name=name,
            arena_bytes=self._arena_of(name),
            finetune=place,
            app=name,
        )
        serving.observe(on.client, pods, name, policy, demo.PODS_WITHIN)
        on.say(f"the pod {name} starts")
        serving.create(on.client, pods)
        serving.await_ready(on.client, pods, demo.PODS_WITHIN)
        serving.await_observed(on.client, pods, demo.PODS_WITHIN)
        self._let(place, policy, RUNS)
        serving.await_slots(on.client, pods, demo.PODS_WITHIN)
        on.say(f"the job of {name} starts")
        job = endless_job(on, self._folder / "adapters" / name, name)
        job["spec"]["policies"] = [name]
        on.client.submit(job)
        self._await_steps(place, 2)
        self._let(place, policy, PAUSED)

    def _start_pod(self, name: str) -> None:
        on = self._on
        pods = serving.plan_pods(
            on.devices,
            on.model,
            name=name,
            inject=False,
            environment=SPINNING if name == SPINS else (),
            arena_bytes=self._arena_of(name),
        )
        on.say(f"the pod {name} starts")
        serving.create(on.client, pods)
        serving.await_ready(on.client, pods, demo.PODS_WITHIN)
        self._pods[name] = pods

    def _start_trainer(self, arm: Arm, n: int) -> measure.Trainer:
        """Start an arm's n-th trainer: of a loop a core, that of the n-th core."""
        on, device = self._on, self._on.devices[0]
        slug = folder_of(arm.name)
        folder = self._folder / TRAINERS / slug / str(n)
        if arm.name == A_LOOP_A_CORE:
            device = Device((device.cores[n],))
        job = endless_job(on, folder / "adapter", slug)
        if arm.name == DEDICATED:
            return measure.own_worker(on.keeper, job, device, folder)
        return measure.plain_loop(on.keeper, job, device, folder, self._form_of(arm))

    def _form_of(self, arm: Arm) -> measure.LoopForm:
        best = self._plan["footing"]["peft_best_form"]
        return FORMS[arm.name] if arm.kind == "loop" else measure.LoopForm(**best)

    def _arena_of(self, pod: str) -> int:
        """Return what decode has of the device's memory beside what the trainer holds of it."""
        return int(self._plan["footing"]["memory"][KIND_OF_POD[pod]])

    def _let(self, place: Place, policy: str, percent: int) -> None:
        """Let a policy give the job of a place so much of the device."""
        name, objective_ms = HARVESTED[place], self._objectives_ms[self._factor]
        self._on.client.apply_policy(
            manifests.harvest_policy(name, objective_ms, policy, max_sm_percent=percent, app=name)
        )

    def _await_steps(self, place: Place, more: int) -> None:
        """Return once the job of a place has finished so many optimizer steps more."""
        read, name = self._on.client.get, HARVESTED[place]
        before = read(name).step
        found = serving.poll(
            lambda: read(name), lambda job: job.step >= before + more or job.finished, STEP_WITHIN
        )
        if found.step < before + more:
            raise serving.NotReady(
                f"the job {name} makes no step: {found.state} {found.message}",
                logs=[*self._pods[name].logs, "operator"],
            )


# Name of a place's pod, policy, label and job.
HARVESTED: dict[Place, str] = {
    "process": "harvested",
    "in-engine": "harvested-in-engine",
    "fused": "harvested-fused",
}
# Under which a job of the place makes its first steps, and its last.
_ANY_POLICY: dict[Place, str] = {
    "process": "windrow",
    "in-engine": "temporal",
    "fused": "flexllm",
}
PLAIN, SPINS, BESIDE = "plain", "spinning", "beside"
FORMS = {
    NAIVE: measure.LoopForm(passive=False),
    TUNED: measure.LoopForm(nice=19),
    IDLE: measure.LoopForm(idle_class=True),
    A_LOOP_A_CORE: measure.LoopForm(idle_class=True),
}
KIND_OF_POD = {
    **dict.fromkeys(HARVESTED.values(), "policy"),
    PLAIN: "alone",
    SPINS: "loop",
    BESIDE: "loop",
}


def _pod_of(arm: Arm) -> str:
    """Return the name of the pod that serves in an arm; nothing where nobody serves."""
    match arm.kind:
        case "alone":
            return PLAIN
        case "loop":
            return SPINS if arm.name == NAIVE else BESIDE
        case "policy":
            return HARVESTED[arm.place]
        case "dedicated":
            return ""


def _trainer_of(arm: Arm) -> str:
    """Return whose tasklets are an arm's; nothing where nobody trains."""
    match arm.kind:
        case "alone":
            return ""
        case "policy":
            return HARVESTED_JOB
        case "loop" | "dedicated":
            return arm.name


def endless_job(on: demo.DemoStage, destination: Path, name: str) -> dict[str, Any]:
    """Return the run's job without end, evaluation and checkpoints: training, and nothing else."""
    job = manifests.finetune_job(
        on.example,
        model=on.model,
        rows=on.rows,
        destination=destination,
        steps=WITHOUT_END,
        name=name,
    )
    job["spec"]["dataset"]["evalFraction"] = 0
    job["spec"]["checkpoint"] = {"everySteps": WITHOUT_END, "keep": 1}
    return job


def turns_of(arms: Sequence[Arm], factors: Iterable[float]) -> list[tuple[Arm, float]]:
    """Return who plays in a round: each policy once for each objective, each other arm once (0)."""
    return [
        (arm, factor) for arm in arms for factor in (factors if arm.kind == "policy" else (0.0,))
    ]


def _name_of(arm: Arm, factor: float) -> str:
    """Return the name of a turn."""
    return f"{arm.name} x{factor:g}" if factor else arm.name
