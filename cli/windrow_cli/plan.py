"""`windrow plan`: what a step of a job would run, before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from windrow.errors import UserError, WindrowError
from windrow.protocol import error_of
from windrow_cli.output import Json, print_json

# Of `windrow_sidecar.finetune.engine.orders`.
_ORDERS = ("layer-major", "token-major", "interleaved")
_MEMORY = {
    "graphs": "graphs of layers",
    "boundaries": "activations between layers",
    "key_values": "keys and values of windows",
    "key_value_sums": "sums of their gradients",
    "state": "gradients of the adapter",
}
_WORDS = {"fwd": "forward", "loss": "loss", "bwd": "backward", "opt": "optimizer"}


def plan(
    manifest: Annotated[Path, typer.Argument(help="FinetuneJob manifest.")],
    model: Annotated[Path | None, typer.Option(help="Another model directory.")] = None,
    order: Annotated[
        str,
        typer.Option(
            help="layer-major, which is what every worker runs; token-major or interleaved, to "
            "compare with it."
        ),
    ] = "layer-major",
    window: Annotated[int, typer.Option(help="Tokens of a row. 0: whole rows.", min=0)] = 0,
    bound_ms: Annotated[
        float, typer.Option(help="Cut so that a tasklet takes no longer, as beside decode.", min=0)
    ] = 0.0,
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches that visit a layer together.", min=1)
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:N.")] = "cpu",
    units: Annotated[
        int | None, typer.Option(help="Cores or SMs to use. Default: all.", min=1)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what a step of a job would run: phases, layers, tokens, bytes, times of this machine.

    Example: windrow plan examples/finetunejob.yaml --bound-ms 5
    """
    if order not in _ORDERS:
        raise UserError(
            f"{order!r} is not an order", field="--order", remedy=f"Write {', '.join(_ORDERS)}."
        )
    argv = [
        sys.executable,
        "-m",
        "windrow_sidecar.finetune.standalone.preview",
        f"--job={manifest}",
    ]
    argv += [f"--order={order}", f"--window={window}", f"--bound-ms={bound_ms}"]
    argv += [f"--micro-batches={micro_batches}", f"--device={device}"]
    if units is not None:
        argv.append(f"--units={units}")
    if model is not None:
        argv.append(f"--model={model}")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    shown = _understood(done)
    if as_json:
        print_json(shown)
        return
    _print(shown)


def _understood(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the plan.

    Raises:
        UserError, WindrowError: there is none; with the whole of what was said.
    """
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise WindrowError(done.stderr.strip() or "it ended without output") from None
    if (error := error_of(said, user_error=done.returncode == 2)) is not None:
        raise error
    return said


def _print(shown: dict[str, Any]) -> None:
    title = (
        f"{shown['model']}: a step, {shown['order']}, {shown['units']} units of {shown['device']}"
    )
    table = Table("", "phase", "layers", "tokens", "rows", "MiB", "ms", title=title)
    for number, at in enumerate(shown["tasklets"]):
        first, end = at["layers"]
        begin, last = at["tokens"]
        layers = f"{first}" if end - first == 1 else f"{first}-{end - 1}"
        table.add_row(
            str(number),
            _WORDS[at["phase"]],
            layers if end > first else "",
            f"{begin}-{last}" if at["rows"] else "",
            " ".join(map(str, at["rows"])),
            f"{at['bytes'] / 2**20:+.2f}" if at["bytes"] else "",
            f"{at['estimate_us'] / 1e3:.2f}" if at["estimate_us"] else "",
        )
    console = Console()
    console.print(table)
    total = sum(at["estimate_us"] for at in shown["tasklets"]) / 1e3
    longest = max(at["estimate_us"] for at in shown["tasklets"]) / 1e3
    console.print(
        f"{len(shown['tasklets'])} tasklets, {total:.0f} ms in all, the longest {longest:.2f} ms"
    )
    parts = ", ".join(
        f"{_MEMORY[part]} {n_bytes / 2**20:.2f}"
        for part, n_bytes in shown["memory"].items()
        if n_bytes
    )
    console.print(
        f"at most {sum(shown['memory'].values()) / 2**20:.2f} MiB at once, for "
        f"{shown['tokens_at_once']} tokens: {parts}"
    )
    if shown["layer_program"] != "eager":
        console.print(f"layers run {shown['layer_program']}")
    if shown["layer_program_why"]:
        console.print(shown["layer_program_why"])
    if (graphs := shown["graphs"]) is not None:
        how = "measured" if graphs["measured"] else "for one shape on one share, estimated by nodes"
        console.print(
            f"the driver takes {graphs['driver_bytes'] / 2**20:.0f} MiB for graphs ({how})"
        )
    if shown["packing"]:
        console.print(shown["packing"])
    if shown["windows_refused"]:
        console.print(f"rows are not cut into windows: {shown['windows_refused']}")
