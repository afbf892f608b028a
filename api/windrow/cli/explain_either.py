"""`windrow explain`: why a job is where it is, or why a slot decided as it did."""

from __future__ import annotations

from typing import Annotated

import typer

from windrow.cli import explain as of_slot
from windrow.cli import explain_job as of_job
from windrow.cli.output import Json, Kubeconfig, Namespace


def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB|SLOT",
            help="Name of a FinetuneJob; or the run directory of a decode pod (/run/windrow inside "
            "it), or decode's process: then its decisions.",
        ),
    ],
    around: Annotated[
        str | None,
        typer.Option(
            "--around", help="Of a slot: now, -30s, -5m, 18:02:11 (today), or an ISO time."
        ),
    ] = None,
    within: Annotated[float, typer.Option(help="Of a slot: seconds before and after it.")] = 2.0,
    namespace: Namespace = "default",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Say why a job is where it is, or show what decode decided around a moment.

    Example: windrow explain support-tone
    Example: kubectl exec decode-0 -c windrow -- windrow explain /run/windrow --around -30s
    """
    if around is not None or "/" in what or what.isdigit():
        of_slot.explain(what, around or "now", within, as_json)
    else:
        of_job.explain(what, namespace, as_json, kubeconfig)
