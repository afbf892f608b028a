"""The page that a run leaves: its figures as plots, from the event logs, readable without network.

One HTML file; the plotting library's JavaScript is inside.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from windrow.eventlog import StepEvent, TaskletEvent, read_events
from windrow_lab.figures.summary import PODS, Events, SummaryWindow, window_of

# Points of a line beyond which a browser gets slow and a picture no clearer.
MOST_POINTS = 4000
# Longer than any step: decode had no request.
IDLE_S = 0.25
_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b")
_KV, _LENT, OBJECTIVE_COLOUR, _HARVEST = "#17becf", "#ff9f1c", "#d62728", "#2ca02c"

PAGE_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; padding: 0 1rem;
  background: #fff; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .15rem 1.2rem .15rem 0; text-align: left }
th { font-weight: 600; color: #555 } td { font-variant-numeric: tabular-nums }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Windrow: a run</title>
<meta name="viewport" content="width=device-width">
<style>{style}</style></head><body>
<h1>Windrow: a run of {seconds:.0f} s</h1>
<table>{rows}</table>
<h2>Over time</h2>
{plots}
<p>Computed from the event logs beside this page: one line per decode step and per tasklet.</p>
</body></html>
"""


@dataclass(frozen=True)
class Series:
    """A line of a plot; x in seconds since the load began."""

    x: list[float]
    y: list[float]


def write_report(folder: Path, summary: dict[str, Any], rows: Sequence[tuple[str, str]]) -> Path:
    """Write `report.html` into a run's folder and return its path; `rows` are label and figure."""
    window = window_of(Events.of((s, e) for s, e in read_events(folder) if s == "run").marks)
    plots = figure(Events.read(folder / PODS), window, summary)
    page = _PAGE.format(
        style=PAGE_STYLE,
        seconds=(window.end_ns - window.begin_ns) / 1e9,
        rows="".join(
            f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>"
            for label, value in rows
        ),
        plots=plots.to_html(
            full_html=False, include_plotlyjs="inline", config={"displayModeBar": False}
        ),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def figure(events: Events, window: SummaryWindow, summary: dict[str, Any]) -> go.Figure:
    """Return TPOT, harvested throughput, memory and loss, one below the other."""
    sources = sorted({source for source, s in events.steps if window.holds(s.end_ns)})
    titles = [
        f"Time of each decode step, ms (dashed: objective, {window.objective_ms:g})",
        f"Harvested tokens a second (alone on the device: "
        f"{summary['harvest']['dedicated_tokens_per_second']:,.0f})",
        *(f"Memory of {source}: chunks of the arena" for source in sources),
        "Training loss, nats per token",
    ]
    plots = make_subplots(
        rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=titles
    )
    # A narrow page has no room for centred titles, nor for a legend beside the plots.
    plots.update_annotations(x=0, xanchor="left", font={"size": 14})
    for i, source in enumerate(sources):
        steps = [s for of, s in events.steps if of == source and window.holds(s.end_ns)]
        _add_tpot(plots, source, steps, window, _COLOURS[i % len(_COLOURS)])
        _add_memory(plots, 3 + i, steps, window, legend=i == 0)
    plots.add_hline(
        y=window.objective_ms, line={"color": OBJECTIVE_COLOUR, "dash": "dash"}, row=1, col=1
    )
    _add_throughput(plots, events.tasklets, window)
    _add_loss(plots, len(titles), events, window)
    plots.update_xaxes(title_text="seconds since the load began", row=len(titles), col=1)
    plots.update_yaxes(rangemode="tozero")
    # One step that waits for something is a hundred times as long as the others.
    plots.update_yaxes(type="log", dtick=1, row=1, col=1)
    plots.update_layout(
        height=260 * len(titles),
        template="plotly_white",
        margin={"t": 40, "l": 50, "r": 20},
        legend={"orientation": "h", "y": -0.08},
    )
    return plots


def _add_tpot(
    plots: go.Figure, source: str, steps: Sequence[StepEvent], window: SummaryWindow, colour: str
) -> None:
    line = broken_where_idle(thinned(steps, window))
    plots.add_trace(
        go.Scatter(
            x=line.x,
            y=line.y,
            name=f"{source} TPOT",
            mode="lines",
            line={"color": colour, "width": 1},
        ),
        row=1,
        col=1,
    )


def thinned(steps: Sequence[StepEvent], window: SummaryWindow) -> Series:
    """Return times per output token in ms, by step; of too many, only the slowest of each group."""
    group = max(1, -(-len(steps) // MOST_POINTS))
    slowest = [
        max(steps[i : i + group], key=lambda s: s.tpot_ns) for i in range(0, len(steps), group)
    ]
    return Series(
        [_seconds(s.end_ns, window) for s in slowest],
        [s.tpot_ns / 1e6 for s in slowest],
    )


def broken_where_idle(line: Series) -> Series:
    """Return the line with a hole (NaN) in each stretch without a point: nothing ran there."""
    broken = Series(line.x[:1], line.y[:1])
    for (before, _), (x, y) in pairwise(zip(line.x, line.y, strict=True)):
        if x - before > IDLE_S:
            broken.x.append(before)
            broken.y.append(math.nan)
        broken.x.append(x)
        broken.y.append(y)
    return broken


def _add_throughput(
    plots: go.Figure, tasklets: Sequence[TaskletEvent], window: SummaryWindow
) -> None:
    line = harvested_rate(tasklets, window)
    plots.add_trace(
        go.Scatter(
            x=line.x,
            y=line.y,
            name="harvested tokens/s",
            mode="lines",
            line={"color": _HARVEST, "shape": "hv"},
        ),
        row=2,
        col=1,
    )


def harvested_rate(tasklets: Sequence[TaskletEvent], window: SummaryWindow) -> Series:
    """Return tokens per second between each two optimizer steps."""
    done = [t for t in tasklets if t.phase == "opt"]
    line = Series([], [])
    for before, after in pairwise(done):
        line.x.append(_seconds(before.end_ns, window))
        took_s = max(1e-9, (after.end_ns - before.end_ns) / 1e9)
        line.y.append(max(0, after.tokens_done - before.tokens_done) / took_s)
    if done:
        line.x.append(_seconds(done[-1].end_ns, window))
        line.y.append(0.0)
    return line


def _add_memory(
    plots: go.Figure, row: int, steps: Sequence[StepEvent], window: SummaryWindow, *, legend: bool
) -> None:
    group = max(1, -(-len(steps) // MOST_POINTS))
    kept = steps[::group]
    x = [_seconds(s.end_ns, window) for s in kept]
    for name, y, colour in (
        ("KV", [s.chunks_kv for s in kept], _KV),
        ("lent", [s.chunks_lent for s in kept], _LENT),
    ):
        plots.add_trace(
            go.Scatter(
                x=x,
                y=y,
                name=f"{name} chunks",
                stackgroup=f"memory-{row}",
                legendgroup=name,
                showlegend=legend,
                line={"color": colour, "width": 0.5, "shape": "hv"},
            ),
            row=row,
            col=1,
        )


def _add_loss(plots: go.Figure, row: int, events: Events, window: SummaryWindow) -> None:
    training = [at for at in events.losses if at.stage == "training"]
    plots.add_trace(
        go.Scatter(
            x=[_seconds(at.at_ns, window) for at in training],
            y=[at.loss for at in training],
            name="loss",
            mode="lines+markers",
            marker={"size": 4},
            line={"color": "#444"},
        ),
        row=row,
        col=1,
    )


def _seconds(at_ns: int, window: SummaryWindow) -> float:
    return round((at_ns - window.begin_ns) / 1e9, 4)


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)


def adapter_path(summary: dict[str, Any]) -> str:
    """Return the path of the job's adapter; "none" where the job left none."""
    return str(summary.get("adapter", {}).get("path") or "none")


def rows_of(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of a summary with their labels, for people."""
    serving, harvest, job = summary["serving"], summary["harvest"], summary["job"]
    tpot = serving["tpot_ms"]
    # A run of an earlier release has not looked.
    disturbed = " ".join(summary.get("disturbances", ()))
    about_job = [
        ("Job", f"{job.get('phase', 'unknown')}, {job['steps']} steps"),
        (
            "Training loss",
            f"{_number(job['loss']['first'], '.3f')} to {_number(job['loss']['last'], '.3f')}",
        ),
        (
            "Held-out loss",
            f"{_number(job['eval_loss']['base'], '.3f')} base, "
            f"{_number(job['eval_loss']['tuned'], '.3f')} tuned",
        ),
    ]
    if (ranks := summary.get("run", {}).get("ranks", 1)) > 1:
        answered = f"{serving['requests_completed']} completed, {serving['requests_failed']} failed"
        return [
            *about_job,
            ("Requests", answered),
            ("Ranks", f"{ranks} for each engine and worker; they share cores: no figures of speed"),
        ]
    return [
        *([("These figures mean nothing: the machine was busy", disturbed)] if disturbed else []),
        *about_job,
        ("TPOT objective", f"{serving['objective_ms']:.1f} ms"),
        ("TPOT", f"p50 {tpot['p50']:.1f} ms, p99 {tpot['p99']:.1f} ms"),
        (
            "Steps over the objective",
            f"{serving['steps_over_objective']} of {serving['steps']} "
            f"({serving['share_over_objective']:.2%})",
        ),
        (
            "Requests",
            f"{serving['requests_completed']} completed, {serving['requests_failed']} failed",
        ),
        (
            "Harvested",
            f"{harvest['tokens']:,} tokens, {harvest['tokens_per_second']:,.0f} a second",
        ),
        (
            "Share of a dedicated device (eta)",
            f"{_number(harvest['eta'], '.2f')} "
            f"(dedicated: {harvest['dedicated_tokens_per_second']:,.0f} tokens a second)",
        ),
    ]
