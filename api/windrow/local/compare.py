"""The same load, shared in different ways, in rounds: what each way costs serving, and gives.

Each round plays every arm once, in an order drawn anew, with the same requests and the same
objective; `windrow.local.arms` has the arms, `windrow.local.paired` how rounds become a verdict.
Pods and trainers stay up through all rounds: those that are not at their turn serve nothing, are
paused by the policy's limit (`PAUSED`) or stopped (SIGSTOP). A run that is broken off goes on with
the rounds that are missing when it is started again on the same folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from windrow.crd import HarvestPolicySpec
from windrow.errors import UserError
from windrow.eventlog import FLUSH_INTERVAL_S
from windrow.local import demo, footing, generator, manifests, measure, serving, verdict
from windrow.local.arms import (
    A_LOOP_A_CORE,
    AGAIN,
    ALONE,
    DEDICATED,
    DEDICATED_PEFT,
    HARVESTED_JOB,
    IDLE,
    NAIVE,
    SEGMENTS,
    SESSION,
    TRAINERS,
    TUNED,
    Arm,
    ComparisonSession,
    Segment,
    arms_of,
    folder_of,
)
from windrow.local.devices import Device
from windrow.local.environment import environment
from windrow.local.frontier import write_page
from windrow.local.objective import Objective
from windrow.local.paired import DECIDING_ROUNDS, FEWEST_ROUNDS, order_of

# libgomp spins 300,000 rounds before it sleeps when nothing is set; the engine asks for sleep, so
# the naive arm sets decode back to what a plain server would have.
SPINNING = (("GOMP_SPINCOUNT", "300000"),)
PLAN, RESULT, FOOTING = "plan.json", "compare.json", "footing.json"
# From a turn's begin until its first request: the load client's own start.
CLIENT_STARTS_S = 1.2
# After the window: decode and trainer go on for so long, so that nothing in it is cut short.
TAIL_S = 0.3
CANCELS_S = 0.3  # requests that were hung up on leave the engine
STEP_WITHIN = timedelta(seconds=90)
LOAD_ENDS = timedelta(seconds=15)
WITHOUT_END = 1_000_000
# Percent of the cores that the job may have. Of a device with fewer than a hundred, 1% is none: the
# job keeps its slot and its worker, and waits. (A policy that only observes would take both away.)
RUNS, PAUSED = 100, 1
JOB = "compared"


@dataclass(frozen=True)
class CompareSettings:
    """How it is compared.

    Attributes:
        rounds: that are played in all; six are the fewest that name a winner.
        lead_s: of each turn, before its window: batch and trainer come into their stride.
        window_s: what is counted.
        arms: names; empty: all. Alone and dedicated play in any case.
        factors: objectives, in median solo steps; empty: the demo's own. Each policy plays once for
            each; what knows no objective plays once for all of them.
        footing: file that keeps what every comparison on this machine stands on
            (`windrow.local.footing`); None: in the run's folder.
    """

    rounds: int = DECIDING_ROUNDS
    lead_s: float = 2.0
    window_s: float = 8.0
    arms: tuple[str, ...] = ()
    factors: tuple[float, ...] = ()
    footing: Path | None = None

    def check(self) -> None:
        """Refuse too few rounds, windows that hold nothing and unknown arms; raises UserError."""
        self.chosen()
        if self.rounds < FEWEST_ROUNDS:
            raise UserError(
                f"{self.rounds} rounds tell nothing apart",
                field="--rounds",
                remedy=f"Play {FEWEST_ROUNDS} or more; {DECIDING_ROUNDS} can name a winner.",
            )
        if self.window_s < 2 or self.lead_s < 0:
            raise UserError(
                f"a window of {self.window_s:g} s is too short",
                field="--segment",
                remedy="Count for 2 s or more; 8 s hold a thousand decode steps.",
            )

    def chosen(self) -> list[Arm]:
        """Return the arms that play; raises UserError for one that is not known."""
        arms = arms_of(policies())
        unknown = sorted(set(self.arms) - {arm.name for arm in arms})
        if unknown:
            raise UserError(
                f"no arm {', '.join(unknown)}",
                field="--arms",
                remedy=f"Choose from: {', '.join(arm.name for arm in arms)}.",
            )
        always = (ALONE, AGAIN, DEDICATED, DEDICATED_PEFT)
        if not self.arms:
            return [arm for arm in arms if arm.name != A_LOOP_A_CORE]
        return [arm for arm in arms if arm.name in (*self.arms, *always)]


def policies() -> list[str]:
    """Return the names of the policies that a HarvestPolicy can choose."""
    return list(get_args(HarvestPolicySpec.model_fields["policy"].annotation))


def run(settings: demo.DemoSettings, how: CompareSettings, console: Console) -> list[Path]:
    """Play what is missing, write pages and JSON, print tables; return the JSON of each objective.

    Of several objectives each has a folder of its own. Raises as `demo.run` does, and
    verdict.Impossible, after all is written, where an arm has trained faster than the dedicated
    device: then the reference is wrong.
    """
    if settings.pods not in (None, 1):
        raise UserError("a comparison has one device", field="--pods", remedy="Leave it out.")
    out = settings.out
    seconds = how.lead_s + how.window_s + TAIL_S
    settings = replace(settings, seconds=seconds, pods=1)
    how = replace(how, factors=how.factors or (settings.factor,))
    arms, factors = how.chosen(), how.factors
    turns = [(arm.name, factor) for arm, factor in _turns(arms, factors)]
    sessions = ComparisonSession.all_of(out)
    done = {at.round for session in sessions for at in session.whole(turns).segments}
    if missing := [n for n in range(how.rounds) if n not in done]:
        session = out / f"{SESSION}{len(sessions) + 1}"
        with demo.stage(replace(settings, out=session), console) as on:
            plan = _plan(out, on, settings, how)
            with Contest(on, plan, arms, session) as contest:
                contest.play(missing, how)
    plan, results = _plan_of(out), {}
    sessions = [session.whole(turns) for session in ComparisonSession.all_of(out)]
    for factor in factors:
        place = out if len(factors) == 1 else out / f"x{factor:g}"
        place.mkdir(exist_ok=True)
        objective = next(at for at in plan["objectives"] if at["factor"] == factor)
        common = {name: value for name, value in plan.items() if name != "objectives"}
        of_it = [session.at(factor) for session in sessions]
        result = verdict.result_of({**common, "objective": objective}, of_it, arms, how.rounds)
        demo.write_summary(place / RESULT, result)
        write_page(place, result, of_it)
        console.print(verdict.table(result))
        console.print(verdict.sentence(result))
        results[place / RESULT] = result
    for result in results.values():
        verdict.check(result)
    return list(results)


def _turns(arms: Sequence[Arm], factors: Iterable[float]) -> list[tuple[Arm, float]]:
    """Return who plays in a round: each policy once for each objective, each other arm once (0)."""
    return [
        (arm, factor) for arm in arms for factor in (factors if arm.kind == "policy" else (0.0,))
    ]


def _name_of(arm: Arm, factor: float) -> str:
    """Return the name of a turn."""
    return f"{arm.name} x{factor:g}" if factor else arm.name


def _plan_of(out: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((out / PLAN).read_text(encoding="utf-8"))
    return plan


def _plan(
    out: Path, on: demo.DemoStage, settings: demo.DemoSettings, how: CompareSettings
) -> dict[str, Any]:
    """Return what all rounds have in common: as it was settled before, else settled now."""
    path = out / PLAN
    asked = {
        "trace": settings.trace.name if settings.trace else None,
        "like": generator.NAMES[settings.like],
        "rate": settings.rate,
        "seed": settings.seed,
        "factors": [*how.factors],
        "objective_ms": settings.objective_ms,
        "lead_s": how.lead_s,
        "window_s": how.window_s,
    }
    if path.exists():
        plan = _plan_of(out)
        if plan["asked"] != asked:
            raise UserError(
                f"{out} holds rounds of another comparison: {plan['asked']}",
                field="--out",
                remedy="Ask for the same as then, or name a new folder.",
            )
        on.rate = plan["rate"]
        return plan
    pods = demo.serve(on)
    objective = demo.settle_objective(on, pods)
    kept = how.footing or out / FOOTING
    if not kept.exists():
        demo.write_summary(kept, _take_footing(on, pods, objective.milliseconds))
    serving.delete(on.client, pods, demo.PODS_WITHIN)
    stands_on = json.loads(kept.read_text())
    plan = {
        "asked": asked,
        "rate": on.rate,
        "requests": len(on.schedule_of_a_device(on.rate)),
        "objectives": [_told(objective, settings, factor) for factor in how.factors],
        "footing": stands_on,
        "kv_tokens": {
            kind: footing.kv_tokens(stands_on["memory"][kind], on.model)
            for kind in ("alone", "loop", "policy")
        },
        "environment": environment(),
    }
    demo.write_summary(path, plan)
    return plan


def _told(objective: Objective, settings: demo.DemoSettings, factor: float) -> dict[str, Any]:
    """Return one of a plan's objectives; one that was asked for in milliseconds is the only one."""
    wanted = objective if settings.objective_ms is not None else objective.times(factor)
    return {
        "factor": factor,
        "milliseconds": wanted.milliseconds,
        "rule": f"{factor:g} x the median solo step at the load's p90 batch, "
        "at the pace of live steps",
        "pace": round(objective.pace, 3),
        "solo_step_ms": round(objective.solo_ms, 3),
        "p90_batch": objective.shape.p90_batch,
        "predicted_mean_batch": round(objective.shape.mean_batch, 2),
    }


def _take_footing(on: demo.DemoStage, pods: serving.Pods, objective_ms: float) -> dict[str, Any]:
    """Measure what all arms stand on, with the pods that the objective was settled with."""
    folder = on.settings.out / "footing"
    serving.await_observed(on.client, pods, demo.PODS_WITHIN)
    on.client.apply_policy(manifests.harvest_policy(demo.POLICY, objective_ms, "windrow"))
    serving.await_slots(on.client, pods, demo.PODS_WITHIN)
    on.say("what our worker holds of its own")
    held = footing.worker_bytes(on, pods, endless_job(on, folder / "adapter", "measured"))
    found = footing.take(on, folder, endless_job(on, folder / "loop", "loop"))
    return {
        **found,
        "worker_bytes": held,
        "memory": footing.memory(found["loop_bytes"], held),
    }


class Contest:
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
        self._harvested = any(arm.kind == "policy" for arm in arms)
        self._ends = ExitStack()

    def __enter__(self) -> Contest:
        """Start everything, and halt it."""
        on = self._on
        if self._harvested:
            self._start_harvested()
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

    def play(self, rounds: Sequence[int], how: CompareSettings) -> None:
        """Play rounds, then let every trainer finish the step that it is in."""
        turns = {
            _name_of(arm, factor): (arm, factor)
            for arm, factor in _turns(self._arms, self._objectives_ms)
        }
        for n in rounds:
            order = order_of(
                list(turns), first=[ALONE], last=[AGAIN], seed=self._on.settings.seed, round_=n
            )
            for i, name in enumerate(order):
                self._on.say(f"round {n + 1} of {how.rounds}: {name} ({i + 1} of {len(order)})")
                self._note(self._turn(*turns[name], n, how))
        for trainer in (one for of in self._trainers.values() for one in of):
            trainer.finish_step(STEP_WITHIN)
        if self._harvested:
            self._let("windrow", RUNS)
            self._await_steps(1)
        time.sleep(2 * FLUSH_INTERVAL_S)

    def _turn(self, arm: Arm, factor: float, n: int, how: CompareSettings) -> Segment:
        """Play one arm: load and trainer begin, the window passes, both end."""
        self._factor = factor or self._factor
        begin_ns = time.monotonic_ns()
        load_ns = begin_ns + round(CLIENT_STARTS_S * 1e9)
        window = (
            load_ns + round(how.lead_s * 1e9),
            load_ns + round((how.lead_s + how.window_s) * 1e9),
        )
        load = None
        if pod := _pod_of(arm):
            folder = self._folder / "loads" / f"{n}-{folder_of(_name_of(arm, factor))}"
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
            self._let(arm.policy, RUNS)
        for trainer in self._trainers.get(arm.name, ()):
            trainer.go()
        time.sleep(max(0.0, window[1] / 1e9 + TAIL_S - time.monotonic()))
        if arm.kind == "policy":
            self._let(arm.policy, PAUSED)
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

    def _start_harvested(self) -> None:
        """Start the injected pod and the job, and pause it once it is under way."""
        on = self._on
        pods = serving.plan_pods(
            on.devices, on.model, name=HARVESTED, arena_bytes=self._arena_of(HARVESTED)
        )
        serving.observe(on.client, pods, demo.POLICY, "windrow", demo.PODS_WITHIN)
        on.say("the harvested pod starts")
        serving.create(on.client, pods)
        serving.await_ready(on.client, pods, demo.PODS_WITHIN)
        serving.await_observed(on.client, pods, demo.PODS_WITHIN)
        self._let("windrow", RUNS)
        serving.await_slots(on.client, pods, demo.PODS_WITHIN)
        on.say("the job starts")
        on.client.submit(endless_job(on, self._folder / "adapter", JOB))
        self._await_steps(2)
        self._let("windrow", PAUSED)
        self._pods[HARVESTED] = pods

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

    def _let(self, policy: str, percent: int) -> None:
        """Let a policy give the job so much of the device."""
        objective_ms = self._objectives_ms[self._factor]
        self._on.client.apply_policy(
            manifests.harvest_policy(demo.POLICY, objective_ms, policy, max_sm_percent=percent)
        )

    def _await_steps(self, more: int) -> None:
        """Return once the job has finished so many optimizer steps more."""
        read = self._on.client.get
        before = read(JOB).step
        found = serving.poll(
            lambda: read(JOB), lambda job: job.step >= before + more or job.finished, STEP_WITHIN
        )
        if found.step < before + more:
            raise serving.NotReady(
                f"the job makes no step: {found.state} {found.message}",
                logs=[*self._pods[HARVESTED].logs, "operator"] if self._pods else ["operator"],
            )


HARVESTED, PLAIN, SPINS, BESIDE = "harvested", "plain", "spinning", "beside"
FORMS = {
    NAIVE: measure.LoopForm(passive=False),
    TUNED: measure.LoopForm(nice=19),
    IDLE: measure.LoopForm(idle_class=True),
    A_LOOP_A_CORE: measure.LoopForm(idle_class=True),
}
KIND_OF_POD = {HARVESTED: "policy", PLAIN: "alone", SPINS: "loop", BESIDE: "loop"}


def _pod_of(arm: Arm) -> str:
    """Return the name of the pod that serves in an arm; nothing where nobody serves."""
    match arm.kind:
        case "alone":
            return PLAIN
        case "loop":
            return SPINS if arm.name == NAIVE else BESIDE
        case "policy":
            return HARVESTED
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
