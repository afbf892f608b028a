"""`windrow report`: device hours and tokens that were harvested, by tenant, and their worth."""

from __future__ import annotations

import html
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windrow.errors import UserError
from windrow_cli.output import (
    Context,
    Json,
    Kubeconfig,
    client,
    print_json,
    print_line,
    table,
)

if TYPE_CHECKING:
    from windrow.usage import TenantUsage, UsageReport

ENV_PROMETHEUS = "PROMETHEUS_URL"
HEAD = ("TENANT", "TOKENS", "DEVICE HOURS", "WORTH")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Windrow: what was harvested</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1000px; padding: 0 1rem;
  background: #fff; color: #222 }}
h1 {{ font-size: 1.4rem }} table {{ border-collapse: collapse; margin: 1rem 0 }}
td, th {{ padding: .25rem 0 .25rem 1.6rem; text-align: right }}
td:first-child, th:first-child {{ padding-left: 0 }}
td:first-child, th:first-child {{ text-align: left }} th {{ font-weight: 600; color: #555 }}
tr:last-child td {{ border-top: 1px solid #ccc; font-weight: 600 }}
td {{ font-variant-numeric: tabular-nums }} p {{ color: #555 }}
</style></head><body>
<h1>What was harvested, {begin} to {end}</h1>
<table><tr>{head}</tr>{rows}</table>
{plots}
<p>From {source}. Device hours: time that workers had a device beside decode.{price}</p>
</body></html>
"""


def row_of(usage: TenantUsage) -> tuple[str, ...]:
    """Return a tenant as a row under HEAD."""
    return (
        usage.tenant or "-",
        f"{usage.tokens:,.0f}",
        f"{usage.device_hours:,.2f}" if usage.device_hours is not None else "-",
        f"{usage.worth:,.2f}" if usage.worth is not None else "-",
    )


def write_page(report: UsageReport, path: Path) -> None:
    """Write the report as a page that opens without a network."""
    # Of the extra `local`; the table needs none of it.
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    plots = ""
    if report.bars:
        figure = make_subplots(
            rows=2, cols=1, shared_xaxes=True, subplot_titles=("Device hours", "Tokens")
        )
        colours = ("#1f77b4", "#ff9f1c", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
        for index, tenant in enumerate(sorted({bar.tenant for bar in report.bars})):
            bars = [bar for bar in report.bars if bar.tenant == tenant]
            times = [bar.begin for bar in bars]
            for row, values in (
                (1, [bar.device_hours for bar in bars]),
                (2, [bar.tokens for bar in bars]),
            ):
                figure.add_trace(
                    go.Bar(
                        x=times,
                        y=values,
                        name=tenant,
                        legendgroup=tenant,
                        showlegend=row == 1,
                        marker_color=colours[index % len(colours)],
                    ),
                    row=row,
                    col=1,
                )
        margin = {"l": 50, "r": 10, "t": 40, "b": 60}
        figure.update_layout(
            barmode="stack",
            height=480,
            template="plotly_white",
            margin=margin,
            # Below the plots: a narrow page has no room beside them.
            legend={"orientation": "h", "y": -0.12},
            showlegend=True,
        )
        figure.update_xaxes(range=[report.begin, report.end])
        plots = figure.to_html(
            full_html=False, include_plotlyjs="inline", config={"displayModeBar": False}
        )
    cells = [row_of(one) for one in (*report.tenants, report.total)]
    path.write_text(
        _PAGE.format(
            begin=f"{report.begin:%Y-%m-%d %H:%M}",
            end=f"{report.end:%Y-%m-%d %H:%M} UTC",
            head="".join(f"<th>{name.capitalize()}</th>" for name in HEAD),
            rows="".join(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
                for row in cells
            ),
            plots=plots,
            source=html.escape(report.source),
            price=f" Worth: at {report.price:g} for each." if report.price is not None else "",
        ),
        encoding="utf-8",
    )


def report(
    since: Annotated[str, typer.Option("--since", help="How far back: 90m, 12h, 7d, 4w.")] = "7d",
    prometheus: Annotated[
        str,
        typer.Option(
            help=f"Address of Prometheus. Default: {ENV_PROMETHEUS}; without one, the jobs' status."
        ),
    ] = "",
    price: Annotated[float | None, typer.Option(help="Of a device hour, in your currency.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write a page with plots there as well.")
    ] = None,
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Say what was harvested, by tenant: tokens, device hours, and what they are worth.

    Example: windrow report --since 7d --prometheus http://prometheus:9090 --price 2.5
    """
    from windrow.usage import from_prometheus, from_status, parse_period

    end = datetime.now(UTC)
    begin = end - parse_period(since)
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(
            f"{out.parent} is not a directory", field="--out", remedy="Create it first."
        )
    if url := prometheus or os.environ.get(ENV_PROMETHEUS, ""):
        found = from_prometheus(url, begin, end, price)
    else:
        found = from_status(client(kubeconfig, context).job_objects(), begin, end, price)
    if out is not None:
        write_page(found, out)
    if as_json:
        print_json({**asdict(found), "total": asdict(found.total)})
        return
    print_line(table(HEAD, [row_of(one) for one in (*found.tenants, found.total)]))
    print_line(f"from {found.source}, {begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC")
