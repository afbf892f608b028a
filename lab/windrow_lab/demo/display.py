"""Display of a run: one frame of the demo, as a terminal picture or as a line.

A frame is plain data read from the API server; drawing it is pure, so that tests can look at it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from windrow.views import Chunks, EventView, JobView, SlotView

HISTORY = 24
BAR_CELLS = 20
_INDENT = 10
EVENTS_SHOWN = 4
_BLOCKS = "▁▂▃▄▅▆▇█"
_GOOD, _BAD, _DIM, _HEAD = "green", "bold red", "dim", "bold"
# KV, lent, reserved (with what is draining), free: shape and colour both tell them apart.
_MEMORY = (("KV", "█", "cyan"), ("lent", "▒", "yellow"), ("reserved", "░", "blue"))


@dataclass
class History:
    """The last values of one figure."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def add(self, value: float | None) -> None:
        """Keep a value; None is left out."""
        if value is not None:
            self.values.append(value)


@dataclass(frozen=True)
class Frame:
    """Data of one picture."""

    elapsed_s: float
    kubernetes: str
    policy: str
    objective_ms: float
    phase: str  # what the run does, in words
    slots: Sequence[SlotView] = ()
    job: JobView | None = None
    tpot_history: dict[str, Sequence[float]] = field(default_factory=dict)  # p99, ms
    loss_history: Sequence[float] = ()
    events: Sequence[EventView] = ()


def sparkline(values: Iterable[float], full: float = 0.0) -> str:
    """Return one block a value: from the lowest to the highest of them, or from 0 to `full`."""
    shown = list(values)
    if not shown:
        return ""
    low, high = (0.0, full) if full else (min(shown), max(shown))
    span = (high - low) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(min(1.0, (v - low) / span) * top)] for v in shown)


def clock(seconds: float) -> str:
    """Return `00:42`, and `1:00:42` from an hour on."""
    minutes, s = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes:02}:{s:02}"


def memory_cells(chunks: Chunks, cells: int = BAR_CELLS) -> tuple[int, int, int, int]:
    """Return how many cells KV, lent, reserved and free get; what exists gets at least one."""
    if chunks.total == 0:
        return 0, 0, 0, 0
    parts = [chunks.kv, chunks.lent, chunks.reserved + chunks.draining, chunks.free]
    counts = [max(1, round(p / chunks.total * cells)) if p else 0 for p in parts]
    while sum(counts) != cells:
        grow = 1 if sum(counts) < cells else -1
        counts[counts.index(max(counts))] += grow
    return counts[0], counts[1], counts[2], counts[3]


def draw(frame: Frame) -> RenderableType:
    """Return the picture of a frame for a terminal."""
    parts: list[RenderableType] = [_head(frame), Text()]
    if not frame.slots:
        parts.append(Text(f"{frame.phase} ...", style=_DIM))
    parts.extend(_slot(slot, frame) for slot in frame.slots)
    if frame.job is not None:
        parts += [Text(), _job(frame.job, frame.loss_history)]
    if frame.events:
        parts += [Text(), *(_event(event) for event in frame.events[-EVENTS_SHOWN:])]
    return Group(*parts)


def _head(frame: Frame) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(ratio=1, no_wrap=True)
    line.add_column(justify="right")
    left = Text.assemble(
        ("windrow demo", _HEAD),
        f"   kubernetes {frame.kubernetes}   policy {frame.policy}",
        f"   objective {frame.objective_ms:.1f} ms" if frame.objective_ms else "",
    )
    line.add_row(left, Text(clock(frame.elapsed_s), style=_HEAD))
    return Group(line, _line(frame.phase, _DIM)) if frame.slots else line


def _line(text: str | Text, style: str = "") -> Text:
    """Return a text that is cut at the end of the line: a picture that lives keeps its height."""
    made = Text(text, style) if isinstance(text, str) else text
    made.no_wrap, made.overflow = True, "ellipsis"
    return made


def _slot(slot: SlotView, frame: Frame) -> RenderableType:
    first = Text.assemble(
        (f"{slot.pod:<{_INDENT - 1}} ", _HEAD), f"TPOT p50 {_ms(slot.tpot_p50_s)} "
    )
    first.append(" p99 ")
    p99 = slot.tpot_p99_s
    late = p99 is not None and p99 * 1e3 > frame.objective_ms > 0
    first.append(_ms(p99), style=_DIM if p99 is None else _BAD if late else _GOOD)
    # A full block: at the objective, or beyond it.
    history = sparkline(frame.tpot_history.get(slot.name, ()), frame.objective_ms)
    first.append(f"  {history:<{HISTORY}}", style=_DIM)
    if not slot.reported:
        return _line(first.append(f"  {slot.why}"))
    second = Text(" " * _INDENT)
    second.append(f"batch {slot.batch}  context {slot.context_tokens:,}  cores {_cores(slot)}")
    if slot.breaker:
        second.append(f"  not harvesting: {slot.breaker}", style=_BAD)
    third = Text(f"{'':<{_INDENT}}memory ")
    cells = memory_cells(slot.chunks)
    for (_, block, colour), n in zip(_MEMORY, cells, strict=False):
        third.append(block * n, style=colour)
    third.append("·" * cells[3], style=_DIM)
    c = slot.chunks
    # In the colours of the bar.
    for (name, _, colour), n in zip(_MEMORY, (c.kv, c.lent, c.reserved + c.draining), strict=True):
        third.append(f"  {name} {n}", style=colour)
    third.append(f"  free {c.free}")
    return Group(_line(first), _line(second), _line(third))


def _cores(slot: SlotView) -> str:
    decode = f"{slot.decode_units} decode"
    return f"{decode} + {slot.finetune_units} finetune" if slot.finetune_units else decode


def _job(job: JobView, losses: Sequence[float]) -> RenderableType:
    line = Text.assemble((f"{'job':<{_INDENT}}", _DIM), (job.name, _HEAD), f"   {job.state}")
    if job.slot:
        line.append(f" on {job.slot.rpartition('/')[2]}")
    line.append(f"   step {job.steps_done}")
    if job.eta_s is not None and not job.finished:
        line.append(f"   ETA {clock(job.eta_s)}")
    second = Text(f"{'':<{_INDENT}}loss {'-' if job.loss is None else f'{job.loss:.3f}'}  ")
    second.append(f"{sparkline(losses):<{HISTORY}}", style=_DIM)
    if job.slot:
        second.append(f"  {_rate(job)} tok/s harvested", style=_GOOD)
    return Group(_line(line), _line(second))


def _event(event: EventView) -> Text:
    style = _BAD if event.warning else _DIM
    return _line(f"{event.at[11:19]}  {event.name}  {event.reason}: {event.message}", style)


def _rate(job: JobView) -> str:
    return f"{job.tokens_per_second:,.0f}" if job.tokens_per_second else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def line(frame: Frame) -> str:
    """Return a frame as one line, for where there is no terminal."""
    parts = [clock(frame.elapsed_s), frame.phase]
    parts += [
        f"{s.pod}: TPOT p50 {_ms(s.tpot_p50_s)}, p99 {_ms(s.tpot_p99_s)}, batch {s.batch}, "
        f"cores {_cores(s)}, lent {s.chunks.lent} of {s.chunks.total} chunks"
        if s.reported
        else f"{s.pod}: {s.why}"
        for s in frame.slots
    ]
    if (job := frame.job) is not None:
        loss = "" if job.loss is None else f", loss {job.loss:.3f}"
        rate = f", {job.tokens_per_second:,.0f} tok/s" if job.tokens_per_second else ""
        parts.append(f"job {job.name}: {job.state}, step {job.steps_done}{loss}{rate}")
    return "  |  ".join(parts)
