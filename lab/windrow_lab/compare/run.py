"""The same load, shared in different ways, in rounds: what each way costs serving, and gives.

Each round plays every arm once, in a new random order, with the same requests and the same
objective; `windrow_lab.compare.arms` has the arms, `windrow_lab.compare.rounds` plays them,
`windrow_lab.figures.paired` and `windrow_lab.compare.comparison_table` make of rounds who has won.
A run that is broken off goes on with the rounds that are missing when it is started again on the
same folder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from windrow.crd import HarvestPolicySpec
from windrow.errors import UserError
from windrow_lab.cluster import manifests, serving
from windrow_lab.compare import baselines, comparison_table
from windrow_lab.compare.arms import (
    AGAIN,
    ALONE,
    DEDICATED,
    DEDICATED_PEFT,
    ON_REQUEST,
    SESSION,
    Arm,
    ComparisonSession,
    arms_of,
)
from windrow_lab.compare.comparison_page import write_page
from windrow_lab.compare.rounds import TAIL_S, RoundPlayer, endless_job, turns_of
from windrow_lab.demo import run as demo
from windrow_lab.figures.paired import DECIDING_ROUNDS, FEWEST_ROUNDS
from windrow_lab.load import generator
from windrow_lab.load.objective import Objective
from windrow_lab.machine.environment import environment

PLAN, RESULT, FOOTING = "plan.json", "compare.json", "footing.json"


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison.

    Attributes:
        rounds: that are played in all; six are the fewest that name a winner.
        lead_s: of each turn, before its window: batch and trainer come into their stride.
        window_s: what is counted.
        arms: names; empty: all. Alone and dedicated play in any case.
        factors: objectives, in median solo steps; empty: the demo's own. Each policy plays once for
            each; what knows no objective plays once for all of them.
        footing: file that keeps the baselines of every comparison on this machine
            (`windrow_lab.compare.baselines`); None: in the run's folder.
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
            return [arm for arm in arms if arm.name not in ON_REQUEST]
        return [arm for arm in arms if arm.name in (*self.arms, *always)]


def policies() -> list[str]:
    """Return the names of the policies that a HarvestPolicy can choose."""
    return list(get_args(HarvestPolicySpec.model_fields["policy"].annotation))


def run(
    settings: demo.DemoSettings, how: CompareSettings, console: Console
) -> dict[Path, dict[str, Any]]:
    """Play what is missing, write pages and JSON, print tables; return each objective's result.

    By the result's file; of several objectives each has a folder of its own. Raises as
    `windrow_lab.demo.run.run` does. Whether a result can be true at all,
    `comparison_table.check` says.
    """
    if settings.pods not in (None, 1):
        raise UserError("a comparison has one device", field="--pods", remedy="Leave it out.")
    out = settings.out
    seconds = how.lead_s + how.window_s + TAIL_S
    settings = replace(settings, seconds=seconds, pods=1)
    how = replace(how, factors=how.factors or (settings.factor,))
    arms, factors = how.chosen(), how.factors
    turns = [(arm.name, factor) for arm, factor in turns_of(arms, factors)]
    sessions = ComparisonSession.all_of(out)
    done = {at.round for session in sessions for at in session.whole(turns).segments}
    if missing := [n for n in range(how.rounds) if n not in done]:
        session = out / f"{SESSION}{len(sessions) + 1}"
        with demo.stage(replace(settings, out=session), console) as on:
            plan = _plan(out, on, settings, how)
            with RoundPlayer(on, plan, arms, session) as player:
                player.play(missing, how.rounds)
    plan, results = _plan_of(out), {}
    sessions = [session.whole(turns) for session in ComparisonSession.all_of(out)]
    for factor in factors:
        place = out if len(factors) == 1 else out / f"x{factor:g}"
        place.mkdir(exist_ok=True)
        objective = next(at for at in plan["objectives"] if at["factor"] == factor)
        common = {name: value for name, value in plan.items() if name != "objectives"}
        of_it = [session.at(factor) for session in sessions]
        result = comparison_table.result_of(
            {**common, "objective": objective}, of_it, arms, how.rounds
        )
        demo.write_summary(place / RESULT, result)
        write_page(place, result, of_it)
        console.print(comparison_table.table(result))
        console.print(comparison_table.sentence(result))
        results[place / RESULT] = result
    return results


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
            kind: baselines.kv_tokens(stands_on["memory"][kind], on.model)
            for kind in ("alone", "loop", "policy")
        },
        "model": on.model.name,
        "environment": environment(),
    }
    demo.write_summary(path, plan)
    return plan


def _told(objective: Objective, settings: demo.DemoSettings, factor: float) -> dict[str, Any]:
    """Return one of a plan's objectives; one that was asked for in milliseconds is the only one."""
    wanted = objective if settings.objective_ms is not None else objective.times(factor)
    return {"factor": factor, "milliseconds": wanted.milliseconds, **objective.told(factor)}


def _take_footing(on: demo.DemoStage, pods: serving.Pods, objective_ms: float) -> dict[str, Any]:
    """Measure what all arms stand on, with the pods that the objective was settled with."""
    folder = on.settings.out / "footing"
    serving.await_observed(on.client, pods, demo.PODS_WITHIN)
    on.client.apply_policy(manifests.harvest_policy(demo.POLICY, objective_ms, "windrow"))
    serving.await_slots(on.client, pods, demo.PODS_WITHIN)
    on.say("what our worker holds of its own")
    held = baselines.worker_bytes(on, pods, endless_job(on, folder / "adapter", "measured"))
    found = baselines.take(on, folder, endless_job(on, folder / "loop", "loop"))
    return {
        **found,
        "worker_bytes": held,
        "memory": baselines.memory(found["loop_bytes"], held),
    }
