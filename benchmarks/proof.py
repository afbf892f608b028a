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
# Of tools/run_parts.py: what begins, and what its last lines say of each part and of all.
_PART = re.compile(r"^#+ make (?P<target>test[a-z-]*)\b")
_TOOK = re.compile(r"^(?P<wall>[0-9]+) s: (?P<part>.*)$")
_ALL_PARTS = "all parts"
_LABELS = {"test": "", "test-extended": "extended, ", "test-sglang": "SGLang, "}


def main() -> int:
    """Read, print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("log", type=Path, help="output of make test or .ci/run")
    options = parser.parse_args()
    results = [*_figures(options.log.read_text(encoding="utf-8", errors="replace").splitlines())]
    if not results:
        print(f"{options.log} has no summary of passes (tools/run_tests.py)", file=sys.stderr)
        return 2
    write("proof", results, environment(), options.json)
    return 0


def _figures(lines: list[str]) -> Iterator[Result]:
    cores, within, target = os.cpu_count() or 1, False, "test"
    for line in lines:
        within = within or _SUMMARY in line
        if found := _PART.match(line):
            target = found["target"]
        elif found := _TOOK.match(line):
            wall, part = float(found["wall"]), found["part"]
            whole = part == _ALL_PARTS
            yield _whole(".ci/run", wall) if whole else Result(f"{part}: time", wall, "s", "lower")
        elif within and (found := _PASS.match(line)):
            wall, cpu, label = float(found["wall"]), float(found["cpu"]), _LABELS.get(target, "")
            yield Result(f"{label}{found['name']}: time", wall, "s", "lower")
            share = round(cpu / wall / cores, 3)
            yield Result(f"{label}{found['name']}: share of the cores", share, "1", "higher")
        elif within and (found := _TOTAL.match(line)):
            if target == "test":
                yield _whole("make test", float(found["wall"]))
            within = False


def _whole(name: str, seconds: float) -> Result:
    return Result(f"{name}: time", seconds, "s", "lower", goal=GOALS_S[name])


if __name__ == "__main__":
    sys.exit(main())
