"""The `windrow` command."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="Harvest idle decode compute for LoRA finetuning.")


@app.callback()
def windrow() -> None:
    """Harvest idle decode compute for LoRA finetuning."""


def main() -> None:
    """Entry point of the console script."""
    app()
