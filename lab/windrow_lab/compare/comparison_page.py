"""The page of a comparison: its table, eta against steps over the objective, TPOT of every arm."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from windrow_lab.compare import comparison_table
from windrow_lab.compare.arms import ComparisonSession, Segment
from windrow_lab.figures.report import OBJECTIVE_COLOUR, PAGE_STYLE, broken_where_idle, thinned
from windrow_lab.figures.summary import SummaryWindow

PAGE = "report.html"
_BAR = 110  # pixels of an arm's TPOT

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Windrow: ways of sharing a device</title>
<meta name="viewport" content="width=device-width">
<style>{style}</style></head><body>
<h1>The same load, shared in different ways</h1>
<p>{said}</p>
<div style="overflow-x: auto"><table>{table}</table></div>
<p>{caption}. {load}</p>
{frontier}
{over_time}
<p>Computed from the event logs beside this page: one line per decode step and per tasklet.</p>
</body></html>
"""


def write_page(out: Path, result: Mapping[str, Any], sessions: Sequence[ComparisonSession]) -> Path:
    """Write the page into a comparison's folder and return its path."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in ("", *comparison_table.TITLES))
    rows = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in comparison_table.cells(row))
        + "</tr>"
        for row in result["arms"]
    )
    page = _PAGE.format(
        style=PAGE_STYLE,
        said=html.escape(comparison_table.sentence(result)),
        table=f"<tr>{head}</tr>{rows}",
        caption=html.escape(comparison_table.CAPTION),
        load=html.escape(load_of(result)),
        frontier=frontier(result).to_html(full_html=False, include_plotlyjs="inline"),
        over_time=over_time(result, sessions).to_html(full_html=False, include_plotlyjs=False),
    )
    path = out / PAGE
    path.write_text(page, encoding="utf-8")
    return path


def load_of(result: Mapping[str, Any]) -> str:
    """Say under which load, objective and machine a comparison was made."""
    asked, rule, machine = result["asked"], result["objective"], result["environment"]
    turns = result.get("turns")
    paced = (
        f" Before or after {turns['slower']} of {turns['count']} turns the machine was slower than "
        f"usual by a tenth or more; {turns['played_again']} more were played again for that."
        if turns
        else ""
    )
    return (
        f"Objective {rule['milliseconds']:g} ms ({rule['rule']}); load "
        f"{asked['trace'] or asked['like']} at rate {result['rate']:g}, {result['requests']} "
        f"requests; {result['rounds']} rounds, {asked['window_s']:g} s of each turn counted after "
        f"{asked['lead_s']:g} s of lead-in; {machine['cpu']}, {machine['cores']} cores.{paced}"
    )


def frontier(result: Mapping[str, Any]) -> go.Figure:
    """Return eta against the steps over the objective, a point with its intervals for each arm."""
    plot = go.Figure()
    for row in result["arms"]:
        over, eta = row["over"], row["eta"]
        if over is None or eta is None:
            continue
        plot.add_trace(
            go.Scatter(
                x=[100 * over["median"]],
                y=[eta["median"]],
                error_x=_bar(over, 100),
                error_y=_bar(eta, 1),
                mode="markers+text",
                text=[row["arm"]],
                textposition="top center",
                name=row["arm"],
                marker={"size": 10, "symbol": "star" if row["arm"] == result["winner"] else None},
            )
        )
    alone = [row for row in result["arms"] if row["kind"] == "alone"]
    for row in alone:
        plot.add_vline(
            x=100 * row["over"]["median"],
            line={"color": "#888", "dash": "dot"},
            annotation_text=row["arm"],
        )
    plot.update_layout(
        title="What is gathered (eta) against what it costs serving; up and left is better",
        template="plotly_white",
        height=480,
        showlegend=False,
    )
    plot.update_xaxes(title_text="steps over the objective, %", rangemode="tozero")
    plot.update_yaxes(title_text="eta: share of the dedicated rate", rangemode="tozero")
    return plot


def _bar(interval: Mapping[str, float], factor: float) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": [factor * (interval["high"] - interval["median"])],
        "arrayminus": [factor * (interval["median"] - interval["low"])],
        "thickness": 1,
    }


def over_time(result: Mapping[str, Any], sessions: Sequence[ComparisonSession]) -> go.Figure:
    """Return the TPOT of every arm over its window in the first round, one below the other."""
    drawn: list[tuple[str, Segment, Any]] = []
    rounds = sorted({at["round"] for at in result["segments"]})
    for row in result["arms"]:
        for session in sessions:
            if rounds and (found := session.steps_of(rounds[0], row["arm"])):
                drawn.append((row["arm"], *found))
                break
    plots = make_subplots(
        rows=max(1, len(drawn)),
        cols=1,
        shared_xaxes=True,
        shared_yaxes="all",
        vertical_spacing=0.2 / max(1, len(drawn)),
        subplot_titles=[name for name, _, _ in drawn],
    )
    objective = result["objective"]["milliseconds"]
    for i, (name, segment, steps) in enumerate(drawn, start=1):
        window = SummaryWindow(*segment.window_ns, objective, segment.window_ns[1])
        line = broken_where_idle(thinned(steps, window))
        plots.add_trace(
            go.Scatter(x=line.x, y=line.y, mode="lines", line={"width": 1}, name=name), row=i, col=1
        )
        plots.add_hline(y=objective, line={"color": OBJECTIVE_COLOUR, "dash": "dash"}, row=i, col=1)
    plots.update_yaxes(rangemode="tozero", range=[0, 3 * objective])
    plots.update_xaxes(title_text="seconds of the window", row=max(1, len(drawn)), col=1)
    plots.update_layout(
        title="Time per output token, ms, in the first round; dashed: the objective",
        template="plotly_white",
        height=90 + _BAR * max(1, len(drawn)),
        showlegend=False,
    )
    return plots
