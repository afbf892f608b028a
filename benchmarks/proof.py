"""Time of a proof, pass by pass, read from the output of `make test` or `.ci/run`.

`tools/run_tests.py` closes each of its runs with a line for each pass: counts, seconds, and seconds
of CPU of the processes that it reaped. A pass that uses nearly all cores ends no sooner by waiting
less; one that does not could run more tests side by side.

Example: make test > test.log; python -m benchmarks.proof test.log --json /tmp/proof.json
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Result, arguments, environment, write

GOALS_S = {"make test": 900.0, ".ci/run": 2400.0}
_PASS = re.compile(
    r"^(?P<name>\S.*?) {2,}(?P<counts>\d.*) in (?P<wall>[0-9.]+)s, (?P<cpu>[0-9]+)s of CPU$"
)
_TOTAL = re.compile(r"^=+ (?P<counts>\d.*) in (?P<wall>[0-9.]+)s =+$")
_SUMMARY = "summary of all passes"


def main() -> int:
    """Read, print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("log", type=Path, help="output of make test or .ci/run")
    parser.add_argument("--seconds", type=float, help="that .ci/run took, where it is its output")
    options = parser.parse_args()
    results = [*_figures(options.log.read_text(encoding="utf-8", errors="replace").splitlines())]
    if not results:
        print(f"{options.log} has no summary of passes (tools/run_tests.py)", file=sys.stderr)
        return 2
    if options.seconds is not None:
        results.append(_whole(".ci/run", options.seconds))
    write("proof", results, environment(), options.json)
    return 0


def _figures(lines: list[str]) -> Iterator[Result]:
    cores, within, runs = os.cpu_count() or 1, False, 0
    for line in lines:
        within = within or _SUMMARY in line
        if not within:
            continue
        if found := _PASS.match(line):
            name, wall, cpu = found["name"], float(found["wall"]), float(found["cpu"])
            label = name if runs == 0 else f"SGLang, {name}"
            yield Result(f"{label}: time", wall, "s", "lower")
            yield Result(
                f"{label}: share of the cores", round(cpu / wall / cores, 3), "1", "higher"
            )
        elif found := _TOTAL.match(line):
            if runs == 0:
                yield _whole("make test", float(found["wall"]))
            within, runs = False, runs + 1


def _whole(name: str, seconds: float) -> Result:
    return Result(f"{name}: time", seconds, "s", "lower", goal=GOALS_S[name])


if __name__ == "__main__":
    sys.exit(main())
