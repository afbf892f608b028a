"""Share of decode's step in the demo's engine that our own code takes.

The built-in engine decodes the demo's model; blocks of steps without a hook, with one that only
observes, and with one that harvests alternate in one run, so that all see the same machine. A
worker's offers come from another process. Example: python -m benchmarks.demo --json /tmp/demo.json
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.progress import track

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, write
from windrow.eventlog import StepEvent
from windrow.rundir import ENV_RUN_DIR
from windrow_sidecar.engines.builtin import loading, profiling
from windrow_sidecar.engines.builtin.device import open_device
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.loop import DecodeLoop, LoopParts
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.threads import Threads
from windrow_sidecar.engines.harvest import HarvestHook, HarvestSettings
from windrow_sidecar.engines.hook import FailClosed, NullHook, StepHook, StepInput
from windrow_sidecar.engines.profile import EFFORTS, Subject, document, host_splits, plan
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Grant

BATCH, PROMPT = 6, 1000  # the conversation trace's time-weighted batch and mean prompt
BLOCK = 50  # steps between two changes of the hook
GOAL_PERCENT = 1.0
TERMS = HarvestTerms("bench", "windrow", "harvest", objective_us=1_000_000)  # always feasible
WAYS: dict[str, HarvestTerms | None] = {
    "no hook": None,
    "observe": replace(TERMS, mode="observe"),
    "harvest": TERMS,
}


class Switch:
    """One hook for the loop, behind which the one that is measured changes."""

    def __init__(self) -> None:
        self.inner: StepHook = NullHook()

    @property
    def request_objective_us(self) -> int:
        """Ask the present one."""
        return self.inner.request_objective_us

    @property
    def deferral_us(self) -> int:
        """See StepHook."""
        return self.inner.deferral_us

    @property
    def first_token_objective_us(self) -> int:
        """Ask the present one."""
        return self.inner.first_token_objective_us

    def before_step(self, facts: StepInput) -> Grant:
        """Ask the present one."""
        return self.inner.before_step(facts)

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Tell the present one."""
        self.inner.after_step(end_ns, latency_us)

    def after_prompt(self, tokens: int, latency_us: int, grant: Grant) -> None:
        """Tell the present one."""
        self.inner.after_prompt(tokens, latency_us, grant)

    def after_first_token(self, after_us: int) -> None:
        """Tell the present one."""
        self.inner.after_first_token(after_us)

    def idle(self, now_ns: int) -> Grant:
        """Ask the present one."""
        return self.inner.idle(now_ns)

    def close(self) -> None:
        """End the present one."""
        self.inner.close()


def main() -> None:
    """Run, compare, write."""
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "windrow-tiny")
    options = parser.parse_args()
    env = environment()
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        events = _measure(options, Path(folder))
    write("demo", _results(events), env, options.json)


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, list[StepEvent]]:
    settings = EngineSettings.from_command_line(
        ["--model-path", str(options.model)], {ENV_RUN_DIR: str(folder)}
    )
    config = read_config(settings.model_path)
    threads = Threads()
    device = open_device(settings, threads)
    arena = loading.make_arena(settings, config, device)
    context = arena.geometry.chunks * arena.geometry.slots_per_chunk
    torch.set_flush_denormal(True)  # as the engine does
    parts = loading.load(settings, config, device, arena, None, context, "0" * 64)
    profiling.settle_threads(parts, threads, batch=BATCH, context=PROMPT)
    profile = _profile(parts, context)
    hook = HarvestHook(
        arena, host_splits(parts.units), profile, HarvestSettings(max_batch=settings.max_running)
    )
    socket = str(folder / "arena-0.sock")
    arena.serve(socket)
    rounds = 4 if options.quick else 40
    with _worker(socket):
        return _alternate(parts, hook, rounds)


def _profile(parts: LoopParts, context: int) -> dict[str, object]:
    effort = EFFORTS["quick"]
    points = plan(
        host_splits(parts.units),
        effort,
        max_batch=16,
        max_tokens=context // 2,
        max_context=context,
    )
    subject = Subject("host", "host", "builtin", "0", "0" * 64)
    samples = profiling.measure(parts, points, effort).samples
    return document(subject, samples, taken_at=datetime.now(UTC))


@contextlib.contextmanager
def _worker(socket: str) -> Iterator[None]:
    """The worker's side of the page, in a process of its own."""
    module = "windrow_sidecar.testing.page_worker"
    process = subprocess.Popen(
        [sys.executable, "-m", module, socket, "1", "8"], stdout=subprocess.PIPE, process_group=0
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _alternate(parts: LoopParts, hook: HarvestHook, rounds: int) -> dict[str, list[StepEvent]]:
    switch = Switch()
    steps = len(WAYS) * BLOCK
    events: dict[str, list[StepEvent]] = defaultdict(list)
    with profiling.muted(replace(parts, hook=FailClosed(switch))) as loop:
        for _ in track(range(rounds), description="rounds"):
            # New requests each round: contexts stay those of the trace.
            parts.scheduler.clear()
            for i in range(BATCH):
                parts.scheduler.submit(profiling.request(i, PROMPT, steps + 1))
            for way, terms in WAYS.items():
                switch.inner = NullHook() if terms is None else hook
                hook.set_terms(terms)
                events[way] += _block(loop)
    hook.close()
    return events


def _block(loop: DecodeLoop) -> list[StepEvent]:
    """Steps of one way, without the first ones, in which partition and caches change."""
    made = [event for _ in range(BLOCK) if (event := loop.step()) is not None]
    return made[5:]


def _results(events: dict[str, list[StepEvent]]) -> list[Result]:
    results = []
    base = statistics.median(_latency_us(e) for e in events["no hook"])
    for way in ("observe", "harvest"):
        shares = sorted(100 * e.hook_us / _latency_us(e) for e in events[way])
        costs = sorted(e.hook_us for e in events[way])
        p99 = int(0.99 * len(costs))
        quartiles = statistics.quantiles(shares, n=4)
        results += [
            Result(
                f"{way}: share of a step, mean",
                round(statistics.mean(shares), 3),
                "%",
                "lower",
                GOAL_PERCENT,
                round(quartiles[2] - quartiles[0], 3),
            ),
            Result(f"{way}: cost p50", round(statistics.median(costs), 1), "us", "lower"),
            Result(f"{way}: cost p99", round(costs[p99], 1), "us", "lower"),
        ]
    observed = statistics.median(_latency_us(e) for e in events["observe"])
    results.append(
        Result(
            "observe: step p50 on all cores",
            round(observed, 1),
            "us",
            "lower",
            baseline=Baseline("no hook", round(base, 1)),
        )
    )
    return results


def _latency_us(event: StepEvent) -> float:
    return (event.end_ns - event.start_ns) / 1e3


if __name__ == "__main__":
    main()
