"""`windrow serve-api`: OpenAI's calls for files, finetuning jobs and models."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from windrow_cli.output import Json
from windrow_cli.run import supervise

_TEMPLATE = "YAML file with fields of a FinetuneJob's spec, for every job."


def serve_api(
    storage: Annotated[
        str, typer.Option(help="Directory that decode pods mount, or s3://bucket/folder.")
    ],
    key_secret: Annotated[
        list[str] | None, typer.Option(help="Secret with API keys; may be given several times.")
    ] = None,
    namespace: Annotated[
        str, typer.Option("-n", "--namespace", help="Where the Secrets with API keys are.")
    ] = "windrow-system",
    job_template: Annotated[Path | None, typer.Option(help=_TEMPLATE)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8080,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Default: KUBECONFIG, else kubectl's own.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Argument(help="After --: options of python -m windrow_operator.openai_api."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve an endpoint that OpenAI's clients can upload rows to and start jobs at.

    `--json`: the log is one JSON object a line.

    Example: windrow serve-api --storage /data --key-secret api-keys
    """
    command = [sys.executable, "-m", "windrow_operator.openai_api", f"--storage={storage}"]
    command += [f"--key-secret={name}" for name in key_secret or ()]
    command += [f"--namespace={namespace}", f"--host={host}", f"--port={port}"]
    command += [f"--job-template={job_template}"] if job_template else []
    command += [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
    command += ["--log-json"] if as_json else []
    raise SystemExit(supervise([*command, *(options or ())], {**os.environ}))
