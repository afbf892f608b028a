"""Rows and plot of first light, from its parts alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Baseline, Result
from benchmarks.light.bounds import Roofline
from benchmarks.light.measure import Document, MeasureEffort, Parts

ARMS = ("naive", "gaps", "windrow")
# An arm has one color in both plots.
COLORS = {"alone": "#444444", "naive": "#d62728", "gaps": "#ff9f0e", "windrow": "#1f77b4"}
COLORS |= {"objective": "#999999", "spatial bound": "#2ca02c", "temporal bound": "#9467bd"}
SPATIAL_GOAL = 0.9  # of the spatial bound
PROFILE_GOAL_S = 60.0


@dataclass(frozen=True)
class ArmFigures:
    """One arm at one objective."""

    arm: str
    objective_ms: float
    eta: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    over_percent: float  # of the steps
    optimizer_steps: int  # that eta rests on; with fewer than two it is 0

    @classmethod
    def of(cls, arm: str, objective_ms: float, part: Document, dedicated: float) -> ArmFigures:
        """Return the figures from the files that an arm left; dedicated: tokens a second."""
        ms = sorted(latency / 1e3 for latency in part["latencies_us"])
        return cls(
            arm=arm,
            objective_ms=objective_ms,
            eta=part.get("tokens_per_second", 0.0) / dedicated if dedicated else 0.0,
            tpot_p50_ms=statistics.median(ms) if ms else 0.0,
            tpot_p99_ms=ms[int(0.99 * (len(ms) - 1))] if ms else 0.0,
            over_percent=100 * sum(m > objective_ms for m in ms) / len(ms) if ms else 0.0,
            optimizer_steps=part.get("optimizer_steps", 0),
        )


def arm_figures(parts: Parts, effort: MeasureEffort) -> list[ArmFigures]:
    """All arms at all objectives; `naive` and `alone` know of none and are judged by each.

    A GPU that is shared in time only has no arm `windrow`.
    """
    dedicated = parts["dedicated"]["tokens_per_second"]
    found = []
    for objective in effort.objectives_ms:
        for arm in ("alone", *ARMS):
            stage = arm if arm in ("alone", "naive") else f"{arm}-{objective:g}"
            if stage in parts:
                found.append(ArmFigures.of(arm, objective, parts[stage], dedicated))
    return found


def roofline(device: Document) -> Roofline | None:
    """Return a GPU's roofline, with the bandwidth measured in the run; None on the host."""
    if not device["copy_gb_s"]:
        return None
    return Roofline(
        copy_gb_s=device["copy_gb_s"],
        units=device["units"],
        unit_granularity=device["group_units"] or 1,
        weight_bytes=device["weight_bytes"],
        kv_token_bytes=device["kv_token_bytes"],
    )


def results(parts: Parts, effort: MeasureEffort) -> list[Result]:
    """Every figure. Goals are a GPU's: on the host none is held to one."""
    device = parts["device"]
    bounds = roofline(device)
    rows = [*_profile_rows(parts, goals=bounds is not None), *_start_rows(device)]
    rows.append(
        Result("dedicated worker", parts["dedicated"]["tokens_per_second"], "tokens/s", "higher")
    )
    if "beside-idle" in parts:
        rate = parts["beside-idle"]["tokens_per_second"]
        beside = Baseline("dedicated worker", parts["dedicated"]["tokens_per_second"])
        name = "worker on lent memory, decode idle"
        rows.append(Result(name, rate, "tokens/s", "higher", baseline=beside))
    for figures in arm_figures(parts, effort):
        rows += _arm_rows(figures)
        if bounds is not None and figures.arm == "windrow":
            rows += _bound_rows(figures, bounds, effort)
    return rows


def _start_rows(device: Document) -> list[Result]:
    rows = [Result("decode is loaded", device["ready_s"], "s", "lower")]
    if captures := device["captures"]:
        name = f"capture of {captures['graphs']} graphs"
        rows += [
            Result(f"{name}: time", captures["seconds"], "s", "lower"),
            Result(f"{name}: memory", captures["n_bytes"] / 2**20, "MiB", "lower"),
        ]
    if device["copy_gb_s"]:
        rows.append(Result("copy within the GPU", device["copy_gb_s"], "GB/s", "higher"))
    return rows


def _profile_rows(parts: Parts, *, goals: bool) -> list[Result]:
    solo = parts["solo"]
    corun = parts.get("corun", {"seconds": 0.0, "points": []})
    rows = [
        Result(
            "profile, solo and co-run",
            solo["seconds"] + corun["seconds"],
            "s",
            "lower",
            PROFILE_GOAL_S if goals else None,
        )
    ]
    alone: dict[tuple[int, int], float] = {}
    for point in solo["points"]:
        at = f"batch {point['batch']}, context {point['context']}, {point['units']} units"
        rows.append(Result(f"step alone: {at}", point["step_us"] / 1e3, "ms", "lower"))
        if point["units"] == parts["device"]["units"]:
            alone[point["batch"], point["context"]] = point["step_us"] / 1e3
    for point in corun["points"]:
        at = f"batch {point['batch']}, context {point['context']}"
        beside = Baseline("alone", alone[point["batch"], point["context"]])
        for name, key in (("p50", "step_us"), ("p99", "p99_us")):
            rows.append(
                Result(
                    f"step beside the worker on {point['units']} units, {name}: {at}",
                    point[key] / 1e3,
                    "ms",
                    "lower",
                    baseline=beside,
                )
            )
    return rows


def _arm_rows(figures: ArmFigures) -> list[Result]:
    at = f"{figures.arm} at {figures.objective_ms:g} ms"
    rows = [
        Result(f"{at}: TPOT p50", figures.tpot_p50_ms, "ms", "lower"),
        Result(f"{at}: TPOT p99", figures.tpot_p99_ms, "ms", "lower"),
        Result(f"{at}: steps over", figures.over_percent, "%", "lower"),
    ]
    if figures.arm != "alone":
        steps = Result(f"{at}: optimizer steps", figures.optimizer_steps, "steps", "higher")
        rows = [Result(f"{at}: eta", figures.eta, "of dedicated", "higher"), steps, *rows]
    return rows


def _bound_rows(figures: ArmFigures, bounds: Roofline, effort: MeasureEffort) -> list[Result]:
    at = f"windrow at {figures.objective_ms:g} ms"
    where = (effort.load_batch, effort.context, figures.objective_ms)
    rows = []
    if spatial := bounds.spatial(*where):
        rows.append(
            Result(
                f"{at}: share of the spatial bound",
                figures.eta / spatial,
                "of bound",
                "higher",
                SPATIAL_GOAL,
                baseline=Baseline("bound on eta", spatial),
            )
        )
    if temporal := bounds.temporal(*where):
        rows.append(
            Result(
                f"{at}: share of the temporal bound",
                figures.eta / temporal,
                "of bound",
                "higher",
                1.0,
                baseline=Baseline("bound on eta", temporal),
            )
        )
    return rows


def plot(parts: Parts, effort: MeasureEffort, title: str, to: Path) -> None:
    """Write a page with eta and p99 by objective, one color an arm, with the bounds on a GPU."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    page = make_subplots(rows=1, cols=2, subplot_titles=("eta", "TPOT p99, ms"))
    found = arm_figures(parts, effort)
    objectives = list(effort.objectives_ms)

    def line(
        name: str, column: int, values: Sequence[float], dash: str = "solid", *, again: bool = False
    ) -> None:
        style = {"dash": dash, "color": COLORS.get(name)}
        one = go.Scatter(
            x=objectives, y=values, name=name, legendgroup=name, line=style, showlegend=not again
        )
        page.add_trace(one, row=1, col=column)

    for arm in dict.fromkeys(f.arm for f in found):
        has_eta = arm != "alone"
        if has_eta:
            line(arm, 1, [f.eta for f in found if f.arm == arm])
        line(arm, 2, [f.tpot_p99_ms for f in found if f.arm == arm], again=has_eta)
    line("objective", 2, objectives, "dash")
    if bounds := roofline(parts["device"]):
        at = (effort.load_batch, effort.context)
        line("spatial bound", 1, [bounds.spatial(*at, s) for s in objectives], "dash")
        line("temporal bound", 1, [bounds.temporal(*at, s) for s in objectives], "dot")
    page.update_xaxes(title_text="objective, ms")
    page.update_layout(title=title, template="plotly_white", height=480)
    page.write_html(to, include_plotlyjs="inline")
