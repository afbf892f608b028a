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
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import plotly.graph_objects as go
from query import Asking, PanelTarget, Series, targets_of

ROOT = Path(__file__).resolve().parents[2]
BOARDS = ROOT / "deploy" / "helm" / "windrow" / "dashboards"
WIDTH, ROW_PX = 1500, 30
_COLOURS = ("#3f7d58", "#e0a93b", "#4c78a8", "#b3402e", "#9467bd", "#17becf", "#8c564b", "#7f7f7f")
_NOTE = "Panels and queries of the chart, answers of Prometheus; drawn by plotly, not by Grafana."


def format_value(value: float, unit: str) -> str:
    """Return a figure in one of Grafana's units, as people read it."""
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit == "bytes":
        for name in ("B", "KiB", "MiB", "GiB"):
            if value < 1024 or name == "GiB":
                return f"{value:.3g} {name}"
            value /= 1024
    if unit == "s":
        if value >= 172_800:
            return f"{value / 86_400:,.0f} d"
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "currencyUSD":
        return f"{value:.4f} $"
    if unit.startswith("suffix:"):
        return f"{value:,.4g}{unit.removeprefix('suffix:')}"
    return f"{value:,.4g}"


def _lines(series: list[Series], unit: str, *, stacked: bool) -> go.Figure:
    figure = go.Figure()
    for index, one in enumerate(series):
        figure.add_scatter(
            x=[datetime.fromtimestamp(at, UTC) for at, _ in one.points],
            y=[value for _, value in one.points],
            name=one.name,
            mode="lines",
            stackgroup="all" if stacked else None,
            line={"width": 1 if stacked else 2, "color": _COLOURS[index % len(_COLOURS)]},
        )
    highest = max((value for one in series for _, value in one.points), default=0.0)
    figure.update_yaxes(rangemode="tozero", tickformat=_tick(unit, highest))
    return figure


def _tick(unit: str, highest: float) -> str:
    if unit == "percentunit":
        return ".0%"
    # Thousands get a letter; a half of a slot is no 500m.
    return "~s" if highest >= 1000 or unit == "s" else "~g"


def _bars(series: list[Series], unit: str) -> go.Figure:
    values = [one.points[-1][1] for one in series]
    return go.Figure(
        go.Bar(
            x=values,
            y=[one.name for one in series],
            orientation="h",
            text=[format_value(value, unit) for value in values],
            marker_color=_COLOURS[0],
        )
    )


def _heatmap(series: list[Series]) -> go.Figure:
    # Buckets are cumulative: a row is what lies between two bounds.
    ordered = sorted(series, key=lambda one: float(one.name.replace("+Inf", "inf")))
    times = sorted({at for one in ordered for at, _ in one.points})
    below = [0.0] * len(times)
    rows = []
    for one in ordered:
        known = dict(one.points)
        now = [known.get(at, 0.0) for at in times]
        rows.append([max(0.0, a - b) for a, b in zip(now, below, strict=True)])
        below = now
    return go.Figure(
        go.Heatmap(
            x=[datetime.fromtimestamp(at, UTC) for at in times],
            y=[one.name for one in ordered],
            z=rows,
            colorscale="YlGn",
            showscale=False,
        )
    )


def _states(series: list[Series]) -> go.Figure:
    figure = go.Figure()
    for index, one in enumerate(series):
        figure.add_scatter(
            x=[datetime.fromtimestamp(at, UTC) for at, _ in one.points],
            y=[one.name] * len(one.points),
            mode="markers",
            marker={"symbol": "square", "size": 9, "color": _COLOURS[index % len(_COLOURS)]},
        )
    return figure


def _figure(kind: str, series: list[Series], unit: str, *, stacked: bool) -> go.Figure:
    if kind == "bargauge":
        return _bars(series, unit)
    if kind == "heatmap":
        return _heatmap(series)
    if kind == "state-timeline":
        return _states(series)
    return _lines(series, unit, stacked=stacked)


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
        inner = "".join(
            f"<p class=stat>{html.escape(format_value(one.points[-1][1], unit))}"
            f"<small>{html.escape(one.name if len(series) > 1 else '')}</small></p>"
            for one in series[:4]
        )
    else:
        stacked = "stacking" in panel["fieldConfig"]["defaults"].get("custom", {})
        figure = _figure(panel["type"], series, unit, stacked=stacked)
        figure.update_layout(
            width=width,
            height=height - 28,
            margin={"l": 10, "r": 10, "t": 4, "b": 4},
            template="plotly_white",
            legend={"orientation": "h", "y": -0.2, "font": {"size": 10}},
            showlegend=panel["type"] == "timeseries",
            font={"size": 11},
        )
        figure.update_yaxes(automargin=True)
        if panel["type"] != "bargauge":  # of one run: its day would only be cut off
            figure.update_xaxes(automargin=True, tickformat="%H:%M:%S", nticks=5)
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
.stat {{ font-size: 25px; margin: 8px 10px; color: #3f7d58; font-weight: 600;
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


def _choices(url: str) -> dict[str, str]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": "windrow_slot_info"}).json()
    slot = answer["data"]["result"][0]["metric"]
    return {"namespace": slot["namespace"], "slot": slot["slot"]}


def main() -> int:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prometheus", required=True, help="address of its API")
    parser.add_argument("--minutes", type=float, default=3.0, help="how far back")
    parser.add_argument("--price", default="2", help="of a device hour")
    parser.add_argument("--dedicated", default="0", help="tokens a second of a whole device")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    asked = parser.parse_args()
    everything = dict.fromkeys(("namespace", "policy", "model", "job_namespace", "job"), ".*")
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
