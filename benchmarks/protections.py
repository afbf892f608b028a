"""Worth of decode's protections, of the predictor's forms and of saved slack.

In the simulator, where the step hook is that of production: eight H200 serve Llama-3-8B to the
Azure conversation load, decode and worker on SMs of their own, and one thing is changed at a time:
- each protection is off once (`--without`), under a load that shows what it is for;
- the predictor learns as ours does, as Harli's and as LLMStation's (`--predictor`), where decode is
  on every SM (`--partition none`), since what a worker costs is least known there;
- the objective is for each step, or for the mean of each request's tokens (`--scope`).
Simulated figures tell these apart; they say nothing of a real device (docs/simulator.md).

With --engine the protections are off with the built-in engine, a worker at work and a load with
surges on the cores of this machine, in rounds (`benchmarks.light.ablations`); six minutes.

Example: python -m benchmarks.protections --json /tmp/protections.json
Example: python -m benchmarks.protections --engine --json /tmp/protections-engine.json
"""

from __future__ import annotations

from typing import Any, get_args

from benchmarks.harness import Result, arguments, environment, write
from benchmarks.light import ablations
from benchmarks.policy_parts import OBJECTIVES_MS, rows_of, simulated
from windrow_sidecar.qos.predictor import PredictorForm
from windrow_sidecar.qos.terms import SCOPES
from windrow_simulator.figures import PolicyFigures

# Which load shows what a protection is for.
PROTECTIONS: dict[str, dict[str, Any]] = {
    # An objective that allows steps with which decode cannot keep up.
    "guard": {"objectives_ms": (20.0,), "rate": 20.0},
    "predictor": {"objectives_ms": (8.0,)},
    "handover": {"objectives_ms": (8.0,), "rate": 16.0},
    # Little memory, most of it lent.
    "reserve": {
        "objectives_ms": (12.0,),
        "memory_gb": 30.0,
        "max_memory_percent": 100,
        "train": "llama-3-8b",
    },
}


def main() -> None:
    """Measure each variant; print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--engine", action="store_true", help="with the engine, on this machine")
    parser.add_argument("--rounds", type=int, default=6, help="with --engine (default: 6)")
    options = parser.parse_args()
    env = environment()
    if options.engine:
        figures, how = ablations.run(1 if options.quick else options.rounds)
        write("protections-engine", figures, env | how, options.json)
        return
    seconds = 30.0 if options.quick else 180.0
    results = [*_protections(seconds), *_forms(seconds), *_slack(seconds)]
    write("protections", results, env, options.json)


def _protections(seconds: float) -> list[Result]:
    """Each protection of decode off once, beside all of them on under the same load."""
    results = []
    for name, load in PROTECTIONS.items():
        base, off = (
            next(iter(simulated(seconds, processes=2, **load, without=without).values()))
            for without in ((), (name,))
        )
        more = (("TTFT p99", "ttft_p99_ms", "ms"), ("retracted requests", "retractions", ""))
        what = f"without {name}, {load['objectives_ms'][0]:g} ms"
        results += rows_of(what, off, base, ("TPOT p99", "tpot_p99_ms", "ms"), *more)
    return results


def _forms(seconds: float) -> list[Result]:
    """The papers' forms of the predictor beside our own."""
    results = []
    base: dict[float, PolicyFigures] = {}
    for form in get_args(PredictorForm):
        changes = {"predictor": form, "partition": "none", "objectives_ms": OBJECTIVES_MS}
        found = simulated(seconds, processes=2, **changes)
        base = base or found
        for objective_ms, figures in found.items():
            results += rows_of(
                f"predictor {form}, {objective_ms:g} ms", figures, base[objective_ms]
            )
    return results


def _slack(seconds: float) -> list[Result]:
    """An objective for the mean of each request's tokens beside one for each step."""
    results = []
    base: dict[float, PolicyFigures] = {}
    for scope in SCOPES:
        found = simulated(seconds, processes=2, scope=scope, objectives_ms=OBJECTIVES_MS)
        base = base or found
        for objective_ms, figures in found.items():
            results += rows_of(
                f"{scope}, {objective_ms:g} ms",
                figures,
                base[objective_ms],
                ("requests within it", "requests_within", "%"),
                ("requests' TPOT p99", "request_tpot_p99_ms", "ms"),
            )
    return results


if __name__ == "__main__":
    main()
