"""Worth of each part of `windrow`, and of FineInfer's bound: in the simulator.

A part is taken out, and the same cluster with the same requests is
simulated: an H200 that serves Llama-3-8B to the Azure conversation load, by default on every SM
(`--partition none`: parts of steps exist there only) and on SMs of its own. Simulated figures tell
policies apart; they say nothing of a real device (docs/simulator.md).
Example: python -m benchmarks.policy_parts --json /tmp/policy_parts.json
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from benchmarks.harness import Baseline, Better, Result, arguments, environment, write
from windrow_sidecar.qos.policies import FIGURES
from windrow_simulator.figures import PolicyFigures
from windrow_simulator.run import simulate
from windrow_simulator.scenario import ALONE, SimulationSettings, build

OBJECTIVES_MS = (7.0, 8.0, 12.0, 20.0)
BOUNDS_MS = (100.0, 400.0, 1000.0)


def _constants(**values: float) -> AbstractContextManager[Any]:
    # Handed to a slot's policy and predictor when it is made, so a patch reaches them.
    return patch.dict(FIGURES, values)


PARTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as it is": _constants,
    "without parts of steps": lambda: _constants(part_gain=math.inf),
    "without lessons before parts": lambda: _constants(lessons=0),
    "without headroom before growing": lambda: _constants(grow_headroom=0.0),
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
                found = simulated(seconds, partition=partition, objectives_ms=OBJECTIVES_MS)
            base = base or found
            for objective_ms, figures in found.items():
                what = f"windrow {name}, {partition}, {objective_ms:g} ms"
                results += rows_of(what, figures, base[objective_ms])
    results += _deferral(seconds)
    write("policy_parts", results, env, options.json)


def simulated(seconds: float, **changes: Any) -> dict[float, PolicyFigures]:
    """Return the figures of a policy by objective, on eight simulated GPUs."""
    settings = SimulationSettings(
        rates="published",
        gpus=8,
        sample=8,
        seconds=seconds,
        warm_up=20.0,
        rate=8.0,
        processes=1,  # of this process, where the variant is
    )
    found = simulate(build(replace(settings, **changes)))
    return {f.objective_ms: f for f in found if f.policy != ALONE}


def rows_of(
    name: str, figures: PolicyFigures, base: PolicyFigures, *more: tuple[str, str, str]
) -> list[Result]:
    """Return eta, steps over the objective and more of the figures, beside those of `base`.

    `more`: what each is, its field, its unit.
    """
    shown = (("eta", "eta", ""), ("steps over the objective", "over", "%"), *more)
    results = []
    for what, field, unit in shown:
        scale = 100 if unit == "%" else 1
        value, before = (round(scale * getattr(of, field), 4) for of in (figures, base))
        better: Better = "higher" if field in ("eta", "requests_within") else "lower"
        at = Baseline("as it is", before)
        results.append(Result(f"{name}: {what}", value, unit, better, baseline=at))
    return results


def _deferral(seconds: float) -> list[Result]:
    """FineInfer at a rate at which its batch runs empty, by its bound on waiting."""
    results = []
    base: PolicyFigures | None = None
    for bound_ms in BOUNDS_MS:
        load = {"policy": "fineinfer", "rate": 0.5, "deferral_ms": bound_ms}
        figures = simulated(seconds, **load)[12.0]
        base = base or figures
        results += rows_of(f"fineinfer, deferralBound {bound_ms:g} ms", figures, base)
    return results


if __name__ == "__main__":
    main()
