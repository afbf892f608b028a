"""The same load, shared in different ways: what naive sharing costs, and what Windrow keeps.

Arms, one after the other, each with the same requests and the same objective:

- alone: decode without any neighbour, before all others and once more after them, since a machine
  that has slow minutes and fast ones shows it there;
- naive: a plain PEFT loop beside decode, both on all cores, OpenMP as it comes;
- tuned naive: the same with sleeping OpenMP threads (OMP_WAIT_POLICY=passive) and nice 19;
- windrow: the FinetuneJob, harvested;
- dedicated: the worker alone on the whole device (the denominator of eta; no serving).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from windrow.eventlog import EventLog
from windrow.local import demo, measure, serving
from windrow.local.objective import Objective
from windrow.local.summary import (
    PODS,
    RUN_LOG,
    Events,
    throughput,
    window_of,
)
from windrow.local.summary import serving as serving_of

# libgomp spins 300,000 rounds before it sleeps when nothing is set; the engine asks for sleep, so
# the naive arm sets decode back to what a plain server would have.
SPINNING = (("GOMP_SPINCOUNT", "300000"),)
ARMS = "arms"
LOOP_ENDS = timedelta(seconds=240)  # it starts slowly where it is starved
ALONE, AGAIN, NAIVE, TUNED, WINDROW, DEDICATED = (
    "serving alone",
    "serving alone, again",
    "naive",
    "tuned naive",
    "windrow",
    "dedicated",
)


@dataclass(frozen=True)
class Arm:
    """The figures of one way of sharing; None: has no such figure."""

    name: str
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    steps: int | None
    share_over_objective: float | None
    requests_completed: int | None
    tokens_per_second: float | None
    eta: float | None


@dataclass(frozen=True)
class Column:
    """A column of the table, and which of two figures is the better one."""

    title: str
    field: str
    form: str
    smaller_is_better: bool

    def best(self, arms: Sequence[Arm]) -> set[str]:
        """Return the names of the arms that share serving and have the best figure.

        `serving alone` and `dedicated` do half of the work only: they are the bounds, not rivals.
        """
        rivals = {
            arm.name: value
            for arm in arms
            if arm.name in (NAIVE, TUNED, WINDROW)
            and (value := getattr(arm, self.field)) is not None
        }
        if not rivals:
            return set()
        best = (min if self.smaller_is_better else max)(rivals.values())
        return {name for name, value in rivals.items() if value == best}


COLUMNS = (
    Column("TPOT p50 ms", "tpot_p50_ms", ".1f", smaller_is_better=True),
    Column("TPOT p99 ms", "tpot_p99_ms", ".1f", smaller_is_better=True),
    Column("over objective", "share_over_objective", ".2%", smaller_is_better=True),
    Column("finetune tok/s", "tokens_per_second", ",.0f", smaller_is_better=False),
    Column("eta", "eta", ".2f", smaller_is_better=False),
)


def run(settings: demo.DemoSettings, console: Console) -> dict[str, Any]:
    """Run every arm, print the table, and return the Windrow arm's summary with `compare` added.

    Raises as `demo.run` does.
    """
    with demo.stage(settings, console) as on:
        pods = demo.serve(on)
        objective = demo.settle_objective(on, pods)
        # The injected pods stand idle meanwhile.
        before = _plain_arm(on, objective, ALONE)
        job = demo.harvest(on, pods, objective)
        after = [_plain_arm(on, objective, name) for name in (NAIVE, TUNED, AGAIN)]
    summary = demo.conclude(on, job, objective)
    rate = summary["harvest"]["dedicated_tokens_per_second"]
    alone = Arm(DEDICATED, None, None, None, None, None, rate, None)
    shared = [before, *after[:-1], _of_windrow(summary), after[-1]]
    arms = [with_eta(arm, rate) for arm in (*shared, alone)]
    summary["compare"] = [asdict(arm) for arm in arms]
    demo.write_summary(settings.out / "summary.json", summary)
    console.print(table(arms))
    return summary


def _plain_arm(on: demo.DemoStage, objective: Objective, name: str) -> Arm:
    """Serve the load without Windrow: by itself, or beside a plain loop on the first device."""
    settings = on.settings
    slug = name.replace(",", "").replace(" ", "-")
    folder = settings.out / ARMS / slug
    folder.mkdir(parents=True)
    pods = serving.plan_pods(
        on.devices, on.model, name=slug, inject=False, environment=SPINNING if name == NAIVE else ()
    )
    on.say(f"{name}: decode pods start")
    serving.create(on.client, pods)
    serving.await_ready(on.client, pods, demo.PODS_WITHIN)
    on.say(f"{name}: load for {settings.seconds:g} s")
    load = measure.Load.start(on.keeper, on.load_plan, pods.endpoints, folder)
    loop = None
    if name not in (ALONE, AGAIN):
        job = on.job(folder / "adapter", 1_000_000)
        loop = measure.start_baseline(
            on.keeper, job, on.devices[0], folder, settings.seconds, tuned=name == TUNED
        )
    log = EventLog(folder / RUN_LOG, source=name)
    load.finish(log, objective.milliseconds, drain_within=demo.DRAIN, cut=True)
    if loop is not None:
        measure.await_exit(loop, f"{name}: the loop", LOOP_ENDS, str(folder / "baseline.log"))
    serving.delete(on.client, pods, demo.PODS_WITHIN)
    return arm_of(settings.out, folder, name)


def arm_of(out: Path, folder: Path, name: str) -> Arm:
    """Return an arm's figures: its window of the pods' events, and those of its loop."""
    window = window_of(Events.read(folder).marks)
    served = serving_of(Events.read(out / PODS), window)
    loop = throughput(Events.read(folder).tasklets, window)
    return Arm(
        name=name,
        tpot_p50_ms=served.tpot_p50_ms,
        tpot_p99_ms=served.tpot_p99_ms,
        steps=served.steps,
        share_over_objective=served.share_over,
        requests_completed=served.requests_completed,
        tokens_per_second=loop.tokens_per_second if loop.tokens else None,
        eta=None,
    )


def _of_windrow(summary: dict[str, Any]) -> Arm:
    served = summary["serving"]
    return Arm(
        name=WINDROW,
        tpot_p50_ms=served["tpot_ms"]["p50"],
        tpot_p99_ms=served["tpot_ms"]["p99"],
        steps=served["steps"],
        share_over_objective=served["share_over_objective"],
        requests_completed=served["requests_completed"],
        tokens_per_second=summary["harvest"]["tokens_per_second"],
        eta=None,
    )


def with_eta(arm: Arm, dedicated: float) -> Arm:
    """Return the arm with its share of the dedicated rate."""
    if arm.tokens_per_second is None or not dedicated:
        return arm
    return replace(arm, eta=arm.tokens_per_second / dedicated)


def table(arms: Sequence[Arm]) -> Table:
    """Return the comparison; the best of those that do both jobs is marked, whoever it is."""
    shown = Table(title="The same load, shared in different ways", title_justify="left")
    shown.add_column("", style="bold")
    for column in COLUMNS:
        shown.add_column(column.title, justify="right")
    best = {column.field: column.best(arms) for column in COLUMNS}
    for arm in arms:
        cells = []
        for column in COLUMNS:
            value = getattr(arm, column.field)
            text = "-" if value is None else format(value, column.form)
            won = arm.name in best[column.field]
            cells.append(f"[bold green]{text} *[/]" if won else text)
        shown.add_row(arm.name, *cells)
    shown.caption = "* best of those that serve and finetune on the same device"
    return shown
