"""The one form of a benchmark's result: figures with goal, spread, baseline and environment.

A benchmark collects `Result`s and ends with `write`; figures are comparable only with the baseline
that ran beside them in the same file, never with another machine's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from windrow_lab.machine.environment import environment

__all__ = [
    "DRIVER_HELP",
    "ROOT",
    "Baseline",
    "Better",
    "Result",
    "arguments",
    "environment",
    "middle",
    "write",
]

DRIVER_HELP = "what computes: host (default), cuda, or cuda:N"
ROOT = Path(__file__).resolve().parent.parent
Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Baseline:
    """Process that ran beside ours, interleaved with it."""

    name: str
    value: float


@dataclass(frozen=True)
class Result:
    """One figure. `spread` is the distance between the quartiles of the repeats, in `unit`."""

    name: str
    value: float
    unit: str
    better: Better
    goal: float | None = None
    spread: float | None = None
    baseline: Baseline | None = None

    @property
    def met(self) -> bool | None:
        """True where the goal is reached; None where there is none."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal


def middle(repeats: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range of the repeats of one figure."""
    if len(repeats) < 2:
        return repeats[0], 0.0
    low, median, high = statistics.quantiles(repeats, n=4, method="inclusive")
    return median, high - low


def write(benchmark: str, results: Sequence[Result], env: dict[str, Any], to: Path | None) -> None:
    """Print a table, what is not met first, and write the JSON file where one is asked for."""
    print(f"\n{benchmark}")
    for result in sorted(results, key=lambda r: r.met is not False):
        goal = "" if result.goal is None else f"  goal {result.goal:g}"
        mark = {True: "met", False: "NOT MET", None: ""}[result.met]
        beside = (
            "" if result.baseline is None else f"  {result.baseline.name} {result.baseline.value:g}"
        )
        print(f"  {result.name:<48} {result.value:>12.4g} {result.unit:<10}{goal}  {mark}{beside}")
    if to is None:
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(
        json.dumps(
            {
                "benchmark": benchmark,
                "commit": _commit(),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "environment": env,
                "results": [{**asdict(r), "met": r.met} for r in results],
            },
            indent=2,
        )
        + "\n"
    )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, rest: str = "---") -> str:
    """Return a table in Markdown; `rest`: how the columns after the first one are aligned."""
    lines = [head, ["---", *[rest] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def into_document(path: Path, begin: str, end: str, text: str) -> None:
    """Put text on the lines between two that the document has already.

    Raises:
        SystemExit: it has not.
    """
    document = path.read_text(encoding="utf-8")
    before, found, rest = document.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{path} has no place for figures: {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: to see that it runs")
    return parser


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
