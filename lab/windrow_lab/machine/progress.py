"""Progress of work that takes minutes: a bar on a terminal, a line every ten seconds without."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

_LINE_EVERY_SECONDS = 10.0


def remaining_seconds(done: int, total: int, elapsed_seconds: float) -> float | None:
    """Estimate what is left at the pace so far; None before a tenth is done.

    Packages differ in size and the linker comes last, so the pace is a guess; before a tenth it
    would be no more than noise.
    """
    if total <= 0 or done * 10 < total:
        return None
    return elapsed_seconds * (total - done) / done


@dataclass
class Task:
    """One stretch of work. Times are seconds of `clock`."""

    title: str
    total: int
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    detail: str = ""
    on_change: Callable[[Task], None] = field(default=lambda _: None)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def advance(self) -> None:
        """Count one more unit of work."""
        self.done = min(self.done + 1, self.total)
        self.on_change(self)

    def note(self, detail: str) -> None:
        """Say what is being done."""
        self.detail = detail
        self.on_change(self)

    @property
    def text(self) -> str:
        """The line that describes the state: title, count, estimate."""
        elapsed = self.clock() - self._began
        parts = [self.title]
        if self.total:
            parts.append(f"{self.done}/{self.total} packages")
        parts.append(f"{elapsed:.0f} s")
        if self.total and self.done == self.total:
            parts.append("linking")
        elif (left := remaining_seconds(self.done, self.total, elapsed)) is not None:
            parts.append(f"about {left:.0f} s left")
        return ", ".join(parts)


class Progress(Protocol):
    """Places where progress is shown."""

    def say(self, message: str) -> None:
        """Show one line that stays."""

    def task(self, title: str, total: int = 0) -> contextlib.AbstractContextManager[Task]:
        """Show a stretch of work while the context lasts; `total` 0: unknown."""


class LineProgress:
    """Lines, for logs and pipes."""

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._clock = write, clock

    def say(self, message: str) -> None:
        """Write one line."""
        self._write(message)

    @contextlib.contextmanager
    def task(self, title: str, total: int = 0) -> Iterator[Task]:
        """Write a line at the beginning, every ten seconds, and at the end."""
        self._write(title)
        written_at = began = self._clock()

        def changed(task: Task) -> None:
            nonlocal written_at
            if self._clock() - written_at >= _LINE_EVERY_SECONDS:
                written_at = self._clock()
                self._write(task.text)

        yield Task(title, total, self._clock, on_change=changed)
        self._write(f"{title}: {self._clock() - began:.0f} s")


class BarProgress:
    """A bar, for terminals."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, message: str) -> None:
        """Print one line above the bar."""
        self._console.print(message)

    @contextlib.contextmanager
    def task(self, title: str, total: int = 0) -> Iterator[Task]:
        """Show a bar while the work goes on."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with RichProgress(*columns, console=self._console, transient=True) as bars:
            bar = bars.add_task(title, total=total or None)

            def changed(task: Task) -> None:
                detail = task.text if task.total else f"{title}  {task.detail}"
                bars.update(bar, completed=task.done, description=detail)

            yield Task(title, total, on_change=changed)


def progress_for(console: Console) -> Progress:
    """Return a bar for a terminal and lines for anything else."""
    if console.is_terminal:
        return BarProgress(console)
    return LineProgress(lambda line: console.print(line, highlight=False, soft_wrap=True))
