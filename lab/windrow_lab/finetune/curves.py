"""The page that a finetuning leaves: what was trained, with what, and its curves.

It is one file of a few dozen kilobytes that opens without a network: the curves are drawn here, as
SVG.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "report.html"
NONE = "-"  # where there is no figure

# Points of a line; more cannot be distinguished on a screen.
_POINTS = 800
# Of these, so many can be pointed at.
_POINTED_AT = 300
_WIDTH, _HEIGHT = 960, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 12, 26
_TRAINING, _HELD_OUT = "#1f6fb4", "#d1590c"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px;
  padding: 0 1rem; color: #1c2228; background: #fff }}
h1 {{ font-size: 1.5rem; margin: 0 }} h2 {{ font-size: 1rem; margin: 0 0 .3rem }}
.said {{ margin: .2rem 0 1.4rem; color: #4a545e }}
.notes {{ margin: 0 0 1.4rem; padding: .6rem 1rem .6rem 2rem; background: #fff4e0;
  border-left: 4px solid #d1590c }}
.tables {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr));
  gap: 1.2rem 2rem; margin-bottom: 1.6rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ padding: .12rem .8rem .12rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #e7ebef; overflow-wrap: anywhere }}
th {{ font-weight: 500; color: #4a545e; white-space: nowrap; width: 11rem }}
td {{ font-variant-numeric: tabular-nums }}
figure {{ margin: 0 0 1.3rem }} figcaption {{ font-weight: 600 }}
.legend {{ font-weight: 400; color: #4a545e; margin-left: 1rem }}
svg {{ display: block; width: 100%; height: auto }}
svg text {{ font-size: 12px; fill: #4a545e }}
@media (max-width: 640px) {{ svg text {{ font-size: 17px }} }}
.grid {{ stroke: #e7ebef }} .line {{ fill: none; stroke-width: 1.6 }}
.point {{ fill-opacity: 0 }} .point:hover {{ fill-opacity: 1 }}
</style></head><body>
<h1>{title}</h1>
<p class="said">{said}</p>
{notes}
<div class="tables">{facts}</div>
{figures}
<div class="tables">{settings}</div>
</body></html>
"""


@dataclass(frozen=True)
class Table:
    """Some facts under a heading: label and value."""

    title: str
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Curve:
    """One figure of each step; `also`: another one in the same units, drawn as points."""

    title: str
    key: str
    written: Callable[[float], str]
    also: str = ""
    scale: float = 1.0


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


CURVES = (
    Curve("Loss, nats per token", "loss", lambda loss: f"{loss:.4g}", also="eval_loss"),
    Curve("Learning rate", "learning_rate", lambda rate: f"{rate:.3g}"),
    Curve("Norm of the gradient, before clipping", "gradient_norm", _short),
    Curve("Tokens per second", "tokens_per_second", _short),
    Curve("Memory, MiB", "memory_bytes", _short, scale=2**-20),
)


def write_curves(
    folder: Path,
    title: str,
    said: str,
    *,
    notes: Sequence[str] = (),
    facts: Sequence[Table] = (),
    settings: Sequence[Table] = (),
) -> Path:
    """Write the report of a job into its folder and return its path.

    Args:
        folder: of the job, with its metrics.
        title: of the page.
        said: how the job has ended.
        notes: what a reader should not miss.
        facts: stand above the curves.
        settings: stand below them.

    Raises:
        OSError: it cannot be written.
    """
    metrics = read_metrics(folder)
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    page = _PAGE.format(
        title=html.escape(title),
        said=html.escape(said),
        notes=f'<ul class="notes">{listed}</ul>' if notes else "",
        facts="".join(map(_table, facts)),
        figures="".join(_figure(curve, metrics) for curve in CURVES),
        settings="".join(map(_table, settings)),
    )
    path = folder / REPORT_FILE
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


def of_bytes(n_bytes: float) -> str:
    """Return a size for people: `512 B`, `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if n_bytes >= 100 else f"{n_bytes:.3g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.3g} TiB"


def of_seconds(seconds: float) -> str:
    """Return a length of time for people: `4.2 s`, `3 min 20 s`, `5 h 02 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the fields of a spec with their paths."""
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{name}.")
        else:
            written = str(value).lower() if isinstance(value, bool) else str(value)
            rows.append((prefix + name, written))
    return rows


def _table(table: Table) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(label)}</th><td>{html.escape(value)}</td></tr>"
        for label, value in table.rows
    )
    return f"<section><h2>{html.escape(table.title)}</h2><table>{rows}</table></section>"


Points = list[tuple[float, float]]


def _figure(curve: Curve, metrics: Sequence[Mapping[str, Any]]) -> str:
    line, marks = (_points(metrics, key, curve.scale) for key in (curve.key, curve.also))
    caption = html.escape(curve.title)
    if not line and not marks:
        return f"<figure><figcaption>{caption}</figcaption>{NONE} (no step ran)</figure>"
    if marks:
        caption += (
            f'<span class="legend"><span style="color:{_TRAINING}">━</span> training '
            f'<span style="color:{_HELD_OUT}">●</span> held-out rows</span>'
        )
    steps = [line["step"] for line in metrics]  # the same for all curves, one above the other
    values = [value for _, value in line + marks]
    plot = _Plot((min(steps), max(steps)), _bounds(values), curve.written)
    shown = thinned(line)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(curve.title)}">'
        f"{plot.axes()}{plot.line(shown)}{plot.pointed_at(shown)}{plot.marks(marks)}</svg></figure>"
    )


def _points(metrics: Sequence[Mapping[str, Any]], key: str, scale: float) -> Points:
    """Return (step, value) of each line that has the figure, without those that are none."""
    return [
        (line["step"], line[key] * scale)
        for line in metrics
        if isinstance(line.get(key), int | float) and math.isfinite(line[key])
    ]


def thinned(points: Points) -> Points:
    """Return at most `_POINTS` of them: of each stretch the lowest and the highest one."""
    if len(points) <= _POINTS:
        return points
    stretch = -(-2 * len(points) // _POINTS)
    kept: Points = []
    for at in range(0, len(points), stretch):
        part = points[at : at + stretch]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        return low - (abs(low) * 0.1 or 1.0), high + (abs(high) * 0.1 or 1.0)
    return low, high


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers between two others: multiples of 1, 2 or 5 times a power of ten."""
    if low == high:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


@dataclass(frozen=True)
class _Plot:
    """Scale of a plot: the pixels of a step and a value."""

    steps: tuple[float, float]
    values: tuple[float, float]
    written: Callable[[float], str]

    def x(self, step: float) -> float:
        first, last = self.steps
        width = _WIDTH - _LEFT - _RIGHT
        return _LEFT + (width * (step - first) / (last - first) if last > first else width / 2)

    def y(self, value: float) -> float:
        low, high = self.values
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - value) / (high - low)

    def axes(self) -> str:
        values = [(self.y(value), self.written(value)) for value in _ticks(*self.values, most=5)]
        steps = sorted({round(step) for step in _ticks(*self.steps, most=8)})
        drawn = [
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{written}</text>'
            for y, written in values
        ]
        drawn += [
            f'<text x="{self.x(step):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
            f"{'step ' if step == steps[0] else ''}{step:,}</text>"
            for step in steps
        ]
        return "".join(drawn)

    def line(self, points: Points) -> str:
        if len(points) == 1:
            return self._circle(points[0], _TRAINING, "")
        at = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)
        return f'<polyline class="line" stroke="{_TRAINING}" points="{at}"/>'

    def pointed_at(self, points: Points) -> str:
        every = -(-len(points) // _POINTED_AT) or 1
        return "".join(self._circle(p, _TRAINING, ' class="point"') for p in points[::every])

    def marks(self, points: Points) -> str:
        every = -(-len(points) // _POINTED_AT) or 1
        return "".join(self._circle(point, _HELD_OUT, "") for point in points[::every])

    def _circle(self, point: tuple[float, float], color: str, attributes: str) -> str:
        step, value = point
        return (
            f'<circle{attributes} cx="{self.x(step):.1f}" cy="{self.y(value):.1f}" r="4" '
            f'fill="{color}"><title>step {step:,}: {self.written(value)}</title></circle>'
        )
