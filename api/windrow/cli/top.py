"""`windrow top`: the harvested devices, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from windrow.cli.output import Json, Kubeconfig, client, print_json, print_line, table

if TYPE_CHECKING:
    from windrow.views import SlotView

HEAD = (
    "SLOT", "OBJECTIVE", "TPOT-P50", "TPOT-P99", "OVER", "BATCH", "CONTEXT", "DECODE", "FINETUNE",
    "KV", "LENT", "FREE", "HARVESTABLE", "JOB",
)  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}ms"


def row_of(slot: SlotView) -> tuple[str, ...]:
    """Return a slot as a row under HEAD."""
    figures = ("-",) * 8
    if slot.reported:
        figures = (
            str(slot.batch),
            f"{slot.context_tokens:,}",
            str(slot.decode_units),
            str(slot.finetune_units),
            str(slot.chunks.kv),
            str(slot.chunks.lent),
            str(slot.chunks.free + slot.chunks.reserved),
            f"{slot.predicted_tokens_per_second:,.0f} tok/s",
        )
    return (
        slot.name,
        _ms(slot.objective_s),
        _ms(slot.tpot_p50_s),
        _ms(slot.tpot_p99_s),
        f"{slot.steps_over_objective / slot.steps:.2%}" if slot.steps else "-",
        *figures,
        slot.job or (slot.breaker and f"({slot.breaker})") or ("-" if slot.ready else slot.why),
    )


def top(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Of the decode pods. Default: all.")
    ] = None,
    watch: Annotated[float, typer.Option("--watch", help="Again every so many seconds.")] = 0.0,
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show each harvested device: TPOT against its objective, batch, compute, memory, job.

    Example: windrow top --watch 2
    """
    talk = client(kubeconfig)
    while True:
        slots = talk.slots(namespace=namespace)
        print_json(slots) if as_json else print_line(table(HEAD, [row_of(s) for s in slots]))
        if watch <= 0:
            return
        time.sleep(watch)
