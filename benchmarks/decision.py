"""Cost of a decision: part by part in a warm interpreter, and in place, between decode steps.

In place, matrix products and a walk through more memory than the caches hold come between any two
decisions, as a decode step does: caches are cold then. Each is decided again; a decision that
still holds is measured separately, and so are two readings of the clock.
`--against` takes the result of another checkout, played in turns with this one: its figures of the
same names become the baselines. Example: python -m benchmarks.decision --json /tmp/decision.json
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Baseline, Result, arguments, environment, middle, write
from windrow_sidecar.engines.harvest import HarvestSettings
from windrow_sidecar.engines.hook import NullHook, StepHook, StepInput
from windrow_sidecar.qos.control import EAGER, Controller
from windrow_sidecar.qos.levels import Partitioning, host_levels, overlapping_levels
from windrow_sidecar.qos.policies import POLICIES
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import SoloStepModel
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Grant, Offer, View
from windrow_sidecar.testing.stepping_engine import SteppingEngine

# The levels of an H200, with decode on all SMs.
GPU = overlapping_levels(132, (8, 16, 24, 32, 48, 64, 80))
SOLO = {
    units: SoloStepModel(2000 + 800 / units, 400 / units, 0.5 / units) for units in range(1, 133)
}

STANDING = HarvestSettings(steady_ns=60_000_000_000, worker_stale_ns=60_000_000_000)


def main() -> None:
    """Time each part in batches of a thousand calls; print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--against", metavar="FILE", help="decision.json of another checkout")
    options = parser.parse_args()
    env = environment()
    repeats = 5 if options.quick else 40
    results = [
        *_predictor(repeats, host_levels(2), "2 cores"),
        *_predictor(repeats, GPU, "8 levels"),
        *_policies(repeats),
        *_hook(repeats),
        *_in_place(60 * repeats),
    ]
    if options.against:
        results = _against(results, json.loads(Path(options.against).read_text()))
    write("decision", results, env, options.json)


def _against(results: Sequence[Result], other: dict[str, Any]) -> list[Result]:
    before = {row["name"]: row["value"] for row in other["results"]}
    name = f"commit {other['commit'][:8]}"
    return [
        replace(r, baseline=Baseline(name, before[r.name])) if r.name in before else r
        for r in results
    ]


def _timed(call: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Median and spread of microseconds a call."""
    n = 1000
    per_call = []
    for _ in range(repeats):
        begin = time.thread_time_ns()  # of this thread: other processes do not count
        for i in range(n):
            call(i)
        per_call.append((time.thread_time_ns() - begin) / n / 1e3)
    return middle(per_call)


def _result(
    name: str, timed: Sequence[float], goal: float | None = None, null: float | None = None
) -> Result:
    baseline = None if null is None else Baseline("no hook", round(null, 3))
    return Result(name, round(timed[0], 3), "us", "lower", goal, round(timed[1], 3), baseline)


def _predictor(repeats: int, levels: Partitioning, what: str) -> list[Result]:
    predictor = Predictor(levels, SOLO)
    predict = _timed(lambda i: predictor.predict_us(6 + i % 3, 7000 + i), repeats)
    learn = _timed(
        lambda i: predictor.observe(1, batch=6, context_tokens=7000, latency_us=6000 + i),
        repeats,
    )
    return [
        _result(f"predict every level, {what}", predict, goal=5.0),
        _result(f"learn from a step, {what}", learn),
    ]


def _policies(repeats: int) -> list[Result]:
    """A whole decision of each policy in a warm interpreter."""
    view = View(batch=6, context_tokens=7000, objective_us=20_000)
    results = []
    for name in sorted(POLICIES):
        controller = Controller(GPU, Predictor(GPU, SOLO))
        controller.set_terms(HarvestTerms("bench", name, "harvest", objective_us=20_000))
        timed = _timed(partial(_decide, controller, view, count(1)), repeats)
        results.append(_result(f"decision of {name}, warm, 8 levels", timed, goal=1.0))
    return results


def _decide(controller: Controller, view: View, clock_ns: Iterator[int], _: int) -> Grant:
    return controller.decide(view, EAGER, next(clock_ns), present=True)


def _hook(repeats: int) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        engine = SteppingEngine(Path(folder))
        engine.hook.set_terms(HarvestTerms("bench", "windrow", "harvest", objective_us=12_000))
        try:
            alone = _hook_without_worker(engine.hook, repeats)
            null = _hook_without_worker(NullHook(), repeats)
            beside = _hook_with_worker(engine, repeats)
        finally:
            engine.close()
    return [
        _result("before_step, no worker", alone, null=null[0]),
        _result("before_step, with a worker's offers", beside, goal=25.0, null=null[0]),
    ]


def _in_place(steps: int) -> list[Result]:
    """The hook, each time after what a decode step does to caches.

    In turns: an engine that decides again each time, and one whose decision holds (for longer than
    the product's 80 ms, which a busy machine would pass); so what the machine does meanwhile meets
    both alike. A step in which the kernel gave the core to someone else is not counted; how many
    that were is a result.
    """
    pollute = _decode_like()
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        slots = [
            _Slot(Path(folder) / str(i), settings)
            for i, settings in enumerate((HarvestSettings(steady_ns=0), STANDING))
        ]
        nothing_ns = []
        for i in range(steps):
            for slot in slots:
                slot.step(i, pollute)
            pollute()
            begin_ns = time.perf_counter_ns()
            nothing_ns.append(time.perf_counter_ns() - begin_ns)
        disturbed = 100 * sum(slot.disturbed for slot in slots) / (2 * steps)
        for slot in slots:
            slot.close()
    again, kept = slots
    return [
        *_quantiles("before_step in place, decided again", again.hooks_ns, (40.0, 100.0)),
        *_quantiles("before_step in place, kept", kept.hooks_ns, (8.0, None)),
        *_quantiles("two readings of the clock in place", nothing_ns),
        Result("steps that were disturbed and not counted", round(disturbed, 1), "%", "lower"),
    ]


class _Slot:
    """An engine that steps beside a worker whose offers change, and what its decisions took."""

    def __init__(self, folder: Path, settings: HarvestSettings) -> None:
        folder.mkdir()
        self._engine = SteppingEngine(folder, settings)
        self._engine.hook.set_terms(HarvestTerms("bench", "windrow", "harvest", 12_000))
        self.hooks_ns: list[int] = []
        self.disturbed = 0

    def step(self, i: int, pollute: Callable[[], None]) -> None:
        """One step after `pollute`; only the hook is timed."""
        page, hook = self._engine.arena.page, self._engine.hook
        facts = StepInput(i, time.monotonic_ns(), 4, 2000 + i, 0, 0, 0)
        page.publish_offer(Offer(7, i, 1, 0, 1, 128, (2000,), 0, 0, 0, 1000, i, 8, 0, i))
        pollute()
        before = _switches()
        begin_ns = time.perf_counter_ns()
        hook.before_step(facts)
        took_ns = time.perf_counter_ns() - begin_ns
        if _switches() == before:
            self.hooks_ns.append(took_ns)
        else:
            self.disturbed += 1
        hook.after_step(time.monotonic_ns(), 5000)

    def close(self) -> None:
        """Give everything back."""
        self._engine.close()


def _switches() -> int:
    """Count how often the kernel has taken the core from this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _decode_like() -> Callable[[], None]:
    """Some milliseconds of what a decode step does: products of a batch with all weights."""
    torch.set_num_threads(1)
    weights = [torch.randn(1024, 1024) for _ in range(16)]  # 64 MB, beyond the caches' 32
    batch = torch.randn(4, 1024)

    def step() -> None:
        x = batch
        with torch.inference_mode():
            for weight in weights:
                x = torch.tanh(x @ weight)

    return step


def _quantiles(
    name: str, took_ns: Sequence[int], goals: tuple[float | None, float | None] = (None, None)
) -> list[Result]:
    return [
        Result(
            f"{name}, p{percent}", _percentile_us(took_ns, percent), "us", "lower", goal, None, None
        )
        for percent, goal in zip((50, 99), goals, strict=True)
    ]


def _percentile_us(took_ns: Sequence[int], percent: int) -> float:
    ordered = sorted(took_ns[len(took_ns) // 10 :])  # the first find nothing compiled or mapped
    return round(ordered[len(ordered) * percent // 100] / 1e3, 2)


def _hook_without_worker(hook: StepHook, repeats: int) -> tuple[float, float]:
    facts = StepInput(1, time.monotonic_ns(), 4, 2000, 0, 0, 0)
    return _timed(lambda _: hook.before_step(facts), repeats)


def _hook_with_worker(engine: SteppingEngine, repeats: int) -> tuple[float, float]:
    facts = StepInput(1, time.monotonic_ns(), 4, 2000, 0, 0, 0)
    page, hook = engine.arena.page, engine.hook

    def offer(i: int) -> None:
        page.publish_offer(Offer(7, i, 1, 0, 1, 128, (2000,), 0, 0, 0, 1000, i, 8, 0, i))

    def step(i: int) -> None:
        offer(i)
        hook.before_step(facts)

    both, offers = _timed(step, repeats), _timed(offer, repeats)
    return both[0] - offers[0], both[1]


if __name__ == "__main__":
    main()
