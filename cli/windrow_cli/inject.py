"""`windrow inject`: what would be added to a pod, and why, without a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from windrow.errors import UserError, WindrowError
from windrow_cli.output import EXIT_USAGE, Json, print_json, print_line

_KINDS = (
    "a Pod, a Deployment, StatefulSet, DaemonSet or Job, a LeaderWorkerSet, DisaggregatedSet, "
    "RoleBasedGroup, DynamoGraphDeployment, LLMInferenceService, or a runtime of OME or KServe"
)


def inject(
    file: Annotated[
        Path,
        typer.Option("-f", "--file", help="Manifests of pods, or of what makes them; -: stdin."),
    ],
    policy: Annotated[
        Path | None,
        typer.Option(help="HarvestPolicy manifest. Default: as under one that selects the pod."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what Windrow would add to a pod when it is created, and why or why not.

    Example: windrow inject -f pod.yaml --policy examples/harvestpolicy.yaml
    """
    manifests = _manifests(file)
    asked = {"manifests": manifests, "policy": _manifest(policy) if policy else None}
    done = subprocess.run(
        [sys.executable, "-m", "windrow_operator.preview"],
        input=json.dumps(asked, default=str),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise _failure(file, (done.stderr.strip().splitlines() or [""])[-1])
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    if not answers:
        kinds = sorted({str(each.get("kind", "Pod")) for each in manifests})
        what = f"is a {', '.join(kinds)}" if kinds else "is empty:"
        raise UserError(f"{file} {what} without a pod", field="--file", remedy=f"Give {_KINDS}.")
    if as_json:
        print_json(answers[0] if len(answers) == 1 else answers)
    for answer in [] if as_json else answers:
        if len(answers) > 1:
            print_line(f"=== {answer['where']}")
        _print(answer)
    if any(answer.get("refused") for answer in answers):
        raise typer.Exit(EXIT_USAGE)


def _failure(file: Path, last: str) -> WindrowError:
    """Return the error of a preview that ended with this line of its traceback."""
    kind, _, said = last.partition(": ")
    if kind == f"{UserError.__module__}.{UserError.__name__}":
        return UserError(said, field="--policy")
    if kind in ("AttributeError", "KeyError", "TypeError"):
        return UserError(
            f"a manifest of {file} does not fit its kind ({last})",
            field="--file",
            remedy=f"`kubectl apply --dry-run=server -f {file}` says where.",
        )
    return WindrowError(f"the pod could not be checked: {last}")


def _print(answer: Mapping[str, Any]) -> None:
    if not answer["touched"]:
        print_line(f"left as it is: {answer.get('why') or 'it has everything already'}")
        return
    print_line(f"decodes by rule `{answer['rule']}`, form {answer['form']}")
    print_line(f"container {', '.join(answer['decoders'])}, by {answer['evidence']}")
    for operation in answer["patch"]:
        print_line(f"--- {operation['op']} {operation['path']}")
        print_line(yaml.safe_dump(operation["value"], sort_keys=False).rstrip())
    print_line(f"GPU access {answer['gpu']['access']}: {answer['gpu']['why']}")
    for warning in answer["warnings"]:
        print_line(f"warning: {warning}")
    for note in answer["notes"]:
        print_line(f"note: {note}")
    if answer["refused"]:
        end = "serve, but not be harvested" if answer["starts"] else "not start"
        print_line(f"decode would {end}: {answer['refused']}")
    if answer["form"] == "attach":
        print_line(
            "The sidecar itself is attached later, while decode serves: when a job waits for it, "
            "or at once under a policy in mode observe."
        )


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}", remedy="Give a manifest.") from error
    if not isinstance(found, dict):
        raise UserError(
            f"{path} does not contain exactly one manifest", remedy="Give a file with one object."
        )
    return found


def _manifests(path: Path) -> list[dict[str, Any]]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        found = [body for body in yaml.safe_load_all(text) if body is not None]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path} cannot be read: {error}",
            remedy="Give manifests, with the values of their templates filled in.",
        ) from error
    if not all(isinstance(body, dict) for body in found):
        raise UserError(
            f"{path} contains something that is not a manifest", remedy=f"Give {_KINDS}."
        )
    return found
