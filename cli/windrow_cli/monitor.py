"""`windrow monitor`: a Prometheus over the cluster that `windrow up` left running."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from windrow.errors import UserError
from windrow_cli.output import Json, print_json, print_line


def monitor(
    port: Annotated[int, typer.Option(help="Of its pages; 0: any free one.")] = 9090,
    data: Annotated[Path, typer.Option(help="Folder for samples and log; they stay.")] = Path(
        "out/prometheus"
    ),
    targets: Annotated[
        bool, typer.Option("--targets", help="Only print the addresses to scrape.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run Prometheus over the cluster of `windrow up`, with Windrow's rules, until Ctrl-C.

    Grafana: add it as a data source and import deploy/helm/windrow/dashboards/*.json.

    Example: windrow monitor --port 9090
    """
    from windrow_lab.cluster import monitoring
    from windrow_lab.cluster.up import running_cluster

    standing = running_cluster()
    if standing is None:
        raise UserError("no local cluster is up", remedy="Start one with `windrow up`.")
    directory = Path(standing.directory)
    if targets:
        found = monitoring.targets(directory)
        print_json(found) if as_json else print_line("\n".join(found))
        return
    with monitoring.Prometheus(directory, data, port) as prometheus:
        print_json({"url": prometheus.url}) if as_json else print_line(
            f"Prometheus at {prometheus.url}, samples in {data}; Ctrl-C ends it"
        )
        with contextlib.suppress(KeyboardInterrupt):
            for _ in prometheus.follow():
                pass
