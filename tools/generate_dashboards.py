"""Write the chart's dashboards with Grafana's own builder, from `description.py`.

    python tools/generate_dashboards.py [--check]

`--check` writes nothing and ends 1 when a file is stale.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dashboards.description import BOARDS, CLUSTER, Board, Panel, Query, Variable
from generated import ROOT, write_or_check
from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableRefresh,
)

FOLDER = ROOT / "deploy" / "helm" / "windrow" / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
STAT_HEIGHT = 5


def board_json(board: Board) -> str:
    """Return a dashboard as Grafana imports it."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags(["windrow"])
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("data source").type("prometheus")
        )
    )
    for variable in (CLUSTER, *board.variables):
        built = built.with_variable(_variable(variable))
    for row in board.rows:
        built = built.with_row(dashboard.Row(row.title))
        # Beside graphs a number has their height, so that no line of panels is ragged.
        only_numbers = all(panel.kind == "stat" for panel in row.panels)
        for panel in row.panels:
            built = built.with_panel(_panel(panel, STAT_HEIGHT if only_numbers else HEIGHT))
    whole = json.loads(JSONEncoder().encode(built.build()))
    _leave_out_what_is_renamed(whole)
    return json.dumps(whole, sort_keys=True, indent=2) + "\n"


_METRIC = re.compile(r"\b(windrow[a-z0-9_:]*[a-z0-9_])(\{)?")
_IDENTITY = re.compile(r"\b(by|on) \(((?:[a-z_]+, )*(?:slot|job_name|pod)\b[^)]*)\)")


def of_clusters(expr: str) -> str:
    """Return a query of the clusters that are chosen.

    Every series is theirs, and what is joined or counted by a name is so by the cluster, too: a
    name is unique in one cluster only.
    """
    parts = re.split(r'("[^"]*")', expr)
    chosen = 'cluster=~"$cluster"'
    parts[::2] = [
        _METRIC.sub(
            lambda found: found[1] + "{" + chosen + (", " if found[2] else "}"),
            _IDENTITY.sub(r"\1 (cluster, \2)", part),
        )
        for part in parts[::2]
    ]
    return "".join(parts).replace(", }", "}")


def _of_clusters(variable: Variable) -> str:
    return variable.query if variable is CLUSTER else of_clusters(variable.query)


def _leave_out_what_is_renamed(board: dict[str, Any]) -> None:
    """Take away defaults that Grafana has renamed since the builder's schema: it sets its own.

    `check_types.py` says which.
    """
    del board["style"]
    for variable in board["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min", "id"):
            variable.pop(name, None)
    for panel in board["panels"]:
        if panel["type"] == "heatmap":
            del panel["options"]["tooltip"]


def _variable(variable: Variable) -> Any:
    if not variable.query:
        return (
            dashboard.TextBoxVariable(variable.name)
            .label(variable.label)
            .default_value(variable.default)
        )
    made = (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .query({"query": _of_clusters(variable), "refId": variable.name})
        .datasource(SOURCE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    if variable.multi:
        made = made.multi(True).include_all(True).all_value(".*")
    return made


def _panel(panel: Panel, height: int) -> Any:
    made = _BUILDERS[panel.kind](panel)
    made = (
        made.title(panel.title).datasource(SOURCE).unit(panel.unit).span(panel.width).height(height)
    )
    if panel.text:
        made = made.description(panel.text)
    for index, query in enumerate(panel.queries):
        made = made.with_target(_target(query, index, panel))
    return made


def _target(query: Query, index: int, panel: Panel) -> Any:
    made = (
        prometheus.Dataquery()
        .expr(of_clusters(query.expr))
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + index))
    )
    if panel.kind == "heatmap":
        made = made.format("heatmap")
    # Of a range: one number, at its end.
    return made.instant() if panel.kind in ("stat", "bars") else made.range()


def _lines(panel: Panel) -> Any:
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .calcs([])
    )
    made = (
        timeseries.Panel()
        .line_width(2)
        .show_points(VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        .min(0)
    )
    if panel.kind == "stacked":
        stack = common.StackingConfig().group("A").mode(StackingMode.NORMAL)
        made = made.stacking(stack).fill_opacity(40).gradient_mode(GraphGradientMode.NONE)
    return made


def _heatmap(_: Panel) -> Any:
    return heatmap.Panel().calculate(False).show_value(VisibilityMode.NEVER)


def _last(made: Any) -> Any:
    return made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


_BUILDERS = {
    "timeseries": _lines,
    "stacked": _lines,
    "stat": lambda _: _last(stat.Panel()),
    "bars": lambda _: (
        _last(bargauge.Panel())
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .min(0)
    ),
    "heatmap": _heatmap,
    "states": lambda _: statetimeline.Panel().show_value(VisibilityMode.NEVER),
}


def generated() -> dict[Path, str]:
    """Return the wanted content of every file."""
    return {
        FOLDER / f"{board.uid.removeprefix('windrow-')}.json": board_json(board) for board in BOARDS
    }


if __name__ == "__main__":
    write_or_check(__doc__, generated)
