"""Measurements of a GPU in one command: `make gpu`.

In order: all that it must have, the tests that want one, decode beside a worker, SGLang where it is
installed, the engine against a plain loop, its layer programs beside each other, what memory and
shares cost. Each is a process with a
limit of time; what does not fit into the budget is left out by name, and what fails keeps nothing
from what follows but the first, without which nothing can run. Each leaves its JSON and its log in
a folder, first light is resumed.

For example:
  make gpu ARGS="--budget 600 --out out/h200"
  make gpu ARGS="--only first_light memory --json"
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Between a request to end and the end: decode and worker leave the GPU.
ENDS_WITHIN_S = 20.0


@dataclass(frozen=True)
class Step:
    """One thing to run.

    Attributes:
        name: of its JSON and of its log.
        command: OUT in it is the folder.
        least_s, limit_s: it is not begun with less left, and ended after so much.
        needed: nothing can follow where it fails.
        keeps: what it prints is its JSON.
    """

    name: str
    command: tuple[str, ...]
    least_s: float
    limit_s: float
    needed: bool = False
    keeps: bool = False


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step: "passed", "failed", "too long" or "left out"."""

    name: str
    how: str
    seconds: float


def steps(shape: str) -> tuple[Step, ...]:
    """Return the steps, the most informative for their time first."""

    def benchmark(name: str, *flags: str) -> tuple[str, ...]:
        json_file = f"--json=OUT/{name}.json"
        return (sys.executable, "-m", f"benchmarks.{name}", "--driver=cuda", *flags, json_file)

    windrow = str(Path(sys.executable).with_name("windrow"))
    doctor = (windrow, "doctor", "--gpu", "--json")
    tests = (sys.executable, "-m", "pytest", "tests/gpu", "tests/contract", "-m", "gpu", "-q")
    asked = (f"--shape={shape}", "--out=OUT/sglang", "--json=OUT/sglang.json")
    sglang = (sys.executable, "-m", "benchmarks.sglang_gpu", "--driver=cuda", *asked)
    in_parallel = ("-n", "8", "--dist", "loadfile", "-p", "no:benchmark")
    return (
        Step("doctor", doctor, 30, 120, needed=True, keeps=True),
        Step("tests", tests + in_parallel, 60, 300),
        Step("first_light", benchmark("first_light", f"--shape={shape}", "--resume"), 120, 900),
        Step("sglang", sglang, 60, 560),
        Step("finetune", benchmark("finetune", f"--shape={shape}", "--quick"), 120, 900),
        Step("layer_programs", benchmark("layer_programs", f"--shape={shape}", "--quick"), 90, 600),
        Step("memory", benchmark("memory", "--quick"), 60, 300),
    )


def run(planned: Sequence[Step], out: Path, budget_s: float) -> list[Outcome]:
    """Run what fits into so many seconds; says on stderr what begins and how it ends."""
    out.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + budget_s
    outcomes: list[Outcome] = []
    is_over = False
    for step in planned:
        left_s = ends_s - time.monotonic()
        if is_over or left_s < step.least_s:
            outcomes.append(Outcome(step.name, "left out", 0.0))
            continue
        print(f"{step.name}: {min(left_s, step.limit_s):.0f} s at most", file=sys.stderr)
        outcome = _run_one(step, out, min(left_s, step.limit_s))
        print(f"{step.name}: {outcome.how}, {outcome.seconds:.0f} s", file=sys.stderr)
        outcomes.append(outcome)
        is_over = step.needed and outcome.how != "passed"
    return outcomes


def _run_one(step: Step, out: Path, limit_s: float) -> Outcome:
    command = [word.replace("OUT", str(out), 1) for word in step.command]
    began_s = time.monotonic()
    with contextlib.ExitStack() as files:
        log = files.enter_context((out / f"{step.name}.log").open("w"))
        printed = files.enter_context((out / f"{step.name}.json").open("w")) if step.keeps else log
        process = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=log)
        try:
            how = "failed" if process.wait(limit_s) else "passed"
        except subprocess.TimeoutExpired:
            how = "too long"
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return Outcome(step.name, how, time.monotonic() - began_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; 1 where one has not passed."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in steps("")]
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/gpu"), help="the folder (default: %(default)s)")
    add("--budget", type=float, default=2400, metavar="SECONDS", help="default: %(default)s")
    add("--shape", default="llama-3-8b", help="of the model (default: %(default)s)")
    add("--only", nargs="+", choices=names, metavar="STEP", help=f"of {', '.join(names)}")
    add("--json", action="store_true", help="tell how each step went as JSON")
    options = parser.parse_args(argv)
    planned = [s for s in steps(options.shape) if not options.only or s.name in options.only]
    outcomes = run(planned, options.out.resolve(), options.budget)
    if options.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        for outcome in outcomes:
            print(f"  {outcome.name:<12} {outcome.how:<9} {outcome.seconds:>6.0f} s")
        print(f"  JSON and logs: {options.out}")
    return int(any(outcome.how != "passed" for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
