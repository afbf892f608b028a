"""The `windrow` command.

Exit codes: 0 done; 1 it failed; 2 the command line, a manifest or a file must be fixed; 3
something is not reachable just now: try again; 130 interrupted. What ends a command is a line on
standard error and, where it was asked for `--json`, an object on standard output too.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import typer

from windrow.errors import WindrowError
from windrow_cli import (
    clusters,
    doctor,
    explain,
    finetune,
    inject,
    jobs,
    memory,
    monitor,
    off,
    plan,
    profile,
    report,
    serve_api,
    simulate,
    top,
)
from windrow_cli import run as running
from windrow_cli.output import (
    EXIT_FAILED,
    EXIT_TRANSIENT,
    EXIT_USAGE,
    is_lab,
    print_json,
    tell,
    without_lab,
)

__all__ = ["EXIT_FAILED", "EXIT_TRANSIENT", "EXIT_USAGE", "app", "main", "run"]

# What the parser raises: typer brings its own click along, and exports only its subclasses.
_ParserError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 correct the input, 3 unreachable now, 130 interrupted.",
)


@app.callback()
def windrow() -> None:
    """Harvest idle decode compute for LoRA finetuning."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # urllib3 warns at each try; the error that ends the command says where and why.
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)


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
app.command("off")(off.off)
app.command("on")(off.on)
app.command("explain")(explain.explain)
app.command("report")(report.report)
app.command("serve-api")(serve_api.serve_api)
app.command("monitor")(monitor.monitor)
app.command("adapter")(jobs.adapter)
app.command("run", context_settings={"ignore_unknown_options": True})(running.run)
app.command("profile")(profile.profile)
app.command("doctor")(doctor.doctor)
app.add_typer(memory.app, name="memory")


def run(arguments: list[str] | None = None, *, name: str = "windrow") -> int:
    """Run one command and return its exit code; `name` is how the program was called."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = _call(arguments, name)
    except _ParserError as error:
        error.show()
        problem = {"error": error.format_message(), "field": "", "remedy": ""}
        code = error.exit_code
    except (WindrowError, TimeoutError) as error:
        problem = {
            "error": str(error),
            "field": getattr(error, "field", ""),
            "remedy": getattr(error, "remedy", ""),
        }
        code = tell(error)
    except typer.Abort:
        return EXIT_FAILED
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_FAILED
    else:
        return code if isinstance(code, int) else 0
    if _asked_for_json(given):
        print_json({**problem, "exit_code": code})
    return int(code)


def _call(arguments: list[str] | None, name: str) -> Any:  # noqa: ANN401 - of typer
    try:
        return app(arguments, prog_name=name, standalone_mode=False)
    except ModuleNotFoundError as missing:
        if not is_lab(missing):
            raise
        raise without_lab() from missing


def _asked_for_json(arguments: list[str]) -> bool:
    """Return whether a command line, a wrong one too, asks for JSON on standard output.

    `--json` behind a command that hands its options on asks for none.
    """
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    command: Any = typer.main.get_command(app)
    for word in ours:
        command = getattr(command, "commands", {}).get(word, command)
    takes_it = any("--json" in each.opts for each in command.params)
    return "--json" in ours and (takes_it or hasattr(command, "commands"))


def main() -> None:
    """Entry point of the console script."""
    raise SystemExit(run())


def kubectl_plugin() -> None:
    """Entry point of `kubectl-windrow`, which kubectl finds as `kubectl windrow`."""
    raise SystemExit(run(name="kubectl windrow"))
