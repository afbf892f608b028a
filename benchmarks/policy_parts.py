"""What each part of `windrow` is worth, and what FineInfer's bound buys: in the simulator.

A part is taken out, or one that is off is put in, and the same cluster with the same requests is
simulated: an H200 that serves Llama-3-8B to the Azure conversation load, by default on every SM
(`--partition none`: parts of steps exist there only) and on SMs of its own. Simulated figures tell
policies apart; they say nothing of a real device (docs/simulator.md).
Example: python -m benchmarks.policy_parts --json /tmp/policy_parts.json
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

from benchmarks.harness import Baseline, Result, arguments, environment, write
from windrow_sidecar.qos import predictor
from windrow_sidecar.qos.policies import POLICIES, windrow
from windrow_simulator.figures import PolicyFigures
from windrow_simulator.run import simulate
from windrow_simulator.scenario import ALONE, SimulationSettings, build

OBJECTIVES_MS = (7.0, 8.0, 12.0, 20.0)
BOUNDS_MS = (100.0, 400.0, 1000.0)


@contextmanager
def _constants(**values: float) -> Iterator[None]:
    with ExitStack() as patches:
        for name, value in values.items():
            patches.enter_context(patch.object(windrow, name, value))
        yield


@contextmanager
def _without_lessons() -> Iterator[None]:
    with patch.object(predictor, "LESSONS", 0):
        yield


@contextmanager
def _with_turns() -> Iterator[None]:
    with patch.dict(POLICIES, {"windrow": partial(windrow.Windrow, turns=True)}):
        yield


# Constants are handed to the compiled policy when a slot is made, so a patch reaches it.
PARTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "as it is": _constants,
    "without parts of steps": lambda: _constants(PART_GAIN=math.inf),
    "without lessons before parts": _without_lessons,
    "without headroom before growing": lambda: _constants(GROW_HEADROOM=0.0),
    "with turns": _with_turns,
}


def main() -> None:
    """Simulate each variant; print and write the figures."""
    options = arguments(__doc__).parse_args()
    env = environment()
    seconds = 30.0 if options.quick else 180.0
    results = []
    for partition in ("none", "green"):
        base: dict[float, PolicyFigures] = {}
        for name, without in PARTS.items():
            with without():
                found = _simulated("windrow", partition, seconds, OBJECTIVES_MS)
            base = base or found
            for objective_ms, figures in found.items():
                results += _rows(
                    f"windrow {name}, {partition}, {objective_ms:g} ms", figures, base[objective_ms]
                )
    results += _deferral(seconds)
    write("policy_parts", results, env, options.json)


def _simulated(
    policy: str, partition: str, seconds: float, objectives_ms: tuple[float, ...], **more: float
) -> dict[float, PolicyFigures]:
    settings = SimulationSettings(
        gpus=8,
        sample=8,
        seconds=seconds,
        warm_up=20.0,
        rate=float(more.get("rate", 8.0)),
        deferral_ms=float(more.get("deferral_ms", 0.0)),
        policy=policy,
        objectives_ms=objectives_ms,
        partition=partition,
        processes=1,  # of this process, where the variant is
    )
    return {f.objective_ms: f for f in simulate(build(settings)) if f.policy != ALONE}


def _rows(name: str, figures: PolicyFigures, base: PolicyFigures) -> list[Result]:
    return [
        Result(
            f"{name}: eta",
            round(figures.eta, 4),
            "",
            "higher",
            baseline=Baseline("as it is", round(base.eta, 4)),
        ),
        Result(
            f"{name}: steps over the objective",
            round(100 * figures.over, 3),
            "%",
            "lower",
            baseline=Baseline("as it is", round(100 * base.over, 3)),
        ),
    ]


def _deferral(seconds: float) -> list[Result]:
    """FineInfer at a rate at which its batch runs empty, by its bound on waiting."""
    results = []
    base: PolicyFigures | None = None
    for bound_ms in BOUNDS_MS:
        found = _simulated("fineinfer", "green", seconds, (12.0,), rate=0.5, deferral_ms=bound_ms)
        figures = found[12.0]
        base = base or figures
        results += _rows(f"fineinfer, deferralBound {bound_ms:g} ms", figures, base)
    return results


if __name__ == "__main__":
    main()
