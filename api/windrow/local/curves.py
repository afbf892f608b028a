"""The page that a finetuning leaves: its curves, from `metrics.jsonl`, readable without network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

METRICS_FILE = "metrics.jsonl"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px; color: #222 }}
table {{ border-collapse: collapse }} td, th {{ padding: .15rem 1.2rem .15rem 0; text-align: left }}
th {{ font-weight: 600; color: #555 }} td {{ font-variant-numeric: tabular-nums }}
</style></head><body>
<h1>{title}</h1>
<table>{rows}</table>
{plots}
</body></html>
"""


@dataclass(frozen=True)
class Curve:
    """One plot: a figure of each step."""

    title: str
    key: str
    scale: float = 1.0


CURVES = (
    Curve("Loss, nats per token", "loss"),
    Curve("Learning rate", "learning_rate"),
    Curve("Norm of the gradient, before clipping", "gradient_norm"),
    Curve("Tokens per second", "tokens_per_second"),
    Curve("Memory, MiB", "memory_bytes", 2**-20),
)


def write_curves(folder: Path, title: str, rows: Sequence[tuple[str, str]]) -> Path:
    """Write `report.html` into a job's folder and return its path; `rows` are label and figure."""
    page = _PAGE.format(
        title=html.escape(title),
        rows="".join(
            f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>"
            for label, value in rows
        ),
        plots=figure(read_metrics(folder)).to_html(full_html=False, include_plotlyjs="inline"),
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a job; where a step ran twice, before and after a stop, the later one."""
    try:
        lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    latest = {(line["step"], line.get("stage")): line for line in map(json.loads, lines)}
    return [latest[key] for key in sorted(latest, key=lambda key: (key[0], key[1] or ""))]


def figure(metrics: Sequence[dict[str, Any]]) -> go.Figure:
    """Return the curves one below the other; losses on held-out rows stand with the loss."""
    plots = make_subplots(
        rows=len(CURVES),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.05,
        subplot_titles=[curve.title for curve in CURVES],
    )
    for row, curve in enumerate(CURVES, start=1):
        _add(plots, row, curve.key, metrics, curve.scale)
    _add(plots, 1, "eval_loss", metrics, 1.0, markers=True)
    plots.update_xaxes(title_text="step", row=len(CURVES), col=1)
    plots.update_layout(height=220 * len(CURVES), template="plotly_white", showlegend=False)
    return plots


def _add(
    plots: go.Figure,
    row: int,
    key: str,
    metrics: Sequence[dict[str, Any]],
    scale: float,
    *,
    markers: bool = False,
) -> None:
    found = [line for line in metrics if key in line]
    plots.add_trace(
        go.Scatter(
            x=[line["step"] for line in found],
            y=[line[key] * scale for line in found],
            name=key,
            mode="markers" if markers else "lines",
        ),
        row=row,
        col=1,
    )
