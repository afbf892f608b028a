"""Finetune jobs from the command line: `windrow submit`, `get`, `describe`, `delete`, ..."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from windrow.errors import UserError
from windrow.outputs import OWN_FOLDER
from windrow.views import JobView
from windrow_cli.output import (
    Context,
    Json,
    Kubeconfig,
    Namespace,
    client,
    plain,
    print_json,
    print_line,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HEAD = ("NAME", "STATE", "STEP", "LOSS", "TOKENS/S", "ETA", "SLOT", "MODEL")
Name = Annotated[str, typer.Argument(help="Name of the FinetuneJob.")]


def row_of(job: JobView) -> tuple[str, ...]:
    """Return a job as a row under HEAD."""
    return (
        job.name,
        job.state,
        job.steps_done,
        f"{job.loss:.3f}" if job.loss is not None else "-",
        f"{job.tokens_per_second:,.0f}" if job.tokens_per_second else "-",
        f"{job.eta_s:.0f}s" if job.eta_s is not None and not job.finished else "-",
        job.slot or "-",
        job.model,
    )


def submit(
    manifest: Annotated[
        Path, typer.Argument(help="YAML file with one FinetuneJob, or one HarvestPolicy.")
    ],
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help="Instead of the manifest's.")
    ] = "",
    wait: Annotated[bool, typer.Option("--wait", help="Return when the job has ended.")] = False,
    within: Annotated[float, typer.Option(help="Seconds to wait at most; 0: no limit.")] = 0.0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a policy that others manage (kubectl, Argo).")
    ] = False,
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Create a FinetuneJob, or apply a HarvestPolicy. The spec is checked before anything is sent.

    Example: windrow submit examples/finetunejob.yaml --wait
    """
    from windrow.client import read_manifest
    from windrow.crd import HARVEST_POLICY

    talk = client(kubeconfig, context)
    body = read_manifest(manifest)
    if body.get("kind") == HARVEST_POLICY.kind:
        if wait:
            raise UserError("a policy does not end", field="--wait", remedy="Leave it out.")
        name = talk.apply_policy(body, namespace=namespace, force=force)
        print_json({"policy": name}) if as_json else print_line(f"policy {name} applied")
        return
    if force:
        raise UserError("a job is never replaced", field="--force", remedy="Leave it out.")
    job = talk.submit(body, namespace=namespace)
    if not wait:
        print_json(job) if as_json else print_line(f"{job.namespace}/{job.name} created")
        return
    job = talk.wait(
        job.name,
        namespace=job.namespace,
        within=timedelta(seconds=within) if within else None,
        on_change=None if as_json else _say_change(),
    )
    if as_json:
        print_json(job)
    if job.state != "Succeeded":
        raise typer.Exit(1)


def _say_change() -> Callable[[JobView], None]:
    said = ""

    def say(job: JobView) -> None:
        nonlocal said
        progress = f" step {job.step}/{job.total_steps}" if job.total_steps else ""
        text = f"{job.name} {job.state}{progress}" + (f": {job.message}" if job.message else "")
        if text != said:
            print_line(text)
        said = text

    return say


def get(
    name: Annotated[str | None, typer.Argument(help="A job; without: all of them.")] = None,
    namespace: Namespace = "",
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Of every namespace.")
    ] = False,
    output: Annotated[
        str,
        typer.Option("--output", "-o", help="json (as --json), yaml, or name. Default: a table."),
    ] = "",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Show jobs and how far they are.

    Example: windrow get support-tone --json
    """
    if everywhere and (name is not None or namespace):
        raise UserError(
            "cannot be combined with a job's name or --namespace",
            field="--all-namespaces",
            remedy="Leave out -A, or the job's name and --namespace.",
        )
    if output not in _OUTPUTS or (as_json and output not in ("", "json")):
        raise UserError(
            f"{output!r} is not a form of output here",
            field="--output",
            remedy="Use json, yaml or name, and --json with none but json.",
        )
    form = output or ("json" if as_json else "")
    talk = client(kubeconfig, context)
    if name is not None:
        job = talk.get(name, namespace=namespace)
        if form:
            _print_as(form, job, [job])
            return
        print_line(table(HEAD, [row_of(job)]))
        if job.message:
            print_line(job.message)
        return
    jobs = talk.jobs(namespace=None if everywhere else namespace or talk.namespace)
    if form:
        _print_as(form, jobs, jobs)
    elif everywhere:
        rows = [(job.namespace, *row_of(job)) for job in jobs]
        print_line(table(("NAMESPACE", *HEAD), rows))
    else:
        print_line(table(HEAD, [row_of(job) for job in jobs]))


_OUTPUTS = ("", "json", "yaml", "name")


def _print_as(form: str, value: object, jobs: list[JobView]) -> None:
    if form == "json":
        print_json(value)
    elif form == "yaml":
        print_line(
            yaml.safe_dump(
                json.loads(json.dumps(plain(value), default=str)), sort_keys=False
            ).rstrip()
        )
    else:
        for job in jobs:
            print_line(f"finetunejob.windrow.dev/{job.name}")


def suspend(
    name: Name,
    namespace: Namespace = "",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Have a job write a checkpoint and give its slot back.

    Example: windrow suspend support-tone
    """
    job = client(kubeconfig, context).suspend(name, namespace=namespace)
    print_json(job) if as_json else print_line(f"{job.namespace}/{job.name} will be suspended")


def resume(
    name: Name,
    namespace: Namespace = "",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Let a suspended job go on from its checkpoint.

    Example: windrow resume support-tone
    """
    job = client(kubeconfig, context).resume(name, namespace=namespace)
    print_json(job) if as_json else print_line(f"{job.namespace}/{job.name} will resume")


def delete(
    name: Name,
    namespace: Namespace = "",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Delete a job; a worker that runs it is stopped first. A finished adapter stays.

    Example: windrow delete support-tone
    """
    talk = client(kubeconfig, context)
    talk.delete(name, namespace=namespace)
    where = f"{namespace or talk.namespace}/{name}"
    print_json({"deleted": where}) if as_json else print_line(f"{where} will be deleted")


def describe(
    name: Name,
    namespace: Namespace = "",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Show a job with its conditions and what has happened to it.

    Example: windrow describe support-tone
    """
    talk = client(kubeconfig, context)
    body = talk.manifest(name, namespace=namespace)
    events = talk.events(name, namespace=namespace)
    if as_json:
        print_json({"job": body, "events": plain(events)})
        return
    job = JobView.of(body)
    print_line(table(HEAD, [row_of(job)]))
    conditions = (body.get("status") or {}).get("conditions") or []
    columns = ("type", "status", "reason", "lastTransitionTime", "message")
    rows = [[str(condition.get(column, "")) for column in columns] for condition in conditions]
    print_line("")
    print_line(table(("CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"), rows))
    print_line("")
    said = [
        (event.at, "!" if event.warning else "", event.reason, event.message) for event in events
    ]
    print_line(table(("EVENT AT", "", "REASON", "MESSAGE"), said))


def logs(
    name: Name,
    namespace: Namespace = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Until the job has ended.")
    ] = False,
    worker: Annotated[
        bool, typer.Option("--worker", "-w", help="What the worker itself has written.")
    ] = False,
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Show what has happened to a job, or what its worker has written.

    Example: windrow logs support-tone --worker --follow
    """
    talk = client(kubeconfig, context)
    if worker:
        lines = talk.worker_logs(name, namespace=namespace, follow=follow)
        if as_json:
            print_json(list(lines))
            return
        for line in lines:
            print_line(line)
        return
    if as_json:
        talk.get(name, namespace=namespace)
        print_json(talk.events(name, namespace=namespace))
        return
    for line in talk.logs(name, namespace=namespace, follow=follow):
        print_line(line)


def adapter(
    name: Name,
    out: Annotated[Path | None, typer.Option("--out", help="Copy the adapter there.")] = None,
    namespace: Namespace = "",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Say where a finished job's adapter is, or copy it.

    Example: windrow adapter support-tone --out ./support-tone
    """
    path = client(kubeconfig, context).adapter(name, namespace=namespace)
    if out is not None:
        if not Path(path).is_dir():
            raise UserError(
                f"{path} is a path in the decode pod, not on this machine",
                field="--out",
                remedy="Copy it from the volume that the job's output.destination names.",
            )
        if out.exists():
            raise UserError(f"{out} exists", field="--out", remedy="Name a directory that is new.")
        shutil.copytree(path, out, ignore=shutil.ignore_patterns(OWN_FOLDER))
        path = str(out)
    print_json({"adapter": path}) if as_json else print_line(path)
