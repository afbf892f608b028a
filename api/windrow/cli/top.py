"""`windrow top`: slots and jobs, live in a terminal or once as a table."""

from __future__ import annotations

import contextlib
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from windrow.cli.output import Json, Kubeconfig, client, print_json, print_line, table
from windrow.errors import Transient, UserError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from windrow.views import JobView, SlotView

HEAD = (
    "SLOT", "OBJECTIVE", "TPOT-P50", "TPOT-P99", "OVER", "BATCH", "CONTEXT", "DECODE", "FINETUNE",
    "KV", "LENT", "FREE", "HARVESTABLE", "JOB",
)  # fmt: skip
_TICKS = "▁▂▃▄▅▆▇█"
_HISTORY = 24  # looks that the small line shows
_BAR = 12
# The small line's top; the objective is at four fifths of it.
_LINE_TOP = 1.25

History = Mapping[str, Sequence[float]]
_SORTS: Mapping[str, Callable[[SlotView], tuple[object, ...]]] = {
    "name": lambda slot: (slot.namespace, slot.name),
    "tpot": lambda slot: (-ratio_of(slot), slot.name),
    "over": lambda slot: (-(slot.steps_over_objective / max(1, slot.steps)), slot.name),
    "finetune": lambda slot: (-slot.finetune_units, slot.name),
    "lent": lambda slot: (-slot.chunks.lent, slot.name),
    "job": lambda slot: (not slot.job, slot.job, slot.name),
}


def ratio_of(slot: SlotView) -> float:
    """Return the newest p99 of a slot's TPOT over its objective; 0 where one is not known."""
    return (slot.tpot_p99_s or 0.0) / slot.objective_s if slot.objective_s else 0.0


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}ms"


def _over(slot: SlotView) -> str:
    return f"{slot.steps_over_objective / slot.steps:.2%}" if slot.steps else "-"


def _doing(slot: SlotView) -> str:
    return slot.job or (slot.breaker and f"({slot.breaker})") or ("-" if slot.ready else slot.why)


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
        _over(slot),
        *figures,
        _doing(slot),
    )


# --- live -----------------------------------------------------------------------------------------


def sparkline(ratios: Sequence[float]) -> Text:
    """Return a small line of TPOT over the objective; red where it was broken."""
    from rich.text import Text

    line = Text()
    for ratio in ratios:
        tick = _TICKS[min(len(_TICKS) - 1, int(ratio / _LINE_TOP * len(_TICKS)))]
        line.append(tick, style="red" if ratio > 1 else "green")
    return line


def bar(parts: Sequence[tuple[float, str]], total: float) -> Text:
    """Return shares of `total` as a bar; each part has a style, the rest is dim."""
    from rich.text import Text

    drawn, line = 0, Text()
    reached = 0.0
    for amount, style in parts:
        reached += amount
        cells = round(_BAR * reached / total) - drawn if total else 0
        line.append("█" * cells, style=style)
        drawn += cells
    line.append("░" * (_BAR - drawn), style="bright_black")
    return line


def screen(
    slots: Sequence[SlotView], jobs: Sequence[JobView], history: History, sort: str
) -> RenderableType:
    """Return what the live display shows."""
    from rich.console import Group
    from rich.text import Text

    ordered = sorted(slots, key=_SORTS[sort])
    harvesting = sum(bool(slot.job) for slot in slots)
    rate = sum(job.tokens_per_second for job in jobs if not job.finished)
    head = Text.assemble(
        ("windrow top  ", "bold"),
        f"{len(slots)} {'slot' if len(slots) == 1 else 'slots'}, {harvesting} harvesting, ",
        (f"{rate:,.0f} tokens/s", "bold green"),
    )
    keys = Text(f"sorted by {sort}   s: another order   q: quit", style="bright_black")
    legend = Text.assemble(
        ("█ decode / KV  ", "cyan"), ("█ finetune / lent  ", "yellow"), ("░ free", "bright_black")
    )
    return Group(head, Text(), _slots(ordered, history), Text(), _jobs(jobs), Text(), legend, keys)


def _slots(slots: Sequence[SlotView], history: History) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold bright_black")
    made.add_column("SLOT", no_wrap=True, overflow="ellipsis", min_width=8)
    for name in ("TPOT P99", "OBJECTIVE"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("P99 / OBJECTIVE", no_wrap=True)
    made.add_column("OVER", justify="right", no_wrap=True)
    made.add_column("COMPUTE", no_wrap=True)
    made.add_column("MEMORY", no_wrap=True)
    made.add_column("BATCH", justify="right", no_wrap=True)
    made.add_column("JOB", overflow="ellipsis", no_wrap=True)
    for slot in slots:
        if not slot.reported:
            blank = [Text("-")] * 7
            made.add_row(slot.name, *blank, Text(slot.why, style="yellow"))
            continue
        chunks = slot.chunks
        late = "red" if ratio_of(slot) > 1 else ""
        made.add_row(
            slot.name,
            Text(_ms(slot.tpot_p99_s), style=late),
            _ms(slot.objective_s),
            sparkline(history.get(f"{slot.namespace}/{slot.name}", ())),
            _over(slot),
            bar(
                [(slot.decode_units, "cyan"), (slot.finetune_units, "yellow")],
                max(slot.compute_units, slot.decode_units + slot.finetune_units),
            ),
            bar([(chunks.kv, "cyan"), (chunks.lent + chunks.draining, "yellow")], chunks.total),
            str(slot.batch),
            Text(_doing(slot), style="" if slot.job else "yellow" if slot.breaker else ""),
        )
    return made


def _jobs(jobs: Sequence[JobView]) -> Table:
    from rich.table import Table

    from windrow.cli.jobs import row_of as job_row

    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold bright_black")
    for name in ("JOB", "STATE", "PROGRESS", "STEP", "LOSS", "TOKENS/S", "ETA", "SLOT"):
        right = name in ("STEP", "LOSS", "TOKENS/S", "ETA")
        made.add_column(name, justify="right" if right else "left", no_wrap=True)
    # Those that go on first; of the ended ones the newest few.
    going = [job for job in jobs if not job.finished]
    ended = [job for job in jobs if job.finished][-5:]
    for job in (*going, *ended):
        name, state, step, loss, rate, eta, slot, _ = job_row(job)
        done = bar([(job.step, "green")], job.total_steps)
        made.add_row(
            f"{job.namespace}/{name}", state, done, step, loss, rate, eta, slot.rpartition("/")[2]
        )
    return made


class _Keys:
    """Reads single keys of a terminal, while it is a context."""

    def __enter__(self) -> _Keys:
        self._before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)

    def within(self, seconds: float) -> str:
        """Return a key that comes within that time, or nothing."""
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return ""
        return sys.stdin.read(1)


def _live(
    look: Callable[[], tuple[list[SlotView], list[JobView]]], every_s: float, sort: str
) -> None:
    from rich.live import Live
    from rich.text import Text

    history: dict[str, deque[float]] = {}
    orders = list(_SORTS)
    with contextlib.suppress(KeyboardInterrupt), _Keys() as keys, Live(screen=True) as live:
        slots: list[SlotView] = []
        jobs: list[JobView] = []
        due = 0.0
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + every_s
                try:
                    slots, jobs = look()
                except Transient as error:
                    live.update(Text(f"{error}", style="red"), refresh=True)
                else:
                    _remember(history, slots)
            live.update(screen(slots, jobs, history, sort), refresh=True)
            key = keys.within(max(0.0, due - time.monotonic()))
            if key == "q":
                return
            if key == "s":
                sort = orders[(orders.index(sort) + 1) % len(orders)]


def _remember(history: dict[str, deque[float]], slots: Sequence[SlotView]) -> None:
    for slot in slots:
        if slot.reported:
            line = history.setdefault(f"{slot.namespace}/{slot.name}", deque(maxlen=_HISTORY))
            line.append(ratio_of(slot))


def _lines(
    look: Callable[[], tuple[list[SlotView], list[JobView]]], every_s: float, sort: str
) -> Iterator[list[SlotView]]:
    while True:
        slots, _ = look()
        yield sorted(slots, key=_SORTS[sort])
        if every_s <= 0:
            return
        time.sleep(every_s)


def top(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Of the decode pods. Default: all.")
    ] = None,
    sort: Annotated[str, typer.Option(help=f"Order of the slots: {', '.join(_SORTS)}.")] = "name",
    watch: Annotated[
        float | None,
        typer.Option("--watch", help="Look again every so many seconds; 0: once. Default: 2 live."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="A table instead of the live display.")
    ] = False,
    as_json: Json = False,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show each harvested device and the jobs: TPOT against its objective, shares, memory.

    Live in a terminal (s: another order, q: quit); once where the output is no terminal.

    Example: windrow top --sort tpot
    """
    if sort not in _SORTS:
        raise UserError(
            f"{sort!r} is no order", field="--sort", remedy=f"Choose one of {', '.join(_SORTS)}."
        )
    talk = client(kubeconfig)

    def look() -> tuple[list[SlotView], list[JobView]]:
        return talk.slots(namespace=namespace), talk.jobs(namespace=None)

    terminal = sys.stdout.isatty() and sys.stdin.isatty()
    if terminal and not plain and not as_json and watch != 0:
        _live(look, watch or 2.0, sort)
        return
    for slots in _lines(look, watch or 0.0, sort):
        print_json(slots) if as_json else print_line(table(HEAD, [row_of(s) for s in slots]))
