"""Options, tables and JSON that commands have in common."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from windrow.errors import Transient, UserError
from windrow.plain_text import printable

if TYPE_CHECKING:
    from windrow.client import WindrowClient

EXIT_FAILED, EXIT_USAGE, EXIT_TRANSIENT = 1, 2, 3

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Namespace of the job. Default: the context's.")
]
Context = Annotated[str, typer.Option("--context", help="Of the kubeconfig. Default: its current.")]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        help="Of the cluster. Default: KUBECONFIG, else that of `windrow up`, else kubectl's.",
    ),
]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Make each field of the records that a command takes an option of its own.

    A record is a dataclass whose fields are annotated as typer's parameters are. The command gets
    it whole, in place of thirty arguments that it would hand on by hand.
    """
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {
        name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        record = records.get(parameter.name)
        if record is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        of_fields = get_type_hints(record, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=of_fields[field.name],
            )
            for field in dataclasses.fields(record)
        ]

    @functools.wraps(command)
    def spread_out(**values: object) -> None:
        for name, record in records.items():
            asked = {field.name: values.pop(field.name) for field in dataclasses.fields(record)}
            values[name] = record(**asked)
        command(**values)

    kinds = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
    vars(spread_out)["__signature__"] = inspect.Signature(kinds)
    spread_out.__annotations__ = {each.name: each.annotation for each in kinds}
    return spread_out


def client(kubeconfig: Path | None, context: str = "") -> WindrowClient:
    """Return a client of the cluster that is meant."""
    # Importing the Kubernetes client takes most of a second: `--help` shall not wait for it.
    from windrow.client import WindrowClient

    if kubeconfig is None and not context and not os.environ.get("KUBECONFIG"):
        kubeconfig = _kubeconfig_of_up()
    return WindrowClient(kubeconfig, context=context)


def _kubeconfig_of_up() -> Path | None:
    try:
        from windrow_lab.cluster.up import running_kubeconfig
    except ModuleNotFoundError as error:
        if not is_lab(error):
            raise
        return None  # nor was `windrow up` ever run here
    return running_kubeconfig()


def is_lab(missing: ModuleNotFoundError) -> bool:
    """Return whether the missing module is the laptop, which a pod image's wheel leaves out."""
    return (missing.name or "").partition(".")[0] == "windrow_lab"


def without_lab(package: str = "windrow_lab") -> UserError:
    """Return the error of a command that needs what the wheel of a pod's image leaves out."""
    return UserError(
        f"this command needs {package}, which this installation of Windrow leaves out",
        remedy="Install Windrow on a laptop: `pip install '.[local]'` in its checkout.",
        reason="PartialInstallation",
    )


def plain(value: object) -> Any:  # noqa: ANN401 - JSON is any
    """Return dataclasses, and lists of them, as JSON takes them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def print_json(value: object) -> None:
    """Write a value to standard output as indented JSON."""
    print_line(json.dumps(plain(value), indent=2, default=str))


def print_line(text: str) -> None:
    """Write a line to standard output, at once; where nobody reads it any more, it is dropped.

    Words of others in it do not act on a terminal (see `printable`).

    A full disk is reported on standard error, once.
    """
    if sys.stdout is None:  # the command was started without one
        return
    try:
        sys.stdout.write(printable(text) + "\n")
        sys.stdout.flush()
    except OSError as error:
        drop_output()
        if error.errno != errno.EPIPE and sys.stderr is not None:
            sys.stderr.write(f"windrow: standard output cannot be written: {error.strerror}\n")


def tell(error: Exception) -> int:
    """Write an error to standard error, and return the exit code that says who acts."""
    if sys.stderr is not None:  # the command was started without one
        sys.stderr.write(f"windrow: {printable(str(error))}\n")
    if isinstance(error, UserError):
        return EXIT_USAGE
    return EXIT_TRANSIENT if isinstance(error, Transient) else EXIT_FAILED


def drop_output() -> None:
    """Let all further output go nowhere: its reader has gone, as a terminal that was closed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as kubectl prints them: left-aligned, three blanks apart."""
    # A cell of several lines would pass for rows.
    lines = [list(head), *[[" ".join(cell.split("\n")) for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
