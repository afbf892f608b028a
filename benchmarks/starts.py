"""Time until decode pods are ready on a real node, with Windrow and without.

Runs the tests of pods' starts (`tests/node/test_pods_start.py`), a few rounds of them: in each
round every pod starts once without Windrow and once with it, one after the other. A pod's figure is
the median over the rounds of the seconds until it is seen to be ready.

Needs root.
Example: make node ARGS=".venv/bin/python -m benchmarks.starts --json /tmp/starts.json --table t.md"
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Result, arguments, environment, write
from windrow_lab.realnode.node import NodeInfo

TESTS = "tests/node/test_pods_start.py"
ENV_STARTS = "WINDROW_NODE_STARTS"
ROUNDS = 3
# What every pod may take longer; the API server gives the webhook so long at most.
MOST_EXTRA_S = 2.0
TABLE = """\
# How decode pods start

Made by `make node ARGS=".venv/bin/python -m benchmarks.starts --table docs/operations/starts.md"`:
measure again instead of editing.

Each pod starts on a real node (kubelet, containerd, scheduler) once without Windrow and once with
it, one after the other; rounds: {rounds}. The seconds are medians until it is seen to be ready. Its
container only waits, so that nothing but Kubernetes and Windrow take time. The goal: at most 2 s
more, and the same QoS class. A webhook that does not answer costs the 2 s that the API server gives
it, and the moments around them.

{machine}.

| pod | QoS class without | with | ready after, s, without | with | more |
| --- | --- | --- | --: | --: | --: |
{rows}
"""


def main() -> int:
    """Measure; print and write the figures. 1: a test failed."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of all pods")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the page of docs there")
    options = parser.parse_args()
    if NodeInfo.of_environment() is None:
        print("starts: skipped, there is no node (make node)")
        return 0
    env = environment()
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "starts")
        for _ in range(rounds):
            tried = [sys.executable, "-m", "pytest", "-q", TESTS]
            variables = {**os.environ, ENV_STARTS: str(notes)}
            if subprocess.run(tried, cwd=ROOT, env=variables, check=False).returncode:
                return 1
        starts = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    results = [result for name in _cases(starts) for result in _figures(name, starts)]
    write("starts", results, env, options.json)
    if options.table:
        options.table.write_text(table(starts, rounds, env), encoding="utf-8")
    return 0


def table(starts: Sequence[Mapping[str, Any]], rounds: int, env: Mapping[str, Any]) -> str:
    """Return the page of the documentation."""
    rows = []
    for name in _cases(starts):
        without, with_ = _medians(name, starts)
        classes = next(start["qos"] for start in starts if start["case"] == name)
        figures = f"{without:.2f} | {with_:.2f} | {with_ - without:+.2f}"
        rows.append(f"| {name} | {classes[0]} | {classes[1]} | {figures} |")
    machine = (
        f"{env['cpu']}, {env['cores']} cores, kernel {env['kernel']}; "
        f"load average before: {env['load_average_before']}"
    )
    return TABLE.format(rounds=rounds, machine=machine, rows="\n".join(rows))


def _figures(name: str, starts: Sequence[Mapping[str, Any]]) -> list[Result]:
    without, with_ = _medians(name, starts)
    return [
        Result(f"{name}: ready without Windrow", round(without, 2), "s", "lower"),
        Result(
            f"{name}: ready later with Windrow",
            round(with_ - without, 2),
            "s",
            "lower",
            goal=MOST_EXTRA_S,
        ),
    ]


def _medians(name: str, starts: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    pairs = [start["seconds"] for start in starts if start["case"] == name]
    without, with_ = (statistics.median(side) for side in zip(*pairs, strict=True))
    return without, with_


def _cases(starts: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(start["case"] for start in starts))


if __name__ == "__main__":
    sys.exit(main())
