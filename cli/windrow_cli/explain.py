"""`windrow explain`: why a job is where it is, what a slot does, or why it decided as it did."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windrow.decisions import Decision, around, read_decisions
from windrow.errors import UserError
from windrow.rundir import ENV_RUN_DIR, RunDir
from windrow_cli.explain_job import explain_job, text_of
from windrow_cli.explain_slot import explain_slot
from windrow_cli.explain_slot import text_of as slot_text
from windrow_cli.output import (
    Context,
    Json,
    Kubeconfig,
    Namespace,
    client,
    print_json,
    print_line,
)

if TYPE_CHECKING:
    from windrow.client import WindrowClient

_RING = re.compile(rb"/decisions-(\d+)\.ring")
_AGO = re.compile(r"-(\d+(?:\.\d+)?)(s|m|h)")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def explain(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of a FinetuneJob or of a slot; or, for what decode decided there, the run "
            "directory of its pod (/run/windrow inside it), or decode's process.",
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(
            "--around",
            help="Of decisions: now (the default), -30s, -5m, 18:02:11, or an ISO time.",
        ),
    ] = None,
    within: Annotated[
        float | None, typer.Option(help="Of decisions: seconds before and after (default: 2).")
    ] = None,
    namespace: Namespace = "",
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
    context: Context = "",
) -> None:
    """Say why a job is where it is, what a slot does, or what decode decided around a moment.

    Of a job: what can be done about its state, and what has happened to it. Of a slot: its policy,
    latency and shares. Of a run directory: what decode saw, what it granted, how steps went.

    Example: windrow explain support-tone

    Example: windrow explain decode-0

    Example: kubectl exec decode-0 -c windrow -- windrow explain /run/windrow --around -30s
    """
    around_then = "now" if at is None else at
    if _has_decisions(name):
        seconds = 2.0 if within is None else within
        _explain_decisions(name, around_then, seconds, as_json=as_json)
        return
    if at is not None or within is not None:
        raise _only_in_the_pod(name, namespace, around_then)
    from windrow.client import NotFound

    talk = client(kubeconfig, context)
    try:
        job = talk.get(name, namespace=namespace)
    except NotFound as no_job:
        _explain_slot(talk, name, namespace, no_job, as_json=as_json)
        return
    slots = {f"{slot.namespace}/{slot.name}": slot for slot in talk.slots()} if job.slot else {}
    explanation = explain_job(
        job,
        talk.conditions(name, namespace=namespace),
        talk.events(name, namespace=namespace),
        slots.get(job.slot),
        datetime.now(UTC),
    )
    print_json(explanation) if as_json else print_line(text_of(explanation))


def _only_in_the_pod(slot: str, namespace: str, at: str) -> UserError:
    """Decisions are in a ring of decode's process: no store holds thousands a second."""
    where = f"-n {namespace} " if namespace else ""
    pod = slot.partition(".")[0]  # `POD.1` is its second device
    return UserError(
        f"the decisions of {slot} are in its pod",
        field="--around, --within",
        remedy=f"Ask there: kubectl exec {where}{pod} -c windrow -- windrow explain /run/windrow "
        f"--around {at}",
    )


def _explain_slot(
    talk: WindrowClient, name: str, namespace: str, no_job: UserError, *, as_json: bool
) -> None:
    namespace = namespace or talk.namespace
    slot = next((one for one in talk.slots(namespace=namespace) if one.name == name), None)
    if slot is None:
        raise UserError(
            f"there is no FinetuneJob and no slot {namespace}/{name}",
            field="NAME",
            remedy="See `windrow get` for the jobs and `windrow top` for the slots.",
        ) from no_job
    explanation = explain_slot(slot, talk.events(name, namespace=namespace), datetime.now(UTC))
    print_json(asdict(explanation)) if as_json else print_line(slot_text(explanation))


def _has_decisions(name: str) -> bool:
    """Return whether a name is a process or a path: no job has such a name, but for a number."""
    return name.isdigit() or "/" in name


def _explain_decisions(slot: str, at: str, within: float, *, as_json: bool) -> None:
    ring = ring_of(slot)
    found = around(read_decisions(ring), moment(at, datetime.now().astimezone()), within)
    if as_json:
        print_json([asdict(decision) | {"at": decision.at.isoformat()} for decision in found])
        return
    for decision in found:
        print_line(line_of(decision))
    if not found:
        print_line(f"no decision within {within:g} s of that time; the ring holds the last 8,192")


def line_of(decision: Decision) -> str:
    """Return a decision as a line for people, in local time."""
    return f"{decision.at.astimezone():%H:%M:%S.%f}"[:-3] + f"  {decision.sentence()}"


def ring_of(slot: str) -> Path:
    """Return the ring that is meant.

    Raises:
        UserError: there is no such process or directory.
    """
    if slot.isdigit():
        return _ring_of_process(Path("/proc", slot))
    path = Path(slot)
    if path.is_dir():
        return _ring_of_pod(path)
    if path.exists():
        return path
    raise UserError(
        f"{slot!r} is neither a run directory nor a process",
        field="SLOT",
        remedy="Run it inside the pod: kubectl exec POD -c windrow -- windrow explain /run/windrow",
    )


def _ring_of_pod(run_dir: Path) -> Path:
    rings = sorted(run_dir.glob("decisions-*.ring"))
    if len(rings) > 1:
        raise UserError(
            f"{str(run_dir)!r} is the run directory of {len(rings)} slots",
            field="SLOT",
            remedy=f"Name the ring of one: {', '.join(map(str, rings))}.",
        )
    return rings[0] if rings else RunDir(run_dir).decision_log()


def _ring_of_process(process: Path) -> Path:
    try:
        environment = (process / "environ").read_bytes().split(b"\0")
    except OSError as error:
        raise UserError(
            f"process {process.name} cannot be inspected ({error.strerror})",
            field="SLOT",
            remedy="Give the decode process, as the user that it runs as.",
        ) from error
    found = dict(item.partition(b"=")[::2] for item in environment)
    run_dir = found.get(ENV_RUN_DIR.encode())
    if run_dir is None:
        raise UserError(
            f"process {process.name} has no {ENV_RUN_DIR}",
            field="SLOT",
            remedy="Give a decode process of a pod that is harvested.",
        )
    # It may have another root: that of its container.
    folder = process / "root" / run_dir.decode().lstrip("/")
    ring = _RING.search((process / "maps").read_bytes())  # of its slot, if there are several
    return RunDir(folder, int(ring[1])).decision_log() if ring else _ring_of_pod(folder)


def moment(text: str, now: datetime) -> datetime:
    """Parse a moment; `now` is aware.

    Raises:
        UserError: it is none.
    """
    if text == "now":
        return now
    if ago := _AGO.fullmatch(text):
        return now - timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?", text):
            clock = datetime.strptime(  # noqa: DTZ007 - the date and zone of `now` are put in
                text.split(".")[0], "%H:%M:%S" if text.count(":") == 2 else "%H:%M"
            )
            return now.replace(
                hour=clock.hour, minute=clock.minute, second=clock.second, microsecond=0
            )
        read = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(
            f"{text!r} is not a valid time",
            field="--around",
            remedy="Write now, -30s, -5m, 18:02:11, or 2025-06-01T18:02:11Z.",
        ) from None
    return read if read.tzinfo else read.replace(tzinfo=now.tzinfo or UTC)
