"""`windrow finetune`: a FinetuneJob on this machine, without any cluster."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windrow.errors import UserError, WindrowError
from windrow.protocol import Ending
from windrow.redaction import redacted
from windrow_cli.output import Json, drop_output, print_json, print_line, tell

if TYPE_CHECKING:
    from windrow_lab.finetune.local_job import LocalJob, RunSummary

_LINE_EVERY_S = 10.0
# Columns from which a bar has room beside everything that a line says.
_WIDE = 110


def finetune(
    manifests: Annotated[
        list[Path],
        typer.Argument(
            metavar="MANIFEST...",
            help="YAML files with one FinetuneJob each. Several share their base model: it is "
            "loaded once, and the jobs take turns with equal shares of the tokens.",
        ),
    ],
    units: Annotated[
        int | None, typer.Option(help="Cores or SMs to use, the last ones. Default: all.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:N.")] = "cpu",
    ranks: Annotated[
        int,
        typer.Option(
            "--tp",
            min=1,
            metavar="RANKS",
            help="Cut the model over so many ranks (tensor parallelism): processes that share the "
            "cores, or a GPU each from --device on.",
        ),
    ] = 1,
    seconds: Annotated[
        float | None,
        typer.Option(help="Only measure: train so long, print tokens/s, leave no adapter."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the checkpoints of earlier runs.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Of one job: a directory or s3://bucket/folder, instead of its "
            "spec.output.destination.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Finetune here, with the engine that runs beside decode. The same command resumes.

    Leaves a peft adapter in spec.output.destination, and below it in .windrow/: checkpoints,
    metrics.jsonl and report.html with the curves. Of several jobs each has its own, and one that
    fails does not end the others. With a bucket for a destination, log and report stay here.

    Example: windrow finetune examples/finetunejob.yaml
    """
    try:
        code = _finetune(manifests, units, device, ranks, seconds, fresh, output, as_json)
    except WindrowError as error:
        if not as_json:
            raise
        unbegun = [
            {
                "name": path.stem,
                "state": "Failed",
                "message": str(error),
                "field": getattr(error, "field", ""),
                "remedy": getattr(error, "remedy", ""),
            }
            for path in manifests
        ]
        print_json(unbegun[0] if len(unbegun) == 1 else unbegun)
        code = tell(error)
    if code:
        raise typer.Exit(code)


def _finetune(
    manifests: list[Path],
    units: int | None,
    device: str,
    ranks: int,
    seconds: float | None,
    fresh: bool,
    output: str | None,
    as_json: bool,
) -> int:
    """Run the jobs and return the exit code.

    Raises:
        WindrowError: none of them could begin.
    """
    from windrow_lab.finetune import local_job as local

    if seconds is not None and not 0 < seconds < math.inf:
        raise UserError(
            f"{seconds:g} seconds cannot be measured",
            field="--seconds",
            remedy="Write a number above zero, and not an endless one.",
        )
    if ranks > 1 and (manifests[1:] or seconds is not None):
        what = "several jobs" if manifests[1:] else "--seconds"
        raise UserError(
            f"{what} and a model that is cut over {ranks} ranks cannot be combined yet",
            field="--tp",
            remedy="Leave one of the two out.",
        )
    if output is not None and manifests[1:]:
        raise UserError(
            f"{len(manifests)} jobs cannot write to one place",
            field="--output",
            remedy="Give each job a spec.output.destination of its own.",
        )
    jobs = [local.read_local_job(manifest, output) for manifest in manifests]
    local.check_apart(jobs)
    arguments = ["--device", device] if units is None else ["--device", device, f"--units={units}"]
    arguments += [] if ranks == 1 else ["--tp", str(ranks)]
    arguments += [] if output is None else ["--output", output]
    if seconds is not None:
        _measure(jobs, [*arguments, "--seconds", str(seconds)])
        return 0
    if fresh:
        arguments.append("--fresh")
        for job in jobs:
            local.forget(job, (lambda line: None) if as_json else print_line)
    for job in jobs if not as_json else ():
        for note in local.without_cluster(job.spec):
            print_line(f"note: {job.name}: {note}")
    begun = time.monotonic()
    names = [job.name for job in jobs]
    with (
        _passed_on() as asked,  # before there is anybody to pass it on to
        local.started(jobs, *arguments) as process,
        asked.to(process),
        _shown(names, as_json) as show,
    ):
        summaries = local.listen(process, len(jobs), _while_read(show))
    code = process.returncode
    if asked.came and code == -signal.SIGTERM:  # it was still importing what it needs
        summaries, code = (
            [each if each.ended else local.unbegun(each) for each in summaries],
            Ending.STOPPED,
        )
    log = jobs[0].folder / local.WORKER_LOG
    seconds = time.monotonic() - begun
    results = [_result(*each, seconds, log) for each in zip(jobs, summaries, strict=True)]
    if as_json:
        print_json(results[0] if len(results) == 1 else results)
    else:
        for result, heard in zip(results, summaries, strict=True):
            _say(result, heard, alone=len(results) == 1)
    codes: dict[int, int] = {Ending.SUCCEEDED: 0, Ending.USER_ERROR: 2, Ending.STOPPED: 130}
    return codes.get(code, 1)


def _measure(jobs: list[LocalJob], arguments: list[str]) -> None:
    from windrow_lab.finetune import local_job as local

    with local.started(jobs, *arguments) as process:
        out = local.measured(process)
    if process.returncode:
        log = jobs[0].folder / local.WORKER_LOG
        raise WindrowError(f"nothing was measured; see {log}: {local.last_error(log)}")
    print_line(out)


class _Asked:
    """Signals that ask to stop, for the worker: it writes a checkpoint first."""

    def __init__(self) -> None:
        self.came = False
        self._process: Any = None

    def hear(self, *_: object) -> None:
        self.came = True
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    @contextmanager
    def to(self, process: Any) -> Iterator[None]:  # noqa: ANN401
        """Pass them on to a process, also one that has come before it was there."""
        self._process = process
        if self.came:
            process.send_signal(signal.SIGTERM)
        yield


@contextmanager
def _passed_on() -> Iterator[_Asked]:
    """Hear Ctrl-C, the signal of containers, Slurm and `timeout`, and that of a closed terminal."""
    asked = _Asked()
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {end: signal.signal(end, asked.hear) for end in ends}
    try:
        yield asked
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


def _while_read(show: Callable[[int, RunSummary], None]) -> Callable[[int, RunSummary], None]:
    """Go on training where the output's reader has gone."""

    def shown(n: int, summary: RunSummary) -> None:
        try:
            show(n, summary)
        except OSError:
            drop_output()

    return shown


@contextmanager
def _shown(names: list[str], quiet: bool) -> Iterator[Callable[[int, RunSummary], None]]:
    """Show reports: a bar on a terminal, else a line every ten seconds and for each event.

    The yielded function takes a job's number and report; of several each line begins with its name.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    from windrow_lab.finetune.local_job import Pace

    console, paces = Console(), [Pace() for _ in names]
    titles = [f"{name}: " if len(names) > 1 else "" for name in names]
    if quiet:
        yield lambda n, summary: None
        return
    if not console.is_terminal:
        lines = [_Lines(title, pace) for title, pace in zip(titles, paces, strict=True)]
        yield lambda n, summary: lines[n].show(summary)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        tasks = [bar.add_task(f"{title}loading", total=None, state="") for title in titles]
        shown = [0] * len(names)

        def show(n: int, summary: RunSummary) -> None:
            for event in summary.events[shown[n] :]:
                # As it is: brackets of a path are not markup, and a path is not broken up.
                line = f"{titles[n]}{event}"
                bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            shown[n] = len(summary.events)
            bar.update(
                tasks[n],
                description=titles[n] + ("training" if summary.total_steps else "loading"),
                completed=summary.step,
                total=summary.total_steps or None,
                state=_state(summary, paces[n], short=console.width < _WIDE),
            )

        yield show


@dataclass
class _Lines:
    title: str
    pace: Any
    shown: int = 0
    due: float = 0.0
    step: int = 0

    def show(self, summary: RunSummary) -> None:
        state = _state(summary, self.pace)
        fresh = summary.events[self.shown :]
        # Before an event a line shows the progress; else one comes every ten seconds.
        if summary.step > self.step and (fresh or time.monotonic() >= self.due):
            print_line(self.title + state)
            self.step, self.due = summary.step, time.monotonic() + _LINE_EVERY_S
        for event in fresh:
            print_line(self.title + event)
        self.shown = len(summary.events)


def _state(summary: RunSummary, pace: Any, *, short: bool = False) -> str:  # noqa: ANN401
    """Return a job's state in words; what no step has reported is a dash. `short`: beside a bar."""
    rate, left = pace.see(summary)
    if not summary.total_steps:
        return ""
    optimizer = (
        f"lr {_written(summary.learning_rate, '.2e')}",
        f"grad norm {_written(summary.gradient_norm, '.3g')}",
    )
    parts = (
        f"step {summary.step}/{summary.total_steps}",
        f"loss {_written(summary.loss, '.3f')}",
        *(() if short else optimizer),
        f"{_written(rate or None, ',.0f')} tokens/s",
    )
    ahead = [f"{left:.0f} s left"] if left else []
    return ", ".join((*parts, *ahead))


def _written(figure: float | None, how: str) -> str:
    return "-" if figure is None else format(figure, how)


def _result(job: LocalJob, summary: RunSummary, seconds: float, log: Path) -> dict[str, Any]:
    from windrow_lab.finetune.curves import read_metrics
    from windrow_lab.finetune.local_job import without_cluster

    said = "warned: "
    warned = [event.removeprefix(said) for event in summary.events if event.startswith(said)]
    state = {"SUCCEEDED": "Succeeded", "STOPPED": "Stopped"}.get(summary.ended, "Failed")
    result: dict[str, Any] = {
        "name": job.name,
        "state": state,
        "message": _message(summary, log),
        "field": summary.field,
        "remedy": summary.remedy,
        "step": summary.step,
        "total_steps": summary.total_steps,
        "loss": summary.loss,
        "learning_rate": summary.learning_rate,
        "gradient_norm": summary.gradient_norm,
        "base_eval_loss": summary.base_eval_loss,
        "tuned_eval_loss": summary.tuned_eval_loss,
        "tokens": summary.tokens,
        "train_rows": summary.train_rows,
        "held_out_rows": summary.held_out_rows,
        "skipped_rows": summary.skipped_rows,
        "cut_rows": summary.cut_rows,
        "notes": [*without_cluster(job.spec), *summary.notes, *warned],
        "memory_bytes": summary.memory_bytes,
        "seconds": round(seconds, 1),
        "checkpoint": summary.checkpoint,
        "adapter": summary.adapter,
        "log": str(log),
        "report": "",
    }
    # One that did not begin has the curves of an earlier run, at most.
    try:
        if summary.total_steps and read_metrics(job.folder):
            result["report"] = str(_write_report(job, summary, result))
    except (OSError, ValueError) as error:
        # A full disk, or figures that were torn by one: what was trained does not depend on it.
        result["report_problem"] = f"the report cannot be written: {error}"
    return result


def _write_report(job: LocalJob, summary: RunSummary, result: dict[str, Any]) -> Path:
    from windrow_lab.finetune.curves import Table, flat, of_bytes, of_seconds, write_curves

    spec, done = job.spec, summary.tokens - (summary.tokens_at_first or 0)
    seconds = result["seconds"]
    ended = [
        ("State", result["state"]),
        ("Steps", f"{summary.step:,} of {summary.total_steps:,}"),
        ("Training loss, last step", _written(summary.loss, ".4f")),
        ("Held-out loss before", _written(summary.base_eval_loss, ".4f")),
        ("Held-out loss after", _written(summary.tuned_eval_loss, ".4f")),
        ("Tokens", f"{summary.tokens:,}, {done:,} of them in this run"),
        ("This run took", f"{of_seconds(seconds)}, loading and evaluations included"),
        ("Memory, peak", of_bytes(summary.memory_bytes)),
        ("Adapter", summary.adapter or "-"),
        ("Checkpoint", summary.checkpoint or "-"),
    ]
    rows = [
        ("Model", f"{spec.model.name}, revision {spec.model.revision}"),
        ("Weights", f"{spec.training.precision}, quantization {spec.model.quantization}"),
        ("Rows from", f"{redacted(spec.dataset.source)}, format {spec.dataset.format}"),
        ("Trained on", f"{summary.train_rows:,} rows"),
        ("Held out", f"{summary.held_out_rows:,} rows"),
        ("Cut", f"{summary.cut_rows:,} rows, to {spec.training.max_sequence_length:,} tokens"),
        ("Wrong, left out", f"{summary.skipped_rows:,} rows"),
    ]
    adapter = flat(spec.adapter.settings.model_dump(by_alias=True, exclude_none=True))
    training = spec.training.model_dump(mode="json", by_alias=True, exclude_none=True)
    return write_curves(
        job.folder,
        f"Windrow: {job.name}",
        result["message"],
        notes=result["notes"],
        facts=(Table("Outcome", ended), Table("Model and rows", rows)),
        settings=(
            Table(f"Adapter: {spec.adapter.type}", adapter),
            Table("Training", flat(training)),
        ),
    )


def _message(summary: RunSummary, log: Path) -> str:
    from windrow_lab.finetune.local_job import last_error

    if summary.failure or not summary.died:
        return summary.failure or (summary.events[-1] if summary.events else "")
    kept = (
        f"the last good checkpoint is {summary.checkpoint}"
        if summary.checkpoint
        else "no checkpoint"
    )
    return (
        f"the worker ended without a report: {summary.died}; {kept}; see {log}, "
        f"whose last line is: {last_error(log)}"
    )


def _say(result: dict[str, Any], summary: RunSummary, *, alone: bool) -> None:
    if not alone:
        print_line(f"{result['name']}: {result['state']}")
    if summary.died:
        print_line(f"windrow: {result['message']}")
    if result["state"] == "Stopped":
        print_line("the same command resumes from the checkpoint")
    for word in ("adapter", "report"):
        if result[word]:
            print_line(f"{word}: {result[word]}")
    if "report_problem" in result:
        print_line(f"windrow: {result['report_problem']}")
