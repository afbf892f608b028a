"""Cost and yield of sharing a device, on many loads: the arms of `demo --compare`.

A load is a trace, a rate and an objective in steps of decode alone: conv@0.6x2. Those of one trace
and rate are played together, so that what knows no objective plays once for all of them: a quarter
of an hour for one, half an hour for three. What is done already, whole rounds included, is not done
again.
Example: python -m benchmarks.harvest --loads conv@0.6x2 --rounds 6
Example: python -m benchmarks.harvest --docs docs/comparison.md
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, cast, get_args

from rich.console import Console

from benchmarks.engine.drawing import draw_ranges
from benchmarks.harness import ROOT, into_document, markdown
from windrow.errors import UserError, WindrowError
from windrow_lab.compare import comparison_table
from windrow_lab.compare.arms import AGAIN, ALONE, TUNED
from windrow_lab.compare.run import FOOTING, CompareSettings, run
from windrow_lab.demo.run import DemoSettings
from windrow_lab.figures.paired import DECIDING_ROUNDS, Interval, interval_of
from windrow_lab.load.generator import Like
from windrow_lab.machine.environment import environment

# At 1.0 a device gets three requests a second. One of the conversation trace has 211 tokens to
# generate in the mean, one of the code trace 28: so the latter come more often.
RATES: dict[Like, tuple[float, ...]] = {"conv": (0.3, 0.6, 0.9), "code": (0.75, 1.5, 3.0)}
FACTORS = (1.3, 2.0, 4.0)
PREFIX = "harvest"
_LOAD = re.compile(r"(?P<like>[a-z]+)@(?P<rate>[\d.]+)x(?P<factor>[\d.]+)")
_TRACE_FILE = "AzureLLMInferenceTrace_{}.csv"


@dataclass(frozen=True)
class BenchmarkLoad:
    """A trace, a rate of `windrow_lab.load`, and an objective in solo steps."""

    like: Like
    rate: float
    factor: float

    @property
    def name(self) -> str:
        """Name of the load as the command line has it."""
        return f"{self.like}@{self.rate:g}x{self.factor:g}"

    def file(self, prefix: str = PREFIX) -> str:
        """Return the name of its result."""
        return f"{prefix}-{self.name}.json"

    @classmethod
    def parse(cls, text: str) -> BenchmarkLoad:
        """Read a name; raises ValueError for what is none."""
        found = _LOAD.fullmatch(text)
        if found is None or found["like"] not in get_args(Like):
            raise ValueError(f"{text!r} is not a load: write conv@0.6x2 or code@1.5x1.3")
        rate, factor = float(found["rate"]), float(found["factor"])
        if not (rate > 0 and factor > 0):
            raise ValueError(f"{text!r}: rate and factor are above zero")
        return cls(cast("Like", found["like"]), rate, factor)


ALL = [
    BenchmarkLoad(like, rate, factor)
    for like, rates in RATES.items()
    for rate in rates
    for factor in FACTORS
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the loads that are asked for and not done yet; 1: something failed."""
    options = _parse(arguments)
    console, failed = Console(), []
    results = options.into / machine()
    if options.docs:
        document(options.docs, options.into)
        return 0
    results.mkdir(parents=True, exist_ok=True)
    arms = tuple(name.strip() for name in options.arms.split(",") if name.strip())
    how = CompareSettings(
        rounds=options.rounds,
        window_s=options.segment,
        arms=arms,
        footing=options.work / FOOTING,
    )
    try:
        how.check()
    except UserError as error:
        console.print(f"[red]{error}[/]")
        return 2
    missing = [load for load in options.loads if not (results / load.file(options.prefix)).exists()]
    console.print(f"{len(options.loads) - len(missing)} of {len(options.loads)} are done before")
    for (like, rate), group in groupby(missing, key=lambda load: (load.like, load.rate)):
        loads = list(group)
        names = ", ".join(load.name for load in loads)
        console.rule(names)
        settings = DemoSettings(
            out=options.work / "-".join([f"{like}@{rate:g}", *(f"x{at.factor:g}" for at in loads)]),
            rate=rate,
            seed=options.seed,
            trace=options.traces / _TRACE_FILE.format(like) if options.traces else None,
            like=like,
            busy=True,
            model=options.model,
        )
        try:
            settings.out.mkdir(parents=True, exist_ok=True)
            played = run(settings, replace(how, factors=tuple(at.factor for at in loads)), console)
        except WindrowError as error:
            console.print(f"[red]{names}: {error}[/]")
            failed.append(names)
            continue
        for load, (path, result) in zip(loads, played.items(), strict=True):
            try:
                comparison_table.check(result)
            except comparison_table.Impossible as error:
                console.print(f"[red]{load.name}: {error}[/]")
                failed.append(load.name)
                continue
            kept = results / load.file(options.prefix)
            shutil.copy(path, kept)
            console.print(f"written: {kept}; page and logs: {path.parent}")
    if failed:
        console.print(f"[red]failed: {'; '.join(failed)}[/]")
    return 1 if failed else 0


OURS = "windrow"


@dataclass(frozen=True)
class LoadOutcome:
    """Result of `windrow` on one load, beside the best other arm that held the objective too."""

    load: BenchmarkLoad
    result: Mapping[str, Any]

    def row(self, arm: str) -> Mapping[str, Any]:
        """The figures of an arm."""
        return next(row for row in self.result["arms"] if row["arm"] == arm)

    @property
    def verdict(self) -> str:
        """Verdict: were at most 0.3% of the steps more over the objective than alone?"""
        if OURS in self.result["holding"]:
            return "holds"
        return "undecided" if OURS in self.result["undecided"] else "breaks"

    @property
    def rivals(self) -> list[str]:
        """The other arms of which as much is known: that hold, or are at least undecided, too."""
        known = self.result["holding"]
        if self.verdict == "undecided":
            known = [*known, *self.result["undecided"]]
        return [name for name in known if name != OURS]

    @property
    def rival(self) -> str | None:
        """The one of these that trained fastest; None: there is none."""
        return self._fastest(self.rivals)

    @property
    def rival_policy(self) -> str | None:
        """The fastest that is a policy, which the same guard stops; None: there is none."""
        return self._fastest([name for name in self.rivals if self.row(name)["kind"] == "policy"])

    def _fastest(self, arms: Sequence[str]) -> str | None:
        return max(arms, key=lambda name: _rate(self.row(name)), default=None)

    def against(self, arm: str) -> Interval:
        """Tokens a second as a multiple of another arm's, in pairs within the rounds."""
        rates: dict[str, dict[int, float]] = {OURS: {}, arm: {}}
        for turn in self.result["segments"]:
            if turn["arm"] in rates:
                rates[turn["arm"]][turn["round"]] = turn["tokens_per_second"]
        return interval_of(
            ours / rates[arm][at] if rates[arm][at] else inf for at, ours in rates[OURS].items()
        )

    def median_of(self, figure: str) -> float:
        """Return the median of a figure over the turns of ours."""
        turns = [turn for turn in self.result["segments"] if turn["arm"] == OURS]
        return float(median(turn[figure] for turn in turns))

    def cells(self) -> list[str]:
        """Return its row of the table."""
        ours, rival = self.row(OURS), self.rival
        return [
            self.load.name,
            f"{self.result['objective']['milliseconds']:g}",
            f"{100 * self.row(ALONE)['over']['median']:.2f}%",
            comparison_table.points(self.row(AGAIN)["over_more"]),
            f"{comparison_table.points(ours['over_more'])}, {self.verdict}",
            f"{_rate(ours):,.0f} ({ours['eta']['median']:.2f})",
            f"{self.median_of('decode_busy'):.2f} + {self.median_of('trainer_units'):.2f}",
            f"{rival} {_rate(self.row(rival)):,.0f}" if rival else "none",
            _times(self.against(rival)) if rival else "",
            _times(self.against(TUNED)) if TUNED in self.rivals else "not as sure",
            self.result["winner"] or "none",
        ]


_COLUMNS = (
    *("load", "objective ms", "alone over", "alone against itself, points"),
    *("windrow: more than alone, points", "tok/s (eta)", "cores in use"),
    *("best other", "windrow / it", "windrow / tuned naive", "winner"),
)


def document(path: Path, into: Path) -> None:
    """Write the loads that were played into a document, a table between markers of each machine.

    Their plots go beside it, into `images/comparison-MACHINE.svg`.
    """
    machines = re.findall(r"<!-- loads: (\S+) -->", path.read_text(encoding="utf-8"))
    if not machines:
        raise UserError(f"{path} has no line like <!-- loads: epyc-2-cores -->", remedy="Add one.")
    for name in machines:
        found = {load: into / name / load.file() for load in ALL}
        standings = [
            LoadOutcome(load, json.loads(file.read_text()))
            for load, file in found.items()
            if file.exists()
        ]
        table = markdown(_COLUMNS, (standing.cells() for standing in standings), rest="--:")
        said = f"{table}\n\n{_summary(standings)}"
        into_document(path, f"<!-- loads: {name} -->", f"<!-- /loads: {name} -->", said)
        _plot(standings, path.parent / "images" / f"comparison-{name}.svg")


def _summary(standings: Sequence[LoadOutcome]) -> str:
    verdicts = [standing.verdict for standing in standings]
    said = [
        f"{len(standings)} of {len(ALL)} loads are played; `windrow` holds the objective on "
        f"{verdicts.count('holds')}, is undecided on {verdicts.count('undecided')} and breaks it "
        f"on {verdicts.count('breaks')}."
    ]
    fastest = {
        "arm": [standing.rival for standing in standings],
        "policy": [standing.rival_policy for standing in standings],
    }
    for what, names in fastest.items():
        pairs = zip(standings, names, strict=True)
        rivals = [(s, s.against(name)) for s, name in pairs if name]
        if not rivals:
            continue
        middles = [ratio.median for _, ratio in rivals]
        surely = [s.load.name for s, ratio in rivals if ratio.is_decided and ratio.high < 1]
        said.append(
            f"It trains {_times_of(median(middles))} times as fast as the best other {what} in the "
            f"median load, {_times_of(min(middles))} to {_times_of(max(middles))} times in all, "
            f"and slower by the interval on {', '.join(surely) or 'none'}."
        )
    return " ".join(said)


def _plot(standings: Sequence[LoadOutcome], to: Path) -> None:
    """Draw each load's shares of the dedicated rate: ours, and those as sure."""
    rows = {}
    for standing in standings:
        arms = {OURS: OURS}
        if standing.rival:
            arms["best other"] = standing.rival
        if TUNED in standing.rivals:
            arms[TUNED] = TUNED
        eta = {name: standing.row(arm)["eta"] for name, arm in arms.items()}
        rows[standing.load.name] = {
            name: (of["median"], of["low"], of["high"]) for name, of in eta.items()
        }
    draw_ranges(rows, "Finetune tokens as a share of the dedicated rate (eta), 95% intervals", to)


def _rate(row: Mapping[str, Any]) -> float:
    return float(row["tokens_per_second"]["median"])


def _times(ratio: Interval) -> str:
    return f"{_times_of(ratio.median)} [{_times_of(ratio.low)}, {_times_of(ratio.high)}]"


def _times_of(value: float) -> str:
    return f"{value:.2f}" if value < 100 else ">100"  # the other had next to nothing


def machine() -> str:
    """Return the folder of this machine's results: processor and cores."""
    env = environment()
    brands = ("epyc", "xeon", "ryzen", "core", "neoverse", "graviton")
    brand = next((name for name in brands if name in env["cpu"].lower()), "cpu")
    return f"{brand}-{env['cores']}-cores"


def _loads(text: str) -> list[BenchmarkLoad]:
    try:
        return ALL if text == "all" else [BenchmarkLoad.parse(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--loads",
        type=_loads,
        default=ALL,
        help=f"all, or names: {', '.join(load.name for load in ALL)}",
    )
    add("--rounds", type=int, default=DECIDING_ROUNDS, help="default %(default)s")
    add("--segment", type=float, default=8.0, help="seconds counted of each turn (%(default)s)")
    add("--arms", default="", help="only these, with commas")
    add("--model", type=Path, help="checkpoint that is served and trained (the demo's)")
    add("--prefix", default=PREFIX, help="of the results' names (%(default)s)")
    add("--seed", type=int, default=11)
    add("--traces", type=Path, help="folder of Azure's own trace files; default: generated alike")
    add(
        "--work", type=Path, default=ROOT / "out" / "harvest", help="logs, pages, what is half done"
    )
    add(
        "--docs",
        type=Path,
        metavar="FILE",
        help="write the table and plot of what is there; no run",
    )
    add("--into", type=Path, default=ROOT / "benchmarks" / "results", help="results, by machine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
