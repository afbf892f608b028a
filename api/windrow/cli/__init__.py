"""The `windrow` command.

Exit codes: 0 done; 1 it failed; 2 the command line, a manifest or a file must be mended; 3
something is not reachable just now: try again; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys

import typer

from windrow.cli import (
    clusters,
    doctor,
    explain,
    finetune,
    inject,
    jobs,
    memory,
    monitor,
    plan,
    profile,
    report,
    simulate,
    top,
)
from windrow.cli import run as running
from windrow.errors import Transient, UserError, WindrowError

EXIT_FAILED, EXIT_USAGE, EXIT_TRANSIENT = 1, 2, 3

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 mend the input, 3 not reachable now, 130 interrupted.",
)


@app.callback()
def windrow() -> None:
    """Harvest idle decode compute for LoRA finetuning."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


app.command("demo")(clusters.demo)
app.command("up")(clusters.up)
app.command("down")(clusters.down)
app.command("finetune")(finetune.finetune)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("inject")(inject.inject)
app.command("submit")(jobs.submit)
app.command("get")(jobs.get)
app.command("describe")(jobs.describe)
app.command("suspend")(jobs.suspend)
app.command("resume")(jobs.resume)
app.command("delete")(jobs.delete)
app.command("logs")(jobs.logs)
app.command("top")(top.top)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("monitor")(monitor.monitor)
app.command("adapter")(jobs.adapter)
app.command("run", context_settings={"ignore_unknown_options": True})(running.run)
app.command("profile")(profile.profile)
app.command("doctor")(doctor.doctor)
app.add_typer(memory.app, name="memory")


def run(arguments: list[str] | None = None, *, name: str = "windrow") -> int:
    """Run one command and return its exit code; `name` is how the program was called."""
    try:
        app(arguments, prog_name=name)
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else EXIT_FAILED
    except UserError as e:
        return _tell(e, EXIT_USAGE)
    except Transient as e:
        return _tell(e, EXIT_TRANSIENT)
    except (WindrowError, TimeoutError) as e:
        return _tell(e, EXIT_FAILED)
    return 0


def _tell(error: Exception, code: int) -> int:
    if sys.stderr is not None:  # the command was started without one
        sys.stderr.write(f"windrow: {error}\n")
    return code


def main() -> None:
    """Entry point of the console script."""
    raise SystemExit(run())


def kubectl_plugin() -> None:
    """Entry point of `kubectl-windrow`, which kubectl finds as `kubectl windrow`."""
    raise SystemExit(run(name="kubectl windrow"))
