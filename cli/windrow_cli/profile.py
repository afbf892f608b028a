"""`windrow profile`: how fast this machine decodes a model, alone and beside a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from windrow.errors import Transient, UserError, WindrowError
from windrow.rundir import profile_cache, profile_file
from windrow_cli.output import Json, print_json, print_line, table

if TYPE_CHECKING:
    from windrow.crd import LatencyProfileSpec

# Loading, starting and a profile of a minute at most.
_TIMEOUT_S = 900
# What the engine says of a noisy machine (`windrow_sidecar.engines.profile`).
NOISE_LIMIT_PERCENT = 15.0


def profile(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A checkpoint, or a profile to look at (.json).")
    ],
    effort: Annotated[str, typer.Option(help="full (a minute at most) or quick.")] = "full",
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:N.")] = "cpu",
    random_weights: Annotated[
        int | None, typer.Option(help="Seed of random weights: the model needs only a config.json.")
    ] = None,
    max_running_requests: Annotated[int, typer.Option(help="As decode will have it.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(help="Write it there. Default: where engines of this user look for one."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a page with measured against predicted steps.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure decode's steps on every share of this device, alone and beside a worker's load.

    The next engine of this device, version and model reads the profile back, checks it with a few
    steps and refines it while it runs. A machine that is too busy to be measured is refused.
    Interrupted, it goes on where it was if it is asked for again within an hour.

    Example: windrow profile models/tiny-llama --plot profile.html
    """
    from windrow.crd import parse_profile_spec

    if model.suffix == ".json":
        found = json.loads(_read(model))
        spec = parse_profile_spec(found)
    else:
        found = _measure(model, effort, device, random_weights, max_running_requests)
        spec = parse_profile_spec(found)
        if spec.noise_percent > NOISE_LIMIT_PERCENT:
            raise Transient(
                f"this machine is too noisy to be profiled: steps of one kind scatter by "
                f"{spec.noise_percent:.0f}% around their median, {NOISE_LIMIT_PERCENT:.0f}% at "
                "most would do. Stop what else runs here, then try again."
            )
        path = out or profile_cache(os.environ) / profile_file(spec.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))
        if not as_json:
            print_line(f"profile written to {path}")
    if plot is not None:
        write_plot(spec, plot)
    print_json(found) if as_json else print_line(summary(spec))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})", field="MODEL") from error


def _measure(
    model: Path, effort: str, device: str, seed: int | None, max_running: int
) -> dict[str, object]:
    """Run an engine that profiles itself and ends."""
    if effort not in ("quick", "full"):
        raise UserError(f"{effort!r} is not an effort", field="--effort", remedy="quick or full.")
    with tempfile.TemporaryDirectory(prefix="windrow-profile-") as folder:
        written = Path(folder, "profile.json")
        command = [
            sys.executable, "-m", "windrow_sidecar.engines.builtin", "--model-path", str(model),
            "--port", "0", "--device", device, "--profile", effort, "--profile-only", str(written),
            "--max-running-requests", str(max_running),
        ]  # fmt: skip
        if seed is not None:
            command += ["--random-weights", str(seed)]
        with Console(stderr=True).status("measuring decode's steps, a minute at most"):
            run = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
        if run.returncode != 0 or not written.exists():
            last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise WindrowError(f"the engine could not be profiled: {last}")
        found: dict[str, object] = json.loads(written.read_text())
        return found


def summary(spec: LatencyProfileSpec) -> str:
    """Return a profile for people: each share, what a step costs there, and how well it fits."""
    rows = [
        (
            str(level.units),
            f"{level.c0_us / 1000:.2f} ms",
            f"{level.b0_us:.1f} us",
            f"{level.k0_ns_per_token:.1f} ns",
            f"{level.predict_us(8, 8192) / 1000:.2f} ms",
            f"{level.median_abs_error_percent:.1f}%",
        )
        for level in spec.solo
    ]
    head = ("DECODE UNITS", "STEP", "PER REQUEST", "PER TOKEN", "8 x 1,024", "ERROR")
    beside = "beside a worker: not measured yet; learned when one runs"
    if spec.co_run is not None:
        beside = (
            f"beside a worker: x max(1, {spec.co_run.b1:.2f} of decode's share + "
            f"{spec.co_run.k1:.2f} of the worker's), error "
            f"{spec.co_run.median_abs_error_percent:.1f}%, from {spec.co_run.samples} points"
        )
    noise = f"steps of one kind scatter by {spec.noise_percent:.1f}%"
    return "\n".join((spec.key, table(head, rows), beside, noise))


def write_plot(spec: LatencyProfileSpec, path: Path) -> None:
    """Write a page: each measured point against what the profile says of it."""
    import plotly.graph_objects as go

    models = {level.units: level for level in spec.solo}
    page = go.Figure()
    for units in sorted(models):
        for finetune in sorted({s.finetune_units for s in spec.samples if s.units == units}):
            points = [s for s in spec.samples if (s.units, s.finetune_units) == (units, finetune)]
            stretch = 1.0
            if finetune and spec.co_run is not None:
                whole = max(models)
                shares = spec.co_run.b1 * units / whole + spec.co_run.k1 * finetune / whole
                stretch = max(1.0, shares)
            page.add_trace(
                go.Scatter(
                    x=[s.step_us / 1000 for s in points],
                    y=[
                        stretch * models[units].predict_us(s.batch, s.context_tokens) / 1000
                        for s in points
                    ],
                    mode="markers",
                    name=f"decode {units}" + (f", worker {finetune}" if finetune else ", alone"),
                    text=[f"batch {s.batch}, {s.context_tokens:,} tokens" for s in points],
                )
            )
    longest = max((s.step_us / 1000 for s in spec.samples), default=1.0)
    page.add_shape(type="line", x0=0, y0=0, x1=longest, y1=longest, line={"dash": "dot"})
    page.update_layout(
        title=f"Decode steps, {spec.key}",
        xaxis_title="measured, ms",
        yaxis_title="predicted, ms",
        template="plotly_white",
    )
    page.write_html(path, include_plotlyjs="inline")
