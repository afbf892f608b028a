"""What the plugin costs SGLang's decode scheduler, stock and plugin side by side, on cores.

Each arm is a process with SGLang's real scheduler (`make sglang`), a small model, one thread, and
the same requests at the same iterations. A step's cost is CPU time of the scheduler's thread, so
that other work on the machine does not count; a pair is the same steps with and without the plugin.
In "idle" there is a run directory and no sidecar; in "lending" chunks are lent and taken back at
random every third iteration.

Example: python -m benchmarks.sglang --json /tmp/sglang.json
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, write

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
DRIVER = ROOT / "tests" / "sglang" / "scheduler_process.py"
DECODE = {
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}
BATCH, TOKENS = 6, 400
WARM_UP_STEPS = 50
TEXT = b"The for statement is used to iterate over the elements of a sequence such as a string."
# Student's t at 97.5% by degrees of freedom, for as many pairs as anyone has the patience for.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18)


def main() -> int:
    """Run the pairs, then the answers; print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="N requests while lending")
    options = parser.parse_args()
    if not PYTHON.exists():
        print("sglang: skipped, there is no SGLang here (make sglang)")
        return 0
    env = environment()
    pairs = [_pair(i) for i in range(2 if options.quick else 6)]
    results = [*_costs(pairs), *_answers(40 if options.quick else 200)]
    if options.soak:
        results += _soak(options.soak)
    write("sglang", results, env, options.json)
    return 0


def _pair(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run stock and plugin, in alternating order."""
    requests = [
        {"n": n, "at": 3, "tokens": TOKENS, "prompt": [*TEXT[: 20 + 9 * n]]} for n in range(BATCH)
    ]
    script = {"server": DECODE, "requests": requests, "timed": True}
    arms = [False, True] if number % 2 == 0 else [True, False]
    done = {plugin: _run(script, plugin=plugin) for plugin in arms}
    return done[False], done[True]


def _costs(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Result]:
    stock = [_step_us(off) for off, _ in pairs]
    ours = [_step_us(on) for _, on in pairs]
    extra = [100 * (b / a - 1) for a, b in zip(stock, ours, strict=True)]
    half = _T[len(extra) - 2] * statistics.stdev(extra) / len(extra) ** 0.5
    start = [b["started_cpu_s"] - a["started_cpu_s"] for a, b in pairs]
    mean, base = statistics.mean(extra), round(statistics.median(stock), 1)
    return [
        Result("step CPU time, stock", base, "us", "lower"),
        Result(
            "step CPU time, plugin idle",
            round(statistics.median(ours), 1),
            "us",
            "lower",
            baseline=Baseline("stock", base),
        ),
        Result("extra of the idle plugin, mean of pairs", round(mean, 2), "%", "lower", goal=1.0),
        Result("  95% interval, low end", round(mean - half, 2), "%", "lower"),
        Result("  95% interval, high end", round(mean + half, 2), "%", "lower"),
        Result(
            "extra CPU time of the process's start",
            round(statistics.median(start), 2),
            "s",
            "lower",
            goal=1.0,
        ),
    ]


def _step_us(run: dict[str, Any]) -> float:
    """Median CPU time of an iteration with the whole batch."""
    steps = [us for batch, us in run["iterations_us"] if batch == BATCH][WARM_UP_STEPS:]
    return float(statistics.median(steps))


def _answers(n: int) -> list[Result]:
    script = {"server": DECODE, "requests": _conversation(n, 5), "at_most_s": 500}
    stock = _run(script, plugin=False)
    results = []
    for arm, chaos in (("idle", 0), ("lending", 3)):
        ours = _run({**script, "chaos": chaos}, plugin=True)
        differ = sum(ours["tokens"].get(rid) != found for rid, found in stock["tokens"].items())
        results += [
            Result(f"answers of {n} that differ from stock, {arm}", differ, "", "lower", goal=0),
            Result(
                f"iterations whose count of used tokens differs, {arm}",
                sum(a != b for a, b in zip(stock["used"], ours["used"], strict=False)),
                "",
                "lower",
                goal=0,
            ),
        ]
    return results


def _soak(n: int) -> list[Result]:
    """Many requests with aborts on a pool so small that some are retracted."""
    server = {**DECODE, "max_total_tokens": 1536}
    chance = random.Random(7)
    requests = _conversation(n, 11)
    aborts = {f"r{r['n']}": r["at"] + chance.randrange(2, 40) for r in requests if r["n"] % 17 == 0}
    script = {"server": server, "requests": requests, "aborts": aborts, "at_most_s": 3600}
    done = _run({**script, "chaos": 5}, plugin=True)
    return [
        Result(f"requests of {n} without an end", n - len(done["ends"]), "", "lower", goal=0),
        Result("tokens leaked", done["total"] - done["available"], "", "lower", goal=0),
        Result("iterations with chunks lent", done["iterations_lent"], "", "higher"),
    ]


def _conversation(n: int, seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "n": i,
            "at": 3 + 6 * i + chance.randrange(6),
            "tokens": chance.randrange(8, 60),
            "prompt": [*TEXT[: chance.randrange(5, len(TEXT))]],
        }
        for i in range(n)
    ]


def _run(script: dict[str, Any], *, plugin: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps(script))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("WINDROW_RUN_DIR", None)
        if plugin:
            (folder / "run").mkdir()
            environment["WINDROW_RUN_DIR"] = str(folder / "run")
        command = [str(PYTHON), str(DRIVER), "script.json", "result.json"]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        result = folder / "result.json"
        if not result.exists():
            raise RuntimeError(f"the scheduler died:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


if __name__ == "__main__":
    sys.exit(main())
