"""Figures as tables of text: for the screen, the page and the documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windrow_simulator.gpu_runs import GpuArm
from windrow_simulator.groups import GroupRow
from windrow_simulator.scenario import ALONE

BOUND_GOAL = 0.9  # of the spatial bound
_OF_HARVEST = {"eta", "eta_error", "gpu_hours", "dollars", "tokens"}
COLUMNS = (
    ("objective ms", "objective_ms", "{:g}"),
    ("eta", "eta", "{:.3f}"),
    ("± 95%", "eta_error", "{:.3f}"),
    ("GPU hours", "gpu_hours", "{:,.1f}"),
    ("$", "dollars", "{:,.0f}"),
    ("Mtokens", "tokens", "{:,.1f}"),
    ("TPOT p50 ms", "tpot_p50_ms", "{:.2f}"),
    ("p99 ms", "tpot_p99_ms", "{:.2f}"),
    ("over", "over", "{:.2%}"),
    ("TTFT p99 ms", "ttft_p99_ms", "{:,.0f}"),
    ("batch", "mean_batch", "{:.1f}"),
)


@dataclass(frozen=True, slots=True)
class TextTable:
    """Table of cells as text. `said`: the lines below it."""

    title: str
    head: list[str]
    rows: list[list[str]]
    said: str = ""

    def markdown(self) -> str:
        """Return it as documents have it."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_simulation(result: dict[str, Any]) -> TextTable:
    """Return the table of a simulation."""
    best = {(b["objective_ms"], b["policy"]) for b in result["best"]}
    return TextTable(
        title_of(result),
        ["policy", *(name for name, _, _ in COLUMNS)],
        [_cells(row, best) for row in result["results"]],
        f"* harvests most while the objective holds. {simulated_line(result)}",
    )


def _cells(row: dict[str, Any], best: set[tuple[float, str]]) -> list[str]:
    won = (row["objective_ms"], row["policy"]) in best
    shown = [f"{row['policy']} *" if won else str(row["policy"])]
    for _, name, form in COLUMNS:
        value = row[name]
        if value is None or (row["policy"] == ALONE and name in _OF_HARVEST):
            shown.append("-")
        else:
            shown.append(form.format(value / 1e6 if name == "tokens" else value))
    return shown


def title_of(result: dict[str, Any]) -> str:
    """Return what was simulated in one line."""
    s, g = result["settings"], result["ground"]
    load = f"{g['trace']}{', generated' if g['generated'] else ''}, {s['rate']:g} requests/s each"
    if s["batch"]:
        load = f"{s['batch']} requests of {s['context']} tokens at all times"
    return f"{s['gpus']:,} x {g['device']}, {g['model']}, {load}, {s['seconds']:g} s"


def best_line(result: dict[str, Any]) -> str:
    """Return which policy to take under which objective."""
    lines = [
        f"{b['objective_ms']:g} ms: {b['policy'] or 'no policy holds it'}" for b in result["best"]
    ]
    return "Most harvested while the objective holds: " + "; ".join(lines)


def simulated_line(result: dict[str, Any]) -> str:
    """Return how much of the cluster was simulated."""
    row = result["results"][0]
    if row["simulated"] == row["gpus"]:
        return "Every GPU was simulated step by step."
    return (
        f"{row['simulated']} of {row['gpus']:,} GPUs were simulated step by step, the others are "
        "like them: ± is half of the 95% interval that this leaves."
    )


def of_jobs(result: dict[str, Any]) -> TextTable:
    """Return what became of the jobs of a simulation, by priority."""
    rows = [
        [
            row["policy"],
            f"{row['objective_ms']:g}",
            of["priority"],
            *(form.format(of[name] / (1e6 if "token" in name else 1)) for _, name, form in _JOBS),
        ]
        for row in result["results"]
        if row["jobs"]
        for of in _priorities(row["jobs"])
    ]
    head = ["policy", "objective ms", "priority", *(title for title, _, _ in _JOBS)]
    return TextTable(
        "Jobs",
        head,
        rows,
        "Wait: mean time without a slot so far. Lost: what slots spent on stopping a job and "
        "loading it again while nobody trained.",
    )


_JOBS = (
    ("submitted", "submitted", "{:,.0f}"),
    ("ended", "ended", "{:,.0f}"),
    ("running", "running", "{:,.0f}"),
    ("waiting", "waiting", "{:,.0f}"),
    ("wait s", "wait_s", "{:,.0f}"),
    ("longest", "longest_wait_s", "{:,.0f}"),
    ("turnaround s", "turnaround_s", "{:,.0f}"),
    ("preempted", "preemptions", "{:,.0f}"),
    ("moved", "moves", "{:,.0f}"),
    ("lost s", "lost_s", "{:,.0f}"),
    ("lost Mtokens", "lost_tokens", "{:,.2f}"),
    ("Mtokens", "tokens", "{:,.1f}"),
)


def _priorities(jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a policy: each priority, and all where there are several."""
    several = len(jobs["by_priority"]) > 1
    return [*jobs["by_priority"], *([jobs["all"]] if several else [])]


def of_bounds(rows: Sequence[dict[str, Any]]) -> TextTable:
    """Return eta of every policy beside the roofline's bounds."""
    policies = list(rows[0]["eta"])
    table = [
        [
            str(row["batch"]),
            f"{row['objective_ms']:g}",
            f"{row['alone_ms']:.1f}",
            f"{row['temporal']:.2f}",
            f"{row['spatial']:.2f}",
            *(_eta(row, policy) for policy in policies),
            f"{row['eta']['windrow'] / row['spatial']:.2f}",
        ]
        for row in rows
    ]
    head = ["batch", "objective ms", "alone ms", "temporal bound", "spatial bound"]
    return TextTable(
        "Eta of a GPU with a constant batch of 1,024 tokens each",
        [*head, *policies, "windrow / bound"],
        table,
        "! more than 1% of the steps are over the objective",
    )


def of_limits(rows: Sequence[dict[str, Any]], policy: str = "windrow") -> TextTable:
    """Return what keeps a policy below the spatial bound, by factors whose product is its ratio."""
    near = sum(row["eta"][policy] >= BOUND_GOAL * row["spatial"] for row in rows)
    return TextTable(
        f"What {policy} stays below the spatial bound by",
        [
            *("batch", "objective ms", "spatial bound", "contention", "shares offered"),
            *(policy, f"{policy} / bound", "step ms", "on the next share"),
        ],
        [
            [
                str(row["batch"]),
                f"{row['objective_ms']:g}",
                f"{row['spatial']:.3f}",
                _factor(row["contended"], row["spatial"]),
                _factor(row["offered"], row["contended"]),
                _factor(row["eta"][policy], row["offered"]),
                f"{row['eta'][policy] / row['spatial']:.2f}",
                *(f"{row[name]:.2f}" if row[name] else "-" for name in ("step_ms", "next_ms")),
            ]
            for row in rows
        ],
        f"{policy} reaches {BOUND_GOAL:g} of the bound at {near} of {len(rows)} points. Step: on "
        "the largest share offered that meets the objective, contention counted, without noise. On "
        "the next share: the step if the worker had that one.",
    )


def _factor(part: float, whole: float) -> str:
    return f"x {part / whole:.2f}" if whole else "-"


def _eta(row: dict[str, Any], policy: str) -> str:
    return f"{row['eta'][policy]:.2f}{'!' if row['over'][policy] > 0.01 else ''}"


def of_papers(rows: Sequence[Any]) -> TextTable:
    """Return the published figures beside the simulated ones (`papers.PaperRow`)."""
    names = ("paper", "setup", "measure", "published", "simulated", "note")
    body = [[str(getattr(row, name)) for name in names] for row in rows]
    return TextTable("The papers' comparisons", list(names), body)


def of_groups(rows: Sequence[GroupRow]) -> TextTable:
    """Return what four GPUs harvest as slots of one, two and four (`groups.GroupRow`)."""
    body = [
        [
            row.gpu,
            row.model,
            f"{row.objective_ms:g}",
            row.policy,
            f"{row.ranks}",
            f"{row.free_gb:.0f}",
            f"{row.resident:.0%}",
            f"{row.exchange:.0%}",
            f"{row.step_ms:.2f}",
            f"{row.tokens_per_second / 1000:.1f}K",
            f"{row.gain:+.1%}" if row.ranks > 1 else "-",
            f"{row.over:.2%}",
        ]
        for row in rows
    ]
    head = ["GPU", "model", "objective ms", "policy", "GPUs a slot", "free GB"]
    head += [
        "room for frozen layers",
        "in all-reduces",
        "TPOT p50 ms",
        "tokens/s of 4 GPUs",
        "gained",
        "over",
    ]
    return TextTable("Slots over several GPUs", head, body)


def of_replay(result: dict[str, Any]) -> TextTable:
    """Return measured and simulated figures of a run (`replay.replay`)."""
    rows = [
        [
            row["name"],
            f"{row['measured']:.3f}",
            f"{row['simulated']:.3f}",
            f"{row['difference']:.1%}",
            f"{row['goal']:.0%}",
            "met" if row["met"] else "NOT MET",
        ]
        for row in result["compared"]
    ]
    rows += [
        [name, f"{both['measured']:.3f}", f"{both['simulated']:.3f}", "", "", ""]
        for name, both in result["besides"].items()
    ]
    return TextTable(
        f"{result['policy']} at {result['objective_ms']:g} ms: {result['steps']:,} steps of a run",
        ["figure", "measured", "simulated", "difference", "goal", ""],
        rows,
    )


def of_gpu_run(arms: Sequence[GpuArm], name: str) -> TextTable:
    """Return measured and simulated figures of a GPU's run (`gpu_runs.compare`)."""
    rows = [
        [
            arm.policy,
            f"{arm.objective_ms:g}",
            f"{arm.eta:.3f}",
            f"{arm.simulated_eta:.3f}",
            f"{arm.tpot_p50_ms:.2f}",
            f"{arm.simulated_tpot_p50_ms:.2f}",
            f"{arm.over:.2%}",
            f"{arm.simulated_over:.2%}",
        ]
        for arm in arms
    ]
    both = [f"{what}{said}" for what in ("eta", "TPOT p50 ms", "over") for said in ("", " sim.")]
    return TextTable(f"{name}: measured and simulated", ["policy", "objective ms", *both], rows)
