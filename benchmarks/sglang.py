"""Cost of the plugin for SGLang's decode scheduler, stock and plugin side by side, on cores.

One process holds SGLang's real scheduler (`make sglang`) with a small model on one thread, and
all arms: blocks of iterations with SGLang's own functions, allocator, KV buffers and weights
alternate with blocks of the plugin's, and of each of its parts alone, every 0.1 s. So all see the
same machine and the same requests. A step's cost is CPU time of the scheduler's thread, so that
other work on the machine counts only through caches and clocks. In "idle" there is a run directory
and no sidecar; in "lending" chunks are lent and taken back at random every third iteration.
`--only start` runs one part; `--soak 10000` and `--demo 60` run those instead.

Example: python -m benchmarks.sglang --json /tmp/sglang.json
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, middle, write

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
DRIVER = ROOT / "tests" / "sglang" / "scheduler_process.py"
DECODE = {
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "fake",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
}
BATCH, TOKENS = 6, 400
WARM_UP_STEPS = 60
BLOCK, SETTLE = 30, 3  # iterations of one arm in a row, and those of them that are not counted
# Of the soak: tokens of its pool; requests of a wave, and behind it; iterations that a wave takes.
POOL, CROWD, TRICKLE, WAVE_TAKES = 768, 200, 40, 400
PROGRESS_S = 60  # between two lines of progress
STEPS_S = 400  # of the machine's time at most; fewer blocks then
ARMS = {
    "plugin": "the idle plugin, median of blocks",
    "hooks": "its hooks and allocator alone",
    "kv": "KV in the arena alone",
    "weights": "weights in shared memory alone",
}
TEXT = b"The for statement is used to iterate over the elements of a sequence such as a string."


def main() -> int:
    """Run the parts that were asked for; print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("steps", "start", "answers"), help="only this part")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="only: N requests")
    parser.add_argument("--demo", type=float, default=0, metavar="S", help="only: demos of S s")
    options = parser.parse_args()
    if not PYTHON.exists():
        print("sglang: skipped, there is no SGLang here (make sglang)")
        return 0
    env, quick = environment(), options.quick
    if options.soak:
        write("sglang-soak", _soak(options.soak), env, options.json)
    elif options.demo:
        write("sglang-demo", _demos(options.demo), env, options.json)
    else:
        parts: dict[str, Callable[[], list[Result]]] = {
            "steps": lambda: _step_cost(5 if quick else 50),
            "start": lambda: _start_cost(1 if quick else 9),
            "answers": lambda: _answers(40 if quick else 200),
        }
        results: list[Result] = []
        for part in [options.only] if options.only else parts:
            results += parts[part]()
            write("sglang", results, env, options.json)
    return 0


def _step_cost(rounds: int) -> list[Result]:
    """Blocks of stock and of what the plugin changes in turn, in one process: see `Alternation`."""
    wave = TOKENS + 20  # iterations until all requests of a wave have ended
    waves = 1 + (2 * len(ARMS) * BLOCK * rounds + WARM_UP_STEPS) // (TOKENS - 2 * BLOCK)
    requests = [
        {"n": BATCH * w + n, "at": 3 + wave * w, "tokens": TOKENS, "prompt": [*TEXT[: 20 + 9 * n]]}
        for w in range(waves)
        for n in range(BATCH)
    ]
    script = {"server": DECODE, "requests": requests, "timed": True, "alternate": BLOCK}
    done = _run({**script, "at_most_s": STEPS_S}, run_dir="run")
    if done["off"]:
        raise RuntimeError(f"the plugin was off: {done['off']}")
    found = blocks(done["iterations_us"][WARM_UP_STEPS:])
    stock = [us for arm, us in filter(None, found) if arm == "stock"]
    base = round(statistics.median(stock), 1)
    results = [Result("step CPU time, stock", base, "us", "lower", spread=middle(stock)[1])]
    for arm, what in ARMS.items():
        extra = compare(found, arm)
        low, high = interval(extra)
        goal = 1.0 if arm == "plugin" else None
        results += [
            Result(f"extra of {what}", round(statistics.median(extra), 2), "%", "lower", goal),
            Result(f"  95% interval, low end ({arm})", round(low, 2), "%", "lower"),
            Result(f"  95% interval, high end ({arm})", round(high, 2), "%", "lower"),
            Result(f"  blocks ({arm})", len(extra), "", "higher"),
        ]
    return results


Block = tuple[str, float]


def blocks(iterations: list[list[Any]]) -> list[Block | None]:
    """Each block's arm and median time; None: its batch was not whole all the time.

    The first iterations of a block find caches that the other arm has left, and are dropped.
    """
    found: list[Block | None] = []
    current: list[list[Any]] = []
    for row in [*iterations, [0, 0, "end"]]:
        if current and row[2] != current[0][2]:
            whole = len(current) == BLOCK and all(batch == BATCH for batch, _, _ in current)
            times = [us for _, us, _ in current[SETTLE:]]
            found.append((current[0][2], statistics.median(times)) if whole else None)
            current = []
        current.append(row)
    return found


def compare(found: list[Block | None], arm: str) -> list[float]:
    """Return what each block of an arm takes beyond the mean of stock's around it, in percent.

    Between two blocks of stock, so that what grows with the context from block to block cancels.
    """
    extra = []
    for before, block, after in zip(found, found[1:], found[2:], strict=False):
        if before and block and after and block[0] == arm:
            extra.append(100 * (block[1] / ((before[1] + after[1]) / 2) - 1))
    return extra


def interval(extra: list[float]) -> tuple[float, float]:
    """Bounds of the median with 95% confidence: the bootstrap's, of 4000 resamples."""
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(extra, k=len(extra))) for _ in range(4000))
    return medians[100], medians[-101]


def _start_cost(pairs: int) -> list[Result]:
    # A start takes some 15 s of CPU time, and two starts of one kind differ by up to 1.4 s.
    extra = []
    for number in range(pairs):
        script = {"server": DECODE, "requests": [{"n": 0, "at": 3, "tokens": 4, "prompt": [65]}]}
        arms = ["", "run"] if number % 2 == 0 else ["run", ""]
        done = {arm: _run(script, run_dir=arm)["started_cpu_s"] for arm in arms}
        extra.append(done["run"] - done[""])
    value, spread = middle(extra)
    return [
        Result(
            "extra CPU time of the process's start",
            round(value, 2),
            "s",
            "lower",
            goal=1.0,
            spread=round(spread, 2),
        )
    ]


def _answers(n: int) -> list[Result]:
    script = {"server": DECODE, "requests": _conversation(n, 5), "at_most_s": 500}
    stock = _run(script, run_dir="")
    results = []
    # "off": the run directory is not there, so the plugin says so and serves on.
    for arm, chaos, run_dir in (("off", 0, "missing"), ("idle", 0, "run"), ("lending", 3, "run")):
        ours = _run({**script, "chaos": chaos}, run_dir=run_dir)
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
    """Many requests with aborts, stock and lending, in waves on a small pool.

    A wave is more than the pool holds, so that some are retracted; behind it there is room to lend.
    """
    chance = random.Random(7)
    requests = _waves(n, 11)
    aborts = {f"r{r['n']}": r["at"] + chance.randrange(2, 40) for r in requests if r["n"] % 17 == 0}
    script = {
        "server": {**DECODE, "max_total_tokens": POOL, "num_reserved_decode_tokens": 2},
        "requests": requests,
        "aborts": aborts,
        "health_every": 500,
        "at_most_s": 3000,
    }
    with ThreadPoolExecutor() as both:  # neither is timed
        of_stock = both.submit(_run, script, run_dir="")
        of_ours = both.submit(_run, {**script, "chaos": 5}, run_dir="run")
        stock, ours = of_stock.result(), of_ours.result()
    asked = {f"r{r['n']}" for r in requests}
    results = []
    for arm, done in (("stock", stock), ("lending", ours)):
        endless = asked - set(done["ends"])
        results += [
            Result(
                f"requests of {n} without an end, {arm}", len(endless - set(aborts)), "", "lower", 0
            ),
            # SGLang tells nobody when it drops some of them.
            Result(
                f"aborted requests without an end, {arm}", len(endless & set(aborts)), "", "lower"
            ),
            Result(f"tokens leaked, {arm}", done["total"] - done["available"], "", "lower", 0),
            Result(f"requests retracted, {arm}", done["retracted"], "", "higher"),
            Result(f"aborted, {arm}", _ended(done, "abort"), "", "higher"),
        ]
    whole = [rid for rid in stock["ends"] if rid not in aborts]
    differ = sum(stock["tokens"].get(rid) != ours["tokens"].get(rid) for rid in whole)
    counted = [sum(len(done["tokens"].get(rid, [])) for rid in whole) for done in (stock, ours)]
    answered, questions = ours["health"]
    return [
        *results,
        Result("answers that differ from stock", differ, "", "lower", goal=0),
        Result(
            "tokens delivered, lending",
            counted[1],
            "",
            "higher",
            goal=counted[0],
            baseline=Baseline("stock", counted[0]),
        ),
        Result("questions after health without an answer", questions - answered, "", "lower", 0),
        Result("questions after health", questions, "", "higher"),
        Result("iterations with chunks lent", ours["iterations_lent"], "", "higher"),
        Result(f"tokens lent at most, of {POOL}", ours["most_lent"], "", "higher"),
        Result("iterations", ours["iterations"], "", "higher"),
        Result("harvesting was switched off", int(bool(ours["off"])), "", "lower", 0),
    ]


def _waves(n: int, seed: int) -> list[dict[str, Any]]:
    """Requests of which each third is long: many that come at once, then some one by one, again."""
    chance = random.Random(seed)
    at, requests = 3, []
    for i in range(n):
        place = i % (CROWD + TRICKLE)
        at += chance.randrange(3) if place < CROWD else chance.randrange(8, 24)
        at += WAVE_TAKES if place == CROWD else 0
        tokens = chance.randrange(40, 64) if i % 3 == 0 else chance.randrange(4, 20)
        prompt = [*TEXT[: chance.randrange(5, len(TEXT))]]
        requests.append({"n": i, "at": at, "tokens": tokens, "prompt": prompt})
    return requests


def _ended(done: dict[str, Any], how: str) -> int:
    return sum(reason == how for reason in done["ends"].values())


def _demos(seconds: float) -> list[Result]:
    """The demo on both engines, one after the other: objective and eta."""
    found = {}
    for engine in ("builtin", "sglang"):
        with tempfile.TemporaryDirectory(prefix="wr-") as name:
            options = (f"--engine={engine}", f"--seconds={seconds:g}", f"--out={name}/out")
            found[engine] = json.loads(windrow("demo", *options, "--json"))
    builtin, sglang = found["builtin"], found["sglang"]
    figures: dict[str, tuple[str, Callable[[Any], float]]] = {
        "objective": ("ms", lambda serving: serving["objective_ms"]),
        "TPOT p50": ("ms", lambda serving: serving["tpot_ms"]["p50"]),
        "TPOT p99": ("ms", lambda serving: serving["tpot_ms"]["p99"]),
        "mean batch": ("", lambda serving: serving["mean_batch"]),
        "requests failed": ("", lambda serving: serving["requests_failed"]),
    }
    results = [
        Result(
            title,
            of(sglang["serving"]),
            unit,
            "lower",
            baseline=Baseline("builtin", of(builtin["serving"])),
        )
        for title, (unit, of) in figures.items()
    ]
    over = [100 * s["serving"]["share_over_objective"] for s in (sglang, builtin)]
    eta = [s["harvest"]["eta"] for s in (sglang, builtin)]
    return [
        *results,
        Result(
            "steps over the objective",
            round(over[0], 2),
            "%",
            "lower",
            goal=1.0,  # the policy's percentile is the 99th
            baseline=Baseline("builtin", round(over[1], 2)),
        ),
        Result(
            "eta",
            eta[0],
            "",
            "higher",
            goal=round(0.8 * eta[1], 4),
            baseline=Baseline("builtin", eta[1]),
        ),
    ]


def windrow(*words: str) -> str:
    """Run a command of windrow that may start SGLang; returns what it prints.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    command = [sys.executable, "-c", "from windrow_cli import main; main()", *words]
    env = {**os.environ, "SGLANG_VENV": str(PYTHON.parents[1])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"windrow {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


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


def _run(script: dict[str, Any], *, run_dir: str) -> dict[str, Any]:
    """Play a script. `run_dir`: "": stock SGLang; "run": the plugin; any other: one not there."""
    with tempfile.TemporaryDirectory(prefix="wr-") as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps(script))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("WINDROW_RUN_DIR", None)
        (folder / "run").mkdir()
        if run_dir:
            environment["WINDROW_RUN_DIR"] = str(folder / run_dir)
        command = [str(PYTHON), str(DRIVER), "script.json", "result.json"]
        log = folder / "scheduler.log"
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PROGRESS_S)
                if (progress := folder / "progress").exists():
                    # In one write: another thread prints as well.
                    print(f"  {run_dir or 'stock'}: {progress.read_text()}\n", end="", flush=True)
        result = folder / "result.json"
        if not result.exists():
            raise RuntimeError(f"the scheduler died:\n{log.read_text(errors='replace')[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


if __name__ == "__main__":
    sys.exit(main())
