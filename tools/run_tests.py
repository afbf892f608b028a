"""Run the passes of the tests one after the other, also after a red one, and sum them up."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

WIDTH = 80
# What pytest calls them, in the order of its own last line.
OUTCOMES = ("failed", "passed", "skipped", "error")


@dataclass(frozen=True)
class Pass:
    """One call of pytest.

    Attributes:
        name: for the summary.
        arguments: of pytest.
        environment: beside this process's own.
        repeats: whether the other passes do the same on this machine; then it is left out.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    repeats: Callable[[], bool] = lambda: False


def avx2_is_the_best() -> bool:
    """Return whether this processor has AVX2 without AVX-512: torch then takes AVX2 kernels."""
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return "avx2" in words and "avx512f" not in words


QUANTIZED = Path(sys.prefix) / "quantized"
# One process more than cores: those that wait for an operator or a server leave theirs to others.
PROCESSES = str(min(4, (os.cpu_count() or 1) + 1))
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
SIDE_BY_SIDE = ("--numprocesses", PROCESSES, *BY_FILE)
PAIRED = ("--numprocesses", "2", *BY_FILE)
# Where the marks of a pass are: to collect all of tests/ takes as long as some passes run, since
# each module of tests/contract imports torch and what it compares with.
ALONE_LIES = ("tests/e2e", "tests/gpu", "tests/integration")
PAIRED_LIES = ("tests/e2e", "tests/integration", "tests/shim")
EXTENDED_LIES = ("tests/contract", "tests/e2e", "tests/integration", "tests/shim")
SGLANG_LIES = ("tests/sglang", "tests/integration/test_adapters_in_sglang.py")
QUANTIZED_LIES = ("tests/contract/test_training_options.py",)
EQUALITY_LIES = (
    "tests/contract/test_finetune_equals_peft.py",
    "tests/contract/test_joined_products.py",
    "tests/contract/test_layer_graphs.py",
    "tests/contract/test_packed_layers.py",
    "tests/contract/test_streamed_layers.py",
    "tests/integration/test_engine_model.py",
)
# Tests of one file go to several processes: their small products keep one thread busy.
EQUALITY = (
    *("-m", "equality", *EQUALITY_LIES),
    *("--numprocesses", "auto", "--maxprocesses", "4", "--dist", "worksteal"),
)
# Who owns a chunk, when the worker may run, what it learns, what decode answers.
CORE = [
    *(
        f"tests/contract/test_{name}.py"
        for name in (
            "arena",
            "arena_model",
            "short_memory",
            "policy_contract",
            "runner",
            "finetune_checkpoints",
            "finetune_equals_peft",
            "finetune_orders",
        )
    ),
    "tests/integration/test_engine_model.py",
]
# Of each folder's own command, or of another pass.
ELSEWHERE = "not quantized and not sglang and not long"
ALONE, PAIRED_ONLY = f"alone and {ELSEWHERE}", f"paired and {ELSEWHERE}"
BESIDE_OTHERS = f"not alone and not paired and {ELSEWHERE}"
PASSES = {
    # After each change.
    "test": (
        Pass("side by side", ("-m", f"{BESIDE_OTHERS} and not extended", *SIDE_BY_SIDE)),
        # Half of their time is waiting for what a worker does in idle time; four of them would keep
        # each other's from it.
        Pass("two at a time", ("-m", f"{PAIRED_ONLY} and not extended", *PAIRED_LIES, *PAIRED)),
        # They have the machine to themselves.
        Pass("alone", ("-m", f"{ALONE} and not extended", *ALONE_LIES)),
        # bitsandbytes is beside the environment: peft imports it wherever it is.
        Pass("quantized", ("-m", "quantized", *QUANTIZED_LIES), {"PYTHONPATH": str(QUANTIZED)}),
    ),
    # What `.ci/run` plays beside that; CONTRIBUTING.md says what and why.
    "extended": (
        Pass(
            "side by side", ("-m", f"{BESIDE_OTHERS} and extended", *EXTENDED_LIES, *SIDE_BY_SIDE)
        ),
        # Rounding falls elsewhere in each of torch's families of kernels.
        Pass("equality, plain kernels", EQUALITY, {"ATEN_CPU_CAPABILITY": "default"}),
        Pass(
            "equality, AVX2 kernels",
            EQUALITY,
            {"ATEN_CPU_CAPABILITY": "avx2"},
            repeats=avx2_is_the_best,
        ),
        Pass("two at a time", ("-m", f"{PAIRED_ONLY} and extended", *PAIRED_LIES, *PAIRED)),
        Pass("alone", ("-m", f"{ALONE} and extended", *ALONE_LIES)),
    ),
    # A server's start is one process that imports; what trains beside one runs alone.
    "sglang": (
        Pass("two at a time", ("-m", "sglang and not alone and not long", *SGLANG_LIES, *PAIRED)),
        Pass("alone", ("-m", "sglang and alone and not long", *SGLANG_LIES)),
    ),
    # What takes minutes: each fault on a cluster of processes, and a comparison of ways of sharing.
    "e2e": (
        Pass("faults", ("tests/e2e/faults",)),
        Pass("comparison", ("tests/e2e/test_compare.py",)),
        Pass("SGLang over ranks", ("-m", "long", "tests/sglang")),
    ),
    # Under it the whole "side by side" runs for ten minutes; these say most of what a change broke.
    "check": (
        Pass(
            "units and core contracts",
            (
                "-m",
                "not alone and not paired and not quantized",
                *SIDE_BY_SIDE,
                "tests/unit",
                "tests/layout",
                *CORE,
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Ran:
    """Result of a pass.

    Attributes:
        name: of the pass.
        code: exit code of pytest.
        seconds: that it took.
        cpu_seconds: of CPU time that it and the processes which it has reaped used.
        counts: tests by outcome.
        red: names of what failed, as pytest takes them.
    """

    name: str
    code: int
    seconds: float
    cpu_seconds: float
    counts: Counter[str]
    red: list[str]


def run(passes: Sequence[Pass], *options: str) -> int:
    """Run them all; returns the worst of their exit codes. An interrupt ends the whole run.

    `options`: handed to each call of pytest.
    """
    ran: list[Ran] = []
    begun, interrupted = time.monotonic(), False
    for this in passes:
        if this.repeats():
            print(f"{f' {this.name}: what this processor has anyway ':#^{WIDTH}}", flush=True)
            continue
        print(f"{f' {this.name} ':#^{WIDTH}}", flush=True)
        one, interrupted = _run(this, options)
        ran.append(one)
        if interrupted:
            break
    print("\n".join(_summary(ran, time.monotonic() - begun)), flush=True)
    return max([one.code for one in ran] + [130 * interrupted])


def _run(this: Pass, options: Sequence[str]) -> tuple[Ran, bool]:
    begun, cpu_begun, interrupted = time.monotonic(), _cpu_of_children_s(), False
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *this.arguments, *options]
        command += [f"--junit-xml={report}", "--override-ini=junit_family=xunit1"]
        process = subprocess.Popen(command, env=os.environ | this.environment)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            interrupted, code = True, process.wait()  # the terminal has signalled it as well
        code = code if code >= 0 else 128 - code
        counts, red = _read(report)
        if code and not red and not interrupted:
            counts["error"] += 1
            red = [f"pytest itself ended with exit code {code}"]
        seconds, cpu_seconds = time.monotonic() - begun, _cpu_of_children_s() - cpu_begun
        return Ran(this.name, code, seconds, cpu_seconds, counts, red), interrupted


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(report: Path) -> tuple[Counter[str], list[str]]:
    """Return counts by outcome and the names of what is red; a pass that died left no report."""
    counts: Counter[str] = Counter()
    red: dict[str, None] = {}
    if not report.exists():
        return counts, []
    for suite in ElementTree.parse(report).iter("testsuite"):
        of = {name: int(suite.get(name, 0)) for name in ("failures", "errors", "skipped")}
        counts["passed"] += int(suite.get("tests", 0)) - sum(of.values())
        counts.update(failed=of["failures"], error=of["errors"], skipped=of["skipped"])
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                place = case.get("file") or case.get("classname", "")
                red["::".join(filter(None, (place, case.get("name"))))] = None
    return counts, list(red)


def _summary(ran: Sequence[Ran], seconds: float) -> Iterator[str]:
    yield f"{' summary of all passes ':=^{WIDTH}}"
    for one in ran:
        for name in one.red:
            yield f"FAILED {name} ({one.name})"
    for one in ran:
        yield (
            f"{one.name:<28}{_counted(one.counts)} in {one.seconds:.1f}s, "
            f"{one.cpu_seconds:.0f}s of CPU"
        )
    total = sum((one.counts for one in ran), Counter[str]())
    yield f"{f' {_counted(total)} in {seconds:.2f}s ':=^{WIDTH}}"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o]) or "no tests ran"


def chosen(arguments: Sequence[str]) -> list[Pass]:
    """Return the passes that a command line names.

    `arguments`: a name of `PASSES`, then `--only NAME` or `--but NAME`, each any number of times.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passes", choices=PASSES)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--but", action="append", default=[], metavar="NAME")
    said = parser.parse_args(arguments)
    passes = PASSES[said.passes]
    names = [this.name for this in passes]
    for name in (*said.only, *said.but):
        if name not in names:
            parser.error(f"{name!r} is not a pass of {said.passes}: choose from {names}")
    wanted = set(said.only or names) - set(said.but)
    return [this for this in passes if this.name in wanted]


if __name__ == "__main__":
    sys.exit(run(chosen(sys.argv[1:])))
