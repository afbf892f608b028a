"""`windrow top`: slots and jobs, live in a terminal or once as a table."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from windrow.conditions import Reason
from windrow.errors import Transient, UserError
from windrow_cli.output import (
    Context,
    Json,
    Kubeconfig,
    client,
    print_json,
    print_line,
    table,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
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
_DIM = "bright_black"
# Lines around slots and jobs: head, two heads of tables, notes of what is left out, legend, keys.
_FRAME_LINES = 8
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
    """Return a slot's job, or why it has none, and how its ranks differ where they do."""
    if slot.joined:
        doing = f"{slot.job} ({slot.joined} joined)"
    else:
        why = "-" if slot.ready else slot.why
        doing = slot.job or (slot.breaker and f"({slot.breaker})") or why
    return f"{doing}; {slot.ranks_differ}" if slot.ranks_differ else doing


def _rate(slot: SlotView) -> str:
    """Return what a worker would get; `~`: no worker has run there yet, so it is less sure."""
    sure = slot.predicted_from in ("measured", "") or not slot.predicted_tokens_per_second
    return f"{'' if sure else '~'}{slot.predicted_tokens_per_second:,.0f} tok/s"


def label_of(slot: SlotView) -> str:
    """Return a slot's name, and its ranks where there are several."""
    return f"{slot.name} x{slot.ranks}" if slot.ranks > 1 else slot.name


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
            _rate(slot),
        )
    return (
        label_of(slot),
        _ms(slot.objective_s),
        _ms(slot.tpot_p50_s),
        _ms(slot.tpot_p99_s),
        _over(slot),
        *figures,
        _doing(slot),
    )


# --- live -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Columns:
    """Columns that fit a terminal's width: figures are never cut, drawings get smaller."""

    width: int
    line: int  # looks in the small line, at least as wide as its head
    bar: int
    name: int
    figures: int  # with the space between all columns
    full: bool  # with what a narrow terminal has no room for

    @classmethod
    def of(cls, width: int) -> _Columns:
        if width >= 140:
            return cls(width, _HISTORY, _BAR, 32, 48, full=True)
        if width >= 110:
            return cls(width, 15, 8, 26, 48, full=True)
        return cls(width, 8, 6, 17, 30, full=False)


def sparkline(ratios: Sequence[float]) -> Text:
    """Return a small line of TPOT over the objective; red where it was broken."""
    from rich.text import Text

    line = Text()
    for ratio in ratios:
        tick = _TICKS[min(len(_TICKS) - 1, int(ratio / _LINE_TOP * len(_TICKS)))]
        line.append(tick, style="red" if ratio > 1 else "green")
    return line


def bar(parts: Sequence[tuple[float, str]], total: float, width: int = _BAR) -> Text:
    """Return shares of `total` as a bar; each part has a style, the rest is dim."""
    from rich.text import Text

    drawn, line = 0, Text()
    reached = 0.0
    for amount, style in parts:
        reached += amount
        cells = round(width * reached / total) - drawn if total else 0
        line.append("█" * cells, style=style)
        drawn += cells
    line.append("░" * (width - drawn), style="bright_black")
    return line


def _end_of(name: str, width: int) -> str:
    """Return a pod's name in `width` characters: it is its end that tells it from its siblings."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


class Screen:
    """Screen of the live display, as wide as there is room.

    Args:
        slots: all of them.
        jobs: likewise.
        history: ratios of TPOT to the objective, by namespace/slot, the newest last.
        sort: a name of an order.
        height: lines that there are; None: as many as it takes.
    """

    def __init__(
        self,
        slots: Sequence[SlotView],
        jobs: Sequence[JobView],
        history: History,
        sort: str,
        height: int | None = None,
    ) -> None:
        self._slots = sorted(slots, key=_SORTS[sort])
        # Those that go on first; of the ended ones the newest few.
        ended = [job for job in jobs if job.finished]
        self._jobs = [*(job for job in jobs if not job.finished), *ended[-5:]]
        self._history, self._sort, self._height = history, sort, height

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        from rich.text import Text

        columns = _Columns.of(options.max_width)
        slots, jobs = self._rooms()
        harvesting = sum(bool(slot.job) for slot in self._slots)
        refused = sum(slot.why.startswith(Reason.ENGINE_REFUSED) for slot in self._slots)
        rate = sum(job.tokens_per_second for job in self._jobs if not job.finished)
        count = len(self._slots)
        yield Text.assemble(
            ("windrow top  ", "bold"),
            f"{count} {'slot' if count == 1 else 'slots'}, {harvesting} harvesting, ",
            (f"{refused} cannot be harvested, " if refused else "", "red"),
            (f"{rate:,.0f} tokens/s", "bold green"),
        )
        yield Text()
        yield _slots(self._slots[:slots], self._history, columns)
        yield _more(count - slots, "slot")
        yield _jobs(self._jobs[:jobs], columns)
        yield _more(len(self._jobs) - jobs, "job")
        yield Text.assemble(
            ("█ decode / KV  ", "cyan"), ("█ finetune / lent  ", "yellow"), ("░ free", _DIM)
        )
        yield Text(f"sorted by {self._sort}   s: another order   q: quit", style=_DIM)

    def _rooms(self) -> tuple[int, int]:
        """Return how many slots and jobs there is room for."""
        slots, jobs = len(self._slots), len(self._jobs)
        if self._height is None:
            return slots, jobs
        room = max(2, self._height - _FRAME_LINES)
        jobs = min(jobs, max(room - slots, room // 3))
        return min(slots, room - jobs), jobs


def _more(count: int, what: str) -> Text:
    from rich.text import Text

    said = f"… {count} more {what}{'s' if count > 1 else ''}, for which there is no room"
    return Text(said if count > 0 else "", style=_DIM)


def _table(*columns: tuple[str, bool], room: int | None = None) -> Table:
    """Return an empty table; the last column has what is left of `room` characters."""
    from rich.table import Table

    made = Table(box=None, padding=(0, 2, 0, 0), header_style=f"bold {_DIM}")
    for name, right in columns:
        made.add_column(name, justify="right" if right else "left", no_wrap=True)
    made.columns[-1].overflow = "ellipsis"
    made.columns[-1].max_width = room
    return made


def _slots(slots: Sequence[SlotView], history: History, columns: _Columns) -> Table:
    from rich.text import Text

    full = columns.full
    heads = [("SLOT", False), ("TPOT P99", True), ("OBJECTIVE", True), ("P99 / OBJECTIVE", False)]
    heads += [("OVER", True), ("COMPUTE", False), ("MEMORY", False), ("BATCH", True)]
    if not full:
        heads = [("SLOT", False), ("P99", True), ("OBJ.", True), ("TREND", False)]
        heads += [("COMP.", False), ("MEM.", False)]
    name_width = min(columns.name, max((len(label_of(slot)) for slot in slots), default=0))
    taken = name_width + columns.line + 2 * columns.bar + columns.figures
    made = _table(*heads, ("JOB", False), room=max(8, columns.width - taken))
    for slot in slots:
        name = _end_of(label_of(slot), name_width)
        if not slot.reported:
            blank = ["-"] * (len(heads) - 1)
            made.add_row(name, *blank, Text(slot.why, style="yellow"))
            continue
        chunks = slot.chunks
        looks = list(history.get(f"{slot.namespace}/{slot.name}", ()))[-columns.line :]
        compute = bar(
            [(slot.decode_units, "cyan"), (slot.finetune_units, "yellow")],
            max(slot.compute_units, slot.decode_units + slot.finetune_units),
            columns.bar,
        )
        lent = chunks.lent + chunks.draining
        made.add_row(
            name,
            Text(_ms(slot.tpot_p99_s), style="red" if ratio_of(slot) > 1 else ""),
            _ms(slot.objective_s),
            sparkline(looks),
            *([_over(slot)] if full else []),
            compute,
            bar([(chunks.kv, "cyan"), (lent, "yellow")], chunks.total, columns.bar),
            *([str(slot.batch)] if full else []),
            Text(_doing(slot), style="" if slot.job else "yellow" if slot.breaker else ""),
        )
    return made


def _jobs(jobs: Sequence[JobView], columns: _Columns) -> Table:
    from windrow_cli.jobs import row_of as job_row

    heads = ["JOB", "STATE", "PROGRESS", "STEP", "LOSS", "TOKENS/S", "ETA", "SLOT"]
    shown = heads if columns.full else heads[:-1]
    made = _table(*((name, name in ("STEP", "LOSS", "TOKENS/S", "ETA")) for name in shown))
    for job in jobs:
        name, state, step, loss, rate, eta, slot, _ = job_row(job)
        done = bar([(job.step, "green")], job.total_steps, columns.bar)
        cells: list[Text | str] = [f"{job.namespace}/{name}", state, done, step, loss, rate, eta]
        made.add_row(
            *cells, *([_end_of(slot.rpartition("/")[2], columns.name)] if columns.full else [])
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
        """Return the keys that come within that time; nothing where none does."""
        file = sys.stdin.fileno()
        if not select.select([file], [], [], seconds)[0]:
            return ""
        # Not by sys.stdin: it would keep further keys to itself, where select does not see them.
        return os.read(file, 64).decode(errors="ignore") or "q"  # nothing more: the terminal ended


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
        due, away = 0.0, ""
        while True:
            if time.monotonic() >= due:
                due = time.monotonic() + every_s
                try:
                    slots, jobs = look()
                    away = ""
                except Transient as error:
                    away = str(error)
                else:
                    remember(history, slots)
            if away:
                live.update(Text(away, style="red"), refresh=True)
            else:
                height = live.console.size.height
                live.update(Screen(slots, jobs, history, sort, height), refresh=True)
            for key in keys.within(max(0.0, due - time.monotonic())):
                if key == "q":
                    return
                if key == "s":
                    sort = orders[(orders.index(sort) + 1) % len(orders)]


def remember(history: dict[str, deque[float]], slots: Sequence[SlotView]) -> None:
    """Add a look to the small lines of the slots."""
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
    context: Context = "",
) -> None:
    """Show each harvested device and the jobs: TPOT against its objective, shares, memory.

    Live in a terminal (s: another order, q: quit); once where the output is not a terminal.

    Example: windrow top --sort tpot
    """
    if sort not in _SORTS:
        raise UserError(
            f"{sort!r} is not an order",
            field="--sort",
            remedy=f"Choose one of {', '.join(_SORTS)}.",
        )
    talk = client(kubeconfig, context)

    def look() -> tuple[list[SlotView], list[JobView]]:
        return talk.slots(namespace=namespace), talk.jobs(namespace=None)

    terminal = sys.stdout.isatty() and sys.stdin.isatty()
    if terminal and not plain and not as_json and watch != 0:
        _live(look, watch or 2.0, sort)
        return
    for slots in _lines(look, watch or 0.0, sort):
        print_json(slots) if as_json else print_line(table(HEAD, [row_of(s) for s in slots]))
