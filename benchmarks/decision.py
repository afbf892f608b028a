"""What a decision costs: part by part in a warm interpreter, and in place, between decode steps.

In place, matrix products and a walk through more memory than the caches hold come between any two
decisions, as a decode step does: caches are cold then. Decided anew each time; a decision that
stands is measured apart. Example: python -m benchmarks.decision --json /tmp/decision.json
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Baseline, Result, arguments, environment, middle, write
from windrow_sidecar.engines.harvest import HarvestSettings
from windrow_sidecar.engines.hook import NullHook, StepHook, StepInput
from windrow_sidecar.qos.control import EAGER
from windrow_sidecar.qos.levels import Partitioning, host_levels, overlapping_levels
from windrow_sidecar.qos.policies import POLICIES, Context, make_policy
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


def main() -> None:
    """Time each part in batches of a thousand calls; print and write the figures."""
    options = arguments(__doc__).parse_args()
    env = environment()
    repeats = 5 if options.quick else 40
    results = [
        *_predictor(repeats, host_levels(2), "2 cores"),
        *_predictor(repeats, GPU, "8 levels"),
        *_policies(repeats),
        *_hook(repeats),
        *_in_place(60 * repeats),
    ]
    write("decision", results, env, options.json)


def _timed(call: Callable[[int], object], repeats: int) -> tuple[float, float]:
    """Median and spread of microseconds a call."""
    n = 1000
    per_call = []
    for _ in range(repeats):
        begin = time.thread_time_ns()  # of this thread: whoever else runs here does not count
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
    predictor = Predictor(GPU, SOLO)
    predicted, solo = predictor.predict(6, 7000)
    ctx = Context(GPU, len(GPU.splits), 132, predicted, 0.08, 3, 1 << 60, False, 5000, solo, 32)
    view = View(batch=6, context_tokens=7000, objective_us=20_000)
    results = []
    for name in sorted(POLICIES):
        decide = make_policy(name).decide
        timed = _timed(partial(_decide, decide, view, ctx), repeats)
        results.append(_result(f"policy {name}, 8 levels", timed))
    return results


def _decide(
    decide: Callable[[View, Offer, Context], Grant], view: View, ctx: Context, _: int
) -> Grant:
    return decide(view, EAGER, ctx)


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
    """The hook and the decision inside of it, each time after what a decode step does to caches."""
    pollute = _decode_like()
    results = []
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        engine = SteppingEngine(Path(folder), HarvestSettings(steady_ns=0))
        engine.hook.set_terms(HarvestTerms("bench", "windrow", "harvest", objective_us=12_000))
        decide, decisions_ns = engine.hook.controller.decide, []

        def timed(*args: Any, **kwargs: Any) -> Grant:
            begin_ns = time.perf_counter_ns()
            grant = decide(*args, **kwargs)
            decisions_ns.append(time.perf_counter_ns() - begin_ns)
            return grant

        engine.hook.controller.decide = timed  # type: ignore[method-assign]
        hooks_ns = _steps(engine, steps, pollute)
        engine.close()
        results += _quantiles("decision in place, anew", decisions_ns, (5.0, 15.0))
        results += _quantiles("before_step in place, anew", hooks_ns)
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        engine = SteppingEngine(Path(folder))
        engine.hook.set_terms(HarvestTerms("bench", "windrow", "harvest", objective_us=12_000))
        results += _quantiles("before_step in place, kept", _steps(engine, steps, pollute))
        engine.close()
    return results


def _steps(engine: SteppingEngine, steps: int, pollute: Callable[[], None]) -> list[int]:
    """Nanoseconds of `before_step`, beside a worker whose offers change."""
    page, hook, took_ns = engine.arena.page, engine.hook, []
    for i in range(steps):
        facts = StepInput(i, time.monotonic_ns(), 4, 2000 + i, 0, 0, 0)
        page.publish_offer(Offer(7, i, i, 1, 0, 1, 128, 1, (2000,), 0, 0, 0, 1000, i, 8, 0, i))
        pollute()
        begin_ns = time.perf_counter_ns()
        hook.before_step(facts)
        took_ns.append(time.perf_counter_ns() - begin_ns)
        hook.after_step(time.monotonic_ns(), 5000)
    return took_ns


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
    ordered = sorted(took_ns[len(took_ns) // 10 :])  # the first find nothing compiled or mapped
    return [
        Result(
            f"{name}, p{percent}",
            round(ordered[len(ordered) * percent // 100] / 1e3, 2),
            "us",
            "lower",
            goal,
        )
        for percent, goal in zip((50, 99), goals, strict=True)
    ]


def _hook_without_worker(hook: StepHook, repeats: int) -> tuple[float, float]:
    facts = StepInput(1, time.monotonic_ns(), 4, 2000, 0, 0, 0)
    return _timed(lambda _: hook.before_step(facts), repeats)


def _hook_with_worker(engine: SteppingEngine, repeats: int) -> tuple[float, float]:
    facts = StepInput(1, time.monotonic_ns(), 4, 2000, 0, 0, 0)
    page, hook = engine.arena.page, engine.hook

    def offer(i: int) -> None:
        page.publish_offer(Offer(7, i, i, 1, 0, 1, 128, 1, (2000,), 0, 0, 0, 1000, i, 8, 0, i))

    def step(i: int) -> None:
        offer(i)
        hook.before_step(facts)

    both, offers = _timed(step, repeats), _timed(offer, repeats)
    return both[0] - offers[0], both[1]


if __name__ == "__main__":
    main()
