"""Draw the dashboards from a Prometheus that has scraped a run, as pictures for the docs.

    python tools/dashboards/draw.py --prometheus http://127.0.0.1:9090 --minutes 3 --out docs/images

Grafana is not involved: panels, queries and units are those of the chart's JSON, the answers are
Prometheus' own, and the drawing is plotly's, photographed by a headless Chromium. Each picture
says so.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import plotly.graph_objects as go
from PIL import Image
from query import Asking, PanelTarget, Series, targets_of

ROOT = Path(__file__).resolve().parents[2]
BOARDS = ROOT / "deploy" / "helm" / "windrow" / "dashboards"
WIDTH, ROW_PX = 1500, 30
# What a figure is held against is drawn dashed.
_BOUNDS, _BOUND = ("objective", "limit of", "device", "1 + margin"), "#b3402e"
_SIZES = {
    "bytes": [("B", 1.0), ("KiB", 1024.0), ("MiB", 1024.0**2), ("GiB", 1024.0**3)],
    "s": [("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0)],
}
_COLOURS = ("#3f7d58", "#e0a93b", "#4c78a8", "#c06c84", "#9467bd", "#17becf", "#8c564b", "#7f7f7f")
_NOTE = (
    "Panels and queries of the chart, answers of Prometheus; drawn by plotly, not by Grafana. "
    "Times: minutes since the begin."
)


def format_value(value: float, unit: str) -> str:
    """Return a figure in one of Grafana's units, as people read it."""
    match unit:
        case "percentunit":
            return f"{100 * value:.3g}%"
        case "bytes" | "s":
            name, size = _named(value, unit)
            return f"{_figures(value / size)} {name}"
        case "currencyUSD":
            return f"${value:.2f}"
        case "reqps":
            return f"{value:.3g} req/s"
    suffix = unit.removeprefix("suffix:") if unit.startswith("suffix:") else ""
    return _figures(value) + suffix


def _figures(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _named(value: float, unit: str) -> tuple[str, float]:
    """Return the unit that a figure of bytes or seconds is read in, and how much of it is one."""
    known = _SIZES[unit]
    return next(((name, size) for name, size in reversed(known) if value >= size), known[0])


def _ticks(highest: float, unit: str, *, whole: bool) -> tuple[list[float], list[str]]:
    """Return the places of four or five marks from zero up, and their labels."""
    if unit in _SIZES:
        name, size = _named(highest, unit)
    else:
        name, size = "", 1.0
    shown = (highest or 1.0) / size
    rough = shown / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999) * power
    if whole:
        step = max(1.0, math.ceil(step))
    marks = [step * n for n in range(math.floor(shown / step * 1.05) + 1)]
    words = [f"{mark:.4g} {name}" if name else format_value(mark, unit) for mark in marks]
    return [mark * size for mark in marks], ["0", *words[1:]]


def _with_values(figure: go.Figure, highest: float, unit: str, *, whole: bool) -> go.Figure:
    places, words = _ticks(highest, unit, whole=whole)
    top = max(highest, places[-1]) * 1.05
    return figure.update_yaxes(range=[0, top], tickvals=places, ticktext=words)


def _with_gaps(
    points: list[tuple[float, float]], step_s: float
) -> list[tuple[float, float | None]]:
    """Return points with nothing where some are missing, so that no line leads across."""
    found: list[tuple[float, float | None]] = []
    for at, value in points:
        if found and at - found[-1][0] > 1.5 * step_s:
            found.append((found[-1][0] + step_s, None))
        found.append((at, value))
    return found


def _lines(series: list[Series], unit: str, asking: Asking, *, stacked: bool) -> go.Figure:
    figure = go.Figure()
    for index, one in enumerate(series):
        points = _with_gaps(one.points, asking.step_s)
        bound = one.name.startswith(_BOUNDS)
        figure.add_scatter(
            x=[at - asking.begin for at, _ in points],
            y=[value for _, value in points],
            name=one.name,
            mode="lines",
            stackgroup="all" if stacked else None,
            line={
                "width": 1 if stacked else 2,
                "color": _BOUND if bound else _COLOURS[index % len(_COLOURS)],
                "dash": "dash" if bound else "solid",
            },
        )
    sums: dict[float, float] = {}
    for one in series:
        for at, value in one.points:
            sums[at] = sums.get(at, 0.0) + value if stacked else max(sums.get(at, 0.0), value)
    values = [value for one in series for _, value in one.points]
    whole = unit == "short" and all(value == int(value) for value in values)
    return _with_values(figure, max(sums.values(), default=0.0), unit, whole=whole)


def _bars(series: list[Series], unit: str) -> go.Figure:
    values = [one.points[-1][1] for one in series]
    figure = go.Figure(
        go.Bar(
            x=values,
            y=[one.name for one in series],
            orientation="h",
            width=0.5,
            text=[format_value(value, unit) for value in values],
            textposition="outside",
            marker_color=_COLOURS[0],
        )
    )
    figure.update_yaxes(range=[max(3, len(series)) - 0.5, -0.5])
    return figure.update_xaxes(range=[0, 1.25 * max(values) or 1], visible=False)


def _heatmap(series: list[Series], begin: float) -> go.Figure:
    # Buckets are cumulative: a row is the part between two bounds.
    ordered = sorted(series, key=lambda one: float(one.name.replace("+Inf", "inf")))
    times = sorted({at for one in ordered for at, _ in one.points})
    below = [0.0] * len(times)
    rows = []
    for one in ordered:
        known = dict(one.points)
        now = [known.get(at, 0.0) for at in times]
        rows.append([max(0.0, a - b) for a, b in zip(now, below, strict=True)])
        below = now
    bounds = [float(one.name.replace("+Inf", "inf")) for one in ordered]
    words = [f"{bound:.0%}" if math.isfinite(bound) else "more" for bound in bounds]
    scale = [[0, "#ffffff"], [0.001, "#e5efe9"], [1, "#1f5636"]]
    return go.Figure(
        go.Heatmap(
            x=[at - begin for at in times], y=words, z=rows, colorscale=scale, showscale=False
        )
    )


def _states(series: list[Series], begin: float, step_s: float) -> go.Figure:
    figure = go.Figure()
    for index, one in enumerate(series):
        figure.add_bar(
            base=[at - begin - step_s for at, _ in one.points],
            x=[1.1 * step_s] * len(one.points),  # no seams
            y=[one.name] * len(one.points),
            orientation="h",
            width=0.6,
            marker={"color": _COLOURS[index % len(_COLOURS)], "line": {"width": 0}},
        )
    return figure.update_layout(barmode="overlay")


def _figure(kind: str, series: list[Series], unit: str, asking: Asking, stacked: bool) -> go.Figure:
    if kind == "bargauge":
        return _bars(series, unit)
    if kind == "heatmap":
        figure = _heatmap(series, asking.begin)
    elif kind == "state-timeline":
        figure = _states(series, asking.begin, asking.step_s)
    else:
        figure = _lines(series, unit, asking, stacked=stacked)
    whole = asking.end - asking.begin
    every = next((s for s in (15, 30, 60, 120, 300, 600, 1800) if whole / s <= 6), 3600)
    places = list(range(0, int(whole) + 1, every))
    words = [f"{at // 60}:{at % 60:02}" for at in places]
    return figure.update_xaxes(range=[0, whole], tickvals=places, ticktext=words)


def _panel(panel: dict[str, Any], targets: list[PanelTarget], asking: Asking) -> str:
    series = [one for target in targets for one in asking.series(target) if one.points]
    place, unit = panel["gridPos"], targets[0].unit
    left, top = place["x"] / 24 * WIDTH, place["y"] * ROW_PX
    width, height = place["w"] / 24 * WIDTH - 10, place["h"] * ROW_PX - 10
    style = f"left:{left:.0f}px;top:{top:.0f}px;width:{width:.0f}px;height:{height:.0f}px"
    title = html.escape(panel["title"])
    if not series:
        inner = "<p class=none>no data</p>"
    elif panel["type"] == "stat":
        inner = "<div class=stats>" + "".join(
            f"<p class=stat>{html.escape(format_value(one.points[-1][1], unit))}"
            f"<small>{html.escape(one.name if len(series) > 1 else '')}</small></p>"
            for one in series[:4]
        )
        inner += "</div>"
    else:
        stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
        figure = _figure(panel["type"], series, unit, asking, stacked)
        figure.update_layout(
            width=width,
            height=height - 28,
            margin={"l": 10, "r": 10, "t": 4, "b": 4},
            template="plotly_white",
            legend={"orientation": "h", "y": -0.2, "font": {"size": 10}},
            showlegend=panel["type"] == "timeseries",
            font={"size": 11},
        )
        figure.update_yaxes(automargin=True, ticklabelstandoff=5)
        figure.update_xaxes(automargin=True)
        inner = figure.to_html(full_html=False, include_plotlyjs=False, config={"staticPlot": True})
    return f'<div class=panel style="{style}"><h3>{title}</h3>{inner}</div>'


def page(board: Path, asking: Asking) -> tuple[str, int]:
    """Return a dashboard as a page, and its height in pixels."""
    from plotly.offline import get_plotlyjs

    whole = json.loads(board.read_text())
    by_title: dict[str, list[PanelTarget]] = {}
    for target in targets_of(board):
        by_title.setdefault(target.title, []).append(target)
    parts, bottom = [], 0
    for panel in whole["panels"]:
        place = panel["gridPos"]
        bottom = max(bottom, (place["y"] + place["h"]) * ROW_PX)
        if panel["type"] == "row":
            top = place["y"] * ROW_PX
            parts.append(f'<h2 style="top:{top}px">{html.escape(panel["title"])}</h2>')
        else:
            parts.append(_panel(panel, by_title[panel["title"]], asking))
    text = f"""<!doctype html><meta charset="utf-8"><script>{get_plotlyjs()}</script><style>
body {{ margin: 0; background: #f4f5f5; font-family: system-ui, sans-serif; color: #24292e }}
header {{ padding: 10px 14px; height: 40px }} header b {{ font-size: 18px }}
header span {{ color: #6a705f; margin-left: 1em; font-size: 12px }}
main {{ position: relative; margin: 0 8px }}
h2 {{ position: absolute; margin: 4px 4px; font-size: 14px }}
.panel {{ position: absolute; background: #fff; border: 1px solid #dcdfe3; border-radius: 3px;
  overflow: hidden }}
h3 {{ font-size: 12.5px; margin: 6px 8px 2px; font-weight: 600 }}
.stats {{ display: flex; height: calc(100% - 40px); align-items: center;
  justify-content: center; flex-wrap: wrap }}
.stat {{ font-size: 30px; margin: 4px 12px; color: #3f7d58; font-weight: 600;
  display: inline-block }}
.stat small {{ font-size: 11px; color: #6a705f; margin-left: 6px; font-weight: 400 }}
.none {{ color: #9a9a9a; text-align: center; margin-top: 40px }}
</style><header><b>{html.escape(whole["title"])}</b><span>{_NOTE}</span></header>
<main>{"".join(parts)}</main>"""
    return text, bottom + 75


def photograph(page_file: Path, picture: Path, height: int) -> None:
    """Take a picture of a page with a headless Chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("there is no chromium on PATH (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(browser, "--headless=new", "--no-sandbox", "--hide-scrollbars"),
                *(f"--user-data-dir={profile}", f"--window-size={WIDTH + 16},{height}"),
                *("--virtual-time-budget=15000", f"--screenshot={picture}"),
                page_file.as_uri(),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
    # Flat colours: a palette has them all, in a third of the bytes.
    with Image.open(picture) as taken:
        taken.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)


def _choices(url: str) -> dict[str, str]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": "windrow_slot_info"}).json()
    slot = answer["data"]["result"][0]["metric"]
    return {"cluster": ".*", "namespace": slot["namespace"], "slot": slot["slot"]}


def main() -> int:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prometheus", required=True, help="address of its API")
    parser.add_argument("--minutes", type=float, default=3.0, help="how far back")
    parser.add_argument("--price", default="2", help="of a device hour")
    parser.add_argument("--dedicated", default="0", help="tokens a second of a whole device")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    names = ("cluster", "namespace", "policy", "model", "job_namespace", "job")
    everything = dict.fromkeys(names, ".*")
    everything |= {"price": asked.price, "dedicated": asked.dedicated}
    end = time.time()
    for board in sorted(BOARDS.glob("*.json")):
        chosen = _choices(asked.prometheus) if board.stem == "slot" else everything
        asking = Asking(asked.prometheus, end - 60 * asked.minutes, end, chosen)
        text, height = page(board, asking)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "page.html")
            file.write_text(text, encoding="utf-8")
            photograph(file, (asked.out / f"dashboard-{board.stem}.png").absolute(), height)
        print(f"drew {asked.out / f'dashboard-{board.stem}.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
