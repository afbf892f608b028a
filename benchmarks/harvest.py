"""What sharing a device costs serving and gives, on many loads: the arms of `demo --compare`.

A load is a trace, a rate and an objective in steps of decode alone: conv@0.6x2. Those of one trace
and rate are played together, so that what knows no objective plays once for all of them: a quarter
of an hour for one, half an hour for three. What is done already, whole rounds included, is not done
again.
Example: python -m benchmarks.harvest --loads conv@0.6x2 --rounds 6
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from benchmarks.harness import ROOT
from windrow.errors import UserError, WindrowError
from windrow.local import verdict
from windrow.local.compare import FOOTING, CompareSettings, run
from windrow.local.demo import DemoSettings
from windrow.local.environment import environment
from windrow.local.generator import Like
from windrow.local.paired import DECIDING_ROUNDS

# At 1.0 a device gets three requests a second. One of the conversation trace has 211 tokens to
# generate in the mean, one of the code trace 28: so the latter come more often.
RATES: dict[Like, tuple[float, ...]] = {"conv": (0.3, 0.6, 0.9), "code": (0.75, 1.5, 3.0)}
FACTORS = (1.3, 2.0, 4.0)
_LOAD = re.compile(r"(?P<like>[a-z]+)@(?P<rate>[\d.]+)x(?P<factor>[\d.]+)")
_TRACE_FILE = "AzureLLMInferenceTrace_{}.csv"


@dataclass(frozen=True)
class BenchmarkLoad:
    """A trace, a rate of `windrow.local.load`, and an objective in solo steps."""

    like: Like
    rate: float
    factor: float

    @property
    def name(self) -> str:
        """As the command line has it."""
        return f"{self.like}@{self.rate:g}x{self.factor:g}"

    @property
    def file(self) -> str:
        """Name of its result."""
        return f"harvest-{self.name}.json"

    @classmethod
    def parse(cls, text: str) -> BenchmarkLoad:
        """Read a name; raises ValueError for what is none."""
        found = _LOAD.fullmatch(text)
        if found is None or found["like"] not in get_args(Like):
            raise ValueError(f"{text!r} is no load: write conv@0.6x2 or code@1.5x1.3")
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
    missing = [load for load in options.loads if not (results / load.file).exists()]
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
                verdict.check(result)
            except verdict.Impossible as error:
                console.print(f"[red]{load.name}: {error}[/]")
                failed.append(load.name)
                continue
            shutil.copy(path, results / load.file)
            console.print(f"written: {results / load.file}; page and logs: {path.parent}")
    if failed:
        console.print(f"[red]failed: {'; '.join(failed)}[/]")
    return 1 if failed else 0


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
    add("--seed", type=int, default=11)
    add("--traces", type=Path, help="folder of Azure's own trace files; default: generated alike")
    add(
        "--work", type=Path, default=ROOT / "out" / "harvest", help="logs, pages, what is half done"
    )
    add("--into", type=Path, default=ROOT / "benchmarks" / "results", help="results, by machine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
