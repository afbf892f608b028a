"""Error of the predictor on steps that it was not fitted on, on this machine.

Two full profiles of the same engine are taken one after the other (`windrow profile`, a minute
each). The points are dealt into three parts. Points that were not seen: each part is predicted by a
model fitted on the other two parts of the same profile. Nor the moment: each part of the second is
predicted by a model fitted on the first. The noise floor is how far the medians of one point are
apart in both; no predictor can better it.
Example: python -m benchmarks.predictor --json /tmp/predictor.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.harness import ROOT, Baseline, Result, arguments, environment, write
from windrow_sidecar.qos.co_run import CoRunFactors, CoRunSample, fit_co_run
from windrow_sidecar.qos.solo import SoloSample, fit_solo, solo_models

MODEL = ROOT / "models" / "windrow-tiny"
_PARTS = 3
_Sample = TypeVar("_Sample", SoloSample, CoRunSample)


def main() -> None:
    """Measure twice, predict the second by parts of the first; print and write the figures."""
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder; config.json will do")
    parser.add_argument(
        "--profiles", type=Path, nargs=2, help="two profiles that were taken before, instead"
    )
    options = parser.parse_args()
    env = environment()
    if options.profiles:
        first, second = (json.loads(path.read_text()) for path in options.profiles)
    else:
        effort = "quick" if options.quick else "full"
        first, second = (_taken(options.model, effort) for _ in range(2))
    prior = _taken(options.model, "roofline")
    write("predictor", [*figures(first, second), *of_prior(prior, second)], env, options.json)


def figures(first: dict[str, Any], second: dict[str, Any]) -> list[Result]:
    """Errors of both stages on what they were not fitted on; medians and 95th percentiles."""
    before, after = _solo_samples(first), _solo_samples(second)
    floor = _floor(before, after)
    unseen = [*_solo_errors(before, before), *_solo_errors(after, after)]
    results = [
        *_results("solo step, points not seen", unseen, 5.0, floor),
        *_results("solo step, nor the moment", _solo_errors(before, after), None, floor),
    ]
    beside_before, beside_after = _co_run_samples(first), _co_run_samples(second)
    if not beside_before:
        return results
    units = max(s.units for s in before)
    solo = {level: fit.model for level, fit in fit_solo(before).items()}
    by_form: dict[str, list[float]] = {"clamped, with a prior": [], "prior alone": []}
    for part in range(_PARTS):
        fitted, _ = fit_co_run(_others(beside_before, part), solo, units)
        for sample in _of(beside_after, part):
            step = sample.step
            alone_us = solo[step.units].predict_us(step.batch, step.context_tokens)
            for name, factors in zip(by_form, (fitted, CoRunFactors()), strict=True):
                stretch = factors.factor(step.units / units, sample.finetune_units / units)
                by_form[name].append(_off(alone_us * stretch, step.step_us))
    floor = _floor([s.step for s in beside_before], [s.step for s in beside_after])
    goal = 8.0
    for name, errors in by_form.items():
        results += _results(f"step beside a load, held out, {name}", errors, goal, floor)
        goal = None  # type: ignore[assignment]
    return results


def _solo_errors(before: list[SoloSample], after: list[SoloSample]) -> list[float]:
    errors = []
    for part in range(_PARTS):
        fits = fit_solo(_others(before, part))
        errors += [
            _off(fits[s.units].model.predict_us(s.batch, s.context_tokens), s.step_us)
            for s in _of(after, part)
            if s.units in fits
        ]
    return errors


def of_prior(prior: dict[str, Any], measured: dict[str, Any]) -> list[Result]:
    """Errors of the roofline prior, which has seen no step; below 0: it expects too little."""
    models = solo_models(prior)
    signed = [
        100 * (models[s.units].predict_us(s.batch, s.context_tokens) / s.step_us - 1)
        for s in _solo_samples(measured)
        if s.units in models
    ]
    errors = [abs(error) for error in signed]
    return [
        Result("roofline prior, median error", round(median(errors), 1), "%", "lower"),
        Result("roofline prior, median signed error", round(median(signed), 1), "%", "lower"),
        Result("roofline prior, largest error", round(max(errors), 1), "%", "lower"),
    ]


def _results(name: str, errors: Sequence[float], goal: float | None, floor: float) -> list[Result]:
    ordered = sorted(errors)
    tail = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    noise = Baseline("the same point measured twice, median", round(floor, 2))
    return [
        Result(f"{name}, median", round(median(ordered), 2), "%", "lower", goal, None, noise),
        Result(f"{name}, p95 of {len(ordered)}", round(tail, 2), "%", "lower", None, None, noise),
    ]


def _floor(before: Sequence[SoloSample], after: Sequence[SoloSample]) -> float:
    known = {(s.units, *_point(s)): s.step_us for s in before}
    points = ((s, known.get((s.units, *_point(s)))) for s in after)
    return median(_off(us, s.step_us) for s, us in points if us is not None)


def _off(predicted_us: float, measured_us: float) -> float:
    return 100 * abs(predicted_us - measured_us) / measured_us


def _point(step: SoloSample) -> tuple[int, int]:
    """Batch, and context of a request as a power of two: what was planned, without the growth."""
    return step.batch, (step.context_tokens // step.batch).bit_length()


def _part_of(sample: _Sample) -> int:
    """Return the part by batch and context: a point is in one part on every share and profile."""
    batch, context = _point(sample.step if isinstance(sample, CoRunSample) else sample)
    return (batch.bit_length() + context) % _PARTS


def _of(samples: Sequence[_Sample], part: int) -> list[_Sample]:
    return [s for s in samples if _part_of(s) == part]


def _others(samples: Sequence[_Sample], part: int) -> list[_Sample]:
    return [s for s in samples if _part_of(s) != part]


def _solo_samples(profile: dict[str, Any]) -> list[SoloSample]:
    return [
        SoloSample(row["units"], row["batch"], row["contextTokens"], row["stepUs"])
        for row in profile["samples"]
        if not row.get("finetuneUnits")
    ]


def _co_run_samples(profile: dict[str, Any]) -> list[CoRunSample]:
    return [
        CoRunSample(
            SoloSample(row["units"], row["batch"], row["contextTokens"], row["stepUs"]),
            row["finetuneUnits"],
            row.get("finetuneTokensPerSecond", 0.0),
        )
        for row in profile["samples"]
        if row.get("finetuneUnits")
    ]


def _taken(model: Path, effort: str) -> dict[str, Any]:
    """Return the profile that the engine takes, as `windrow profile` does."""
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        out = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "windrow_sidecar.engines.builtin", "--model-path"]
        command += [str(model), "--profile", effort, "--profile-only", str(out), "--port", "0"]
        if not list(model.glob("*.safetensors")):
            command += ["--random-weights", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken: dict[str, Any] = json.loads(out.read_text())
        return taken


if __name__ == "__main__":
    main()
