"""`windrow simulate`: what harvesting would give on a cluster, before there is one."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from windrow.errors import UserError, WindrowError
from windrow.protocol import error_of
from windrow_cli.output import Json, print_json, print_line, spread, table, without_lab

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}


@dataclass(frozen=True)
class SimulateOptions:
    """Options of a simulation: the fields of the simulator's settings, for a command line."""

    gpus: Annotated[int, typer.Option(help="Decode GPUs of the cluster.")] = 16
    gpu: Annotated[
        str,
        typer.Option(help="A100-80G, H100, H200 (default), L40S, RTX-6000-Ada or RTX-3090."),
    ] = ""
    model: Annotated[str, typer.Option(help="Model that decode serves.")] = "llama-3-8b"
    train: Annotated[
        str, typer.Option(help="Another model to finetune. Default: the served one, shared.")
    ] = ""
    profile: Annotated[
        Path | None, typer.Option(help="A measured LatencyProfile instead of a named GPU.")
    ] = None
    trace: Annotated[
        str, typer.Option(help="conv, code, burstgpt, or a CSV file of one of these formats.")
    ] = "conv"
    traces: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the published trace files. Without it conv is generated.",
            envvar="WINDROW_TRACES",
        ),
    ] = None
    rate: Annotated[float, typer.Option(help="Requests a second for each decode GPU.")] = 4.0
    lengths: Annotated[
        str, typer.Option(help="Mean prompt and output tokens instead of the trace's: 60:65.")
    ] = ""
    day: Annotated[
        bool, typer.Option("--day", help="The rate follows the hours of a day, over the run.")
    ] = False
    batch: Annotated[
        int, typer.Option(help="Instead of a trace: so many requests at all times.")
    ] = 0
    context: Annotated[int, typer.Option(help="Their tokens, with --batch.")] = 1024
    policy: Annotated[str, typer.Option(help="One, several with commas, or all.")] = "windrow"
    objective: Annotated[
        str, typer.Option(help="TPOT objective; several with commas: 8ms,12ms,40ms.")
    ] = "12ms"
    percentile: Annotated[float, typer.Option(help="Of the objective.")] = 99.0
    scope: Annotated[str, typer.Option(help="perStep or perRequest.")] = "perStep"
    partition: Annotated[
        str, typer.Option(help="green: each side on its own SMs; none: decode on every SM.")
    ] = "green"
    max_sm_percent: Annotated[int, typer.Option(help="Limit of the HarvestPolicy.")] = 100
    max_memory_percent: Annotated[int, typer.Option(help="Limit of the HarvestPolicy.")] = 50
    memory_gb: Annotated[float, typer.Option(help="Of the card. 0: as published.")] = 0.0
    max_batch: Annotated[int, typer.Option(help="Requests that decode runs at once.")] = 64
    prefill: Annotated[int, typer.Option(help="Prefill GPUs. 0: as many as stay below 60%.")] = 0
    seconds: Annotated[float, typer.Option(help="Simulated time.")] = 600.0
    warm_up: Annotated[float, typer.Option(help="Before it, not counted.")] = 30.0
    sample: Annotated[int, typer.Option(help="GPUs that are simulated step by step, at most.")] = 8
    price: Annotated[
        float, typer.Option(help="Dollars for an hour of a GPU. 0: a round figure of the GPU.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same figures.")] = 7
    processes: Annotated[int, typer.Option(help="Cores to use.")] = 2
    jobs: Annotated[
        int, typer.Option(help="FinetuneJobs that come. 0: one without an end on each GPU.")
    ] = 0
    job_tokens: Annotated[
        str, typer.Option(help="Tokens of a job, or least and most: 2e6-80e6.")
    ] = "20e6"
    job_list: Annotated[
        Path | None, typer.Option(help="Jobs from a CSV file: at_seconds,priority,tokens.")
    ] = None
    priorities: Annotated[str, typer.Option(help="Priorities of jobs, each with its weight.")] = (
        "0:0.9,1000:0.1"
    )
    preemption: Annotated[
        bool, typer.Option(help="A job gives its slot to one of higher priority.")
    ] = True
    load_seconds: Annotated[
        float, typer.Option(help="From a job's assignment until it trains.")
    ] = 20.0
    save_seconds: Annotated[
        float, typer.Option(help="To write the checkpoint with which a job stops.")
    ] = 2.0
    jobs_per_slot: Annotated[int, typer.Option(help="Jobs that take turns on a GPU.")] = 1
    surge: Annotated[
        float,
        typer.Option(
            help="In the middle third of the time every second cell of 4 GPUs has so many times "
            "the requests."
        ),
    ] = 1.0
    levels: Annotated[
        str, typer.Option(help="Shares of the worker in percent: 10,20,30. Default: spread.")
    ] = ""
    deferral: Annotated[
        str, typer.Option(help="How long a policy may hold a request back: 400ms.")
    ] = ""
    aggregated: Annotated[
        bool, typer.Option("--aggregated", help="Decode GPUs compute prompts themselves.")
    ] = False
    ttft: Annotated[
        str, typer.Option(help="Objective of the time to first token, with --aggregated: 500ms.")
    ] = ""
    predictor: Annotated[
        str,
        typer.Option(help="What steps teach it: windrow, harli (nothing), llmstation (records)."),
    ] = "windrow"
    without: Annotated[
        str,
        typer.Option(
            help="Protections of decode that are off, to see what each is for: guard, predictor, "
            "handover, reserve."
        ),
    ] = ""
    contention: Annotated[
        float, typer.Option(help="Assumed slow-down of decode by the worker's memory traffic.")
    ] = 0.35
    rates: Annotated[
        str,
        typer.Option(
            help="Of the worker, and what decode feels of it: measured (on one H200) or published "
            "(by the roofline)."
        ),
    ] = "measured"
    worker_rate: Annotated[
        str,
        typer.Option(
            help="Tokens a second of your worker on that GPU, alone and on lent memory beside an "
            "idle decode: 6458:2209. Default: as on that H200."
        ),
    ] = ""

    def settings(self) -> dict[str, Any]:
        """Return the simulator's settings.

        Raises:
            UserError: durations, shares, tokens or priorities that cannot be read.
        """
        fields = asdict(self)
        objectives, deferral = fields.pop("objective"), fields.pop("deferral")
        first_token = fields.pop("ttft")
        load_s, save_s = fields.pop("load_seconds"), fields.pop("save_seconds")
        return fields | {
            "job_tokens": _least_and_most(self.job_tokens),
            "job_list": str(self.job_list or ""),
            "priorities": _priorities(self.priorities),
            "job_load_s": load_s,
            "job_save_s": save_s,
            "profile": str(self.profile or ""),
            "traces": str(self.traces or ""),
            "objectives_ms": [milliseconds(text) for text in objectives.split(",")],
            "deferral_ms": milliseconds(deferral, "--deferral") if deferral else 0.0,
            "ttft_ms": milliseconds(first_token, "--ttft") if first_token else 0.0,
            "levels": _percents(self.levels),
            "lengths": _numbers(self.lengths, "--lengths", "means", "60:65"),
            "worker_rate": _numbers(self.worker_rate, "--worker-rate", "rates", "6458:2209"),
            "without": [name.strip() for name in self.without.split(",") if name.strip()],
        }


@spread
def simulate(
    options: SimulateOptions,
    papers: Annotated[
        bool, typer.Option("--papers", help="Instead: the papers' comparisons, on their devices.")
    ] = False,
    groups: Annotated[
        bool, typer.Option("--groups", help="Instead: slots over several GPUs beside slots of one.")
    ] = False,
    bounds: Annotated[
        bool, typer.Option("--bounds", help="Instead: every policy against the GPU's roofline.")
    ] = False,
    run: Annotated[
        Path | None, typer.Option(help="Instead: compare with a run of `windrow demo --out`.")
    ] = None,
    gpu_run: Annotated[
        Path | None, typer.Option(help="Instead: compare with a result of first light on a GPU.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the page with its plots there.")] = None,
    as_json: Json = False,
) -> None:
    """Simulate decode GPUs under a trace, with the policies, guard and reserve that production has.

    Example: windrow simulate --gpus 1000 --trace conv --rate 20 --policy all --objective 12ms
    """
    instead = (
        ["--papers"] * papers
        + ["--bounds"] * bounds
        + ["--groups"] * groups
        + [f"--run={run}"] * (run is not None)
    )
    instead += [f"--gpu-run={gpu_run}"] * (gpu_run is not None)
    if len(instead) > 1 or (instead and out):
        raise UserError(
            f"{' and '.join(instead)} cannot be had at once" if instead[1:] else "has no page",
            field=instead[0],
            remedy="Ask for one of them, without --out.",
        )
    result = start(options.settings(), [*instead, *([f"--page={out}"] if out else [])])
    if as_json:
        print_json(result)
        return
    _print(result)
    if out is not None:
        Console().print(f"page {out}", highlight=False, soft_wrap=True)


def _least_and_most(text: str) -> list[float]:
    try:
        # The dash of an exponent is none between two numbers.
        ends = [float(part) for part in re.split(r"(?<![eE])-", text)]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2) or any(not 0 < end < float("inf") for end in ends):
        raise UserError(
            f"{text!r} is not a number of tokens",
            field="--job-tokens",
            remedy="Write 20e6 or 2e6-80e6.",
        )
    return [ends[0], ends[-1]]


def _priorities(text: str) -> list[tuple[int, float]]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return [(int(value), float(weight)) for value, weight in pairs]
    except ValueError as error:
        raise UserError(
            f"{text!r} are not priorities with weights",
            field="--priorities",
            remedy="Write for example 0:90,1000:10.",
        ) from error


def _numbers(text: str, field: str, what: str, example: str) -> list[float]:
    try:
        return [float(part) for part in text.split(":")] if text else []
    except ValueError as error:
        raise UserError(
            f"{text!r} are not two {what}", field=field, remedy=f"Write for example {example}."
        ) from error


def _percents(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise UserError(
            f"{text!r} are not percents", field="--levels", remedy="Write 10,20,30."
        ) from error


def milliseconds(text: str, field: str = "--objective") -> float:
    """Read a duration as policies write it: `12ms`, `0.04s`, `900us`; a bare number is ms.

    Raises:
        UserError: it is none, or not above zero.
    """
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(us|ms|s|)\s*", text)
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 3.6e6:
        raise UserError(
            f"{text!r} is not a duration above zero", field=field, remedy="Write for example 12ms."
        )
    return value


def start(settings: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """Run the simulator as a process and return what it found, with its progress on the screen.

    Raises:
        UserError, WindrowError: it refused or failed; with what it said.
    """
    if importlib.util.find_spec("windrow_simulator") is None:
        raise without_lab("windrow_simulator")
    argv = [sys.executable, "-m", "windrow_simulator", f"--settings={json.dumps(settings)}"]
    argv += options
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    said: list[str] = []
    console = Console(stderr=True)
    try:
        with console.status("simulating", spinner="dots") as status:
            for line in child.stderr:
                said.append(line)
                status.update(line.strip())
        answer = child.stdout.read()
    finally:
        if child.poll() is None:
            child.terminate()
        code = child.wait()
    try:
        result: dict[str, Any] = json.loads(answer)
    except ValueError:
        raise WindrowError("".join(said[-20:]).strip() or "it ended without output") from None
    if (error := error_of(result, user_error=code == 2)) is not None:
        raise error
    return result


def _print(result: dict[str, Any]) -> None:
    for shown in result["tables"]:
        print_line(f"{shown['title']}\n\n{table(shown['head'], shown['rows'])}\n")
        if shown["said"]:
            print_line(shown["said"])
    for note in result.get("ground", {}).get("notes", ()):
        print_line(note)
