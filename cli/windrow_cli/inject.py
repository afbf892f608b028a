"""`windrow inject`: what would be added to a pod, and why, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from windrow.errors import UserError, WindrowError
from windrow_cli.output import Json, print_json, print_line

_TEMPLATED = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job", "LeaderWorkerSet")


def inject(
    file: Annotated[Path, typer.Option("-f", "--file", help="Manifest of a pod or its template.")],
    policy: Annotated[
        Path | None,
        typer.Option(help="HarvestPolicy manifest. Default: as under one that selects the pod."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what Windrow would add to a pod when it is created, and why or why not.

    Example: windrow inject -f pod.yaml --policy examples/harvestpolicy.yaml
    """
    asked = {"pod": _pod(_manifest(file), file), "policy": _manifest(policy) if policy else None}
    done = subprocess.run(
        [sys.executable, "-m", "windrow_operator.preview"],
        input=json.dumps(asked, default=str),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise WindrowError(f"the pod could not be looked at: {' '.join(last)}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if as_json:
        print_json(answer)
        return
    if not answer["touched"]:
        print_line(f"left as it is: {answer.get('why') or 'it has everything already'}")
        return
    print_line(f"decodes by rule `{answer['rule']}`, form {answer['form']}")
    for operation in answer["patch"]:
        print_line(f"--- {operation['op']} {operation['path']}")
        print_line(yaml.safe_dump(operation["value"], sort_keys=False).rstrip())
    print_line(f"GPU access {answer['gpu']['access']}: {answer['gpu']['why']}")
    for warning in answer["warnings"]:
        print_line(f"warning: {warning}")
    if answer["form"] == "attach":
        print_line(
            "The sidecar itself is attached later, while decode serves: when a job waits for it, "
            "or at once under a policy in mode observe."
        )


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}", remedy="Give a manifest.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no single manifest", remedy="Give a file with one object.")
    return found


def _pod(found: dict[str, Any], path: Path) -> dict[str, Any]:
    kind = found.get("kind", "Pod")
    if kind in _TEMPLATED:
        spec = found.get("spec") or {}
        template = spec.get("template") or (spec.get("leaderWorkerTemplate") or {}).get(
            "workerTemplate"
        )
        if template:
            return dict(template)
    elif kind == "Pod" and found.get("spec"):
        return found
    raise UserError(
        f"{path} is a {kind} without a pod",
        field="--file",
        remedy=f"Give a Pod, or a {', '.join(_TEMPLATED)}.",
    )
