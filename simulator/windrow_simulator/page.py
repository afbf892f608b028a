"""The page of a simulation: one HTML file with its tables and plots, readable without a network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from windrow_simulator.figures import TIMELINE_S
from windrow_simulator.scenario import ALONE
from windrow_simulator.tables import best_line, of_simulation, simulated_line, title_of

_COLOURS = ("#2ca02c", "#1f77b4", "#9467bd", "#8c564b", "#ff9f1c", "#17becf", "#e377c2", "#7f7f7f")
_OBJECTIVE, _ALONE = "#d62728", "#999999"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Windrow: a simulation</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; color: #222 }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1.1rem; margin-top: 2rem }}
table {{ border-collapse: collapse }}
td, th {{ padding: .15rem 1.2rem .15rem 0; text-align: right }}
th {{ font-weight: 600; color: #555 }} td {{ font-variant-numeric: tabular-nums }}
td:first-child, th:first-child {{ text-align: left }}
</style></head><body>
<h1>{title}</h1>
<p>{said}</p>
<table>{table}</table>
<p>{best}</p>
<h2>Which policy, which objective; over time</h2>
{plots}
<p>{notes}</p>
</body></html>
"""


def write_page(path: Path, result: dict[str, Any]) -> Path:
    """Write the page of a simulation and return its path."""
    shown = of_simulation(result)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in shown.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in shown.rows
    )
    page = _PAGE.format(
        title=html.escape(title_of(result)),
        said=html.escape(f"{simulated_line(result)} Source of the device: {_source(result)}."),
        table=f"<tr>{head}</tr>{rows}",
        best=html.escape(best_line(result)),
        plots=_figure(result).to_html(full_html=False, include_plotlyjs="inline"),
        notes=html.escape(" ".join(result["ground"]["notes"])),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _source(result: dict[str, Any]) -> str:
    return str(result["ground"]["source"])


def _figure(result: dict[str, Any]) -> go.Figure:
    rows = result["results"]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colour = {
        p: _ALONE if p == ALONE else _COLOURS[i % len(_COLOURS)] for i, p in enumerate(policies)
    }
    middle = result["settings"]["objectives_ms"][0]
    plots = make_subplots(
        rows=5,
        cols=1,
        vertical_spacing=0.06,
        subplot_titles=(
            "Harvested share of a GPU (eta) against the objective, ms",
            "Frontier: eta against the share of steps over the objective, %",
            "TPOT, ms: p50 and p99 against the objective, ms",
            f"Harvested tokens a second and GPU, {middle:g} ms",
            f"Steps over the objective, %, {middle:g} ms",
        ),
    )
    for policy in policies:
        of = [row for row in rows if row["policy"] == policy]
        _add_policy(plots, policy, of, colour[policy])
        _add_time(plots, policy, of[0], colour[policy], result)
    objectives = result["settings"]["objectives_ms"]
    _add(plots, 3, list(objectives), list(objectives), "objective", _OBJECTIVE, dash="dash")
    plots.update_yaxes(rangemode="tozero")
    plots.update_layout(height=1500, template="plotly_white", margin={"t": 40, "l": 50, "r": 20})
    return plots


def _add_policy(plots: go.Figure, policy: str, rows: list[dict[str, Any]], colour: str) -> None:
    objectives = [row["objective_ms"] for row in rows]
    if policy != ALONE:
        error = {"array": [row["eta_error"] or 0 for row in rows]}
        _add(plots, 1, objectives, [r["eta"] for r in rows], policy, colour, error_y=error)
        over = [100 * row["over"] for row in rows]
        _add(plots, 2, over, [r["eta"] for r in rows], policy, colour, legend=False)
    _add(plots, 3, objectives, [r["tpot_p50_ms"] for r in rows], f"{policy} p50", colour)
    _add(
        plots, 3, objectives, [r["tpot_p99_ms"] for r in rows], f"{policy} p99", colour, dash="dot"
    )


def _add_time(
    plots: go.Figure, policy: str, row: dict[str, Any], colour: str, result: dict[str, Any]
) -> None:
    line = row["timeline"]
    x = [i * TIMELINE_S for i in range(len(line))]
    made = [at[0] / TIMELINE_S / row["simulated"] for at in line]
    over = [100 * at[2] / at[1] if at[1] else 0.0 for at in line]
    del result
    if policy != ALONE:
        _add(plots, 4, x, made, policy, colour, legend=False, markers=False)
    _add(plots, 5, x, over, policy, colour, legend=False, markers=False)


def _add(
    plots: go.Figure,
    row: int,
    x: list[float],
    y: list[float],
    name: str,
    colour: str,
    *,
    dash: str = "solid",
    legend: bool = True,
    markers: bool = True,
    error_y: dict[str, Any] | None = None,
) -> None:
    plots.add_trace(
        go.Scatter(
            x=x,
            y=y,
            name=name,
            showlegend=legend,
            mode="lines+markers" if markers else "lines",
            line={"color": colour, "dash": dash, "width": 1.5},
            error_y=error_y,
        ),
        row=row,
        col=1,
    )
