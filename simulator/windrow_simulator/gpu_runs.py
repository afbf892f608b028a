"""Compare the simulator with a GPU's run of first light, given that run's own worker rate alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windrow.errors import UserError
from windrow_sidecar.qos.levels import Partitioning
from windrow_sidecar.qos.predictor import Predictor
from windrow_sidecar.qos.solo import solo_models
from windrow_simulator.calibration import MEASURED_MODEL
from windrow_simulator.hardware import GPUS
from windrow_simulator.run import simulate
from windrow_simulator.scenario import ALONE, NAIVE, ScenarioParts, SimulationSettings, build
from windrow_simulator.truth import Truth

WINDROW = "windrow"
_WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class GpuArm:
    """One arm of a run: what was measured, and what the simulator says."""

    policy: str
    objective_ms: float
    eta: float
    simulated_eta: float
    tpot_p50_ms: float
    simulated_tpot_p50_ms: float
    over: float
    simulated_over: float


def compare(path: Path, *, seed: int = 7) -> list[GpuArm]:
    """Simulate the arms `naive` and `windrow` of a run, at each of its objectives.

    `gaps` is an arm of the benchmark, and no policy of the product.

    Raises:
        UserError: the file is not a first-light result of a known GPU.
    """
    run = _read(path)
    values = {row["name"]: row["value"] for row in run["results"]}
    effort, gpu = run["environment"]["effort"], _gpu(run, path)
    parts = build(
        SimulationSettings(
            gpu=gpu,
            gpus=1,
            batch=effort["load_batch"],
            context=effort["context"],
            partition="none",
            levels=_levels(values, GPUS[gpu].sms),
            policy=f"{NAIVE},{WINDROW}",
            objectives_ms=tuple(float(ms) for ms in effort["objectives_ms"]),
            worker_rate=(
                values["dedicated worker"],
                values["worker on lent memory, decode idle"],
            ),
            max_batch=max(effort["load_batch"], *effort["batches"]),
            warm_up=_WARM_UP_S,
            seconds=effort["seconds"],
            seed=seed,
            processes=1,
        )
    )
    parts = replace(parts, profile=with_co_run(parts, effort["batches"], effort["context"]))
    arms = []
    for f in simulate(parts):
        if f.policy == ALONE:
            continue
        at = f"{f.policy} at {f.objective_ms:g} ms"
        arms.append(
            GpuArm(
                policy=f.policy,
                objective_ms=f.objective_ms,
                eta=values[f"{at}: eta"],
                simulated_eta=f.eta,
                tpot_p50_ms=values[f"{at}: TPOT p50"],
                simulated_tpot_p50_ms=f.tpot_p50_ms,
                over=values[f"{at}: steps over"] / 100,
                simulated_over=f.over,
            )
        )
    return arms


def with_co_run(parts: ScenarioParts, batches: list[int], context: int) -> dict[str, Any]:
    """Return the profile with its co-run part, learned of each share as first light learns it."""
    profile, levels, truth = dict(parts.profile), parts.levels, parts.truth
    predictor = Predictor(levels, solo_models(profile))
    samples = 0
    for split in range(1, len(levels.splits)):
        for batch in batches:
            predictor.observe(
                split,
                batch=batch,
                context_tokens=batch * context,
                latency_us=_beside_us(truth, levels, split, batch, context),
            )
            samples += 1
    model = predictor.co_run
    return profile | {"coRun": {"b1": model.b1, "k1": model.k1, "samples": samples}}


def _beside_us(truth: Truth, levels: Partitioning, split: int, batch: int, context: int) -> float:
    at = levels.splits[split]
    return truth.step_us(batch, batch * context, at.decode_units, at.finetune_units)


def _read(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot be read: {error}", field=str(path), remedy="Give a result of first light."
        ) from error
    if not isinstance(run, dict) or run.get("benchmark") != "first_light":
        raise UserError(
            "is not a result of first light", field=str(path), remedy="Run make gpu on a GPU."
        )
    shape = run["environment"].get("shape")
    if shape != MEASURED_MODEL:
        raise UserError(
            f"was measured with the shape {shape}",
            field=str(path),
            remedy=f"Give a run with --shape {MEASURED_MODEL}.",
        )
    return run


def _gpu(run: Mapping[str, Any], path: Path) -> str:
    name = str(run["environment"].get("gpu", ""))
    found = next((gpu for gpu in GPUS if gpu.lower() in name.lower()), "")
    if not found:
        raise UserError(
            f"was measured on {name or 'no GPU'}, whose figures are not known",
            field=str(path),
            remedy=f"Give a run on one of: {', '.join(GPUS)}.",
        )
    return found


def _levels(values: Mapping[str, float], sms: int) -> tuple[int, ...]:
    """Return the worker's shares in percents that give these SMs again, rounded up."""
    units = {
        int(name.split(" units")[0].rsplit(" ", 1)[1])
        for name in values
        if name.startswith("step beside the worker on")
    }
    return tuple(-(-100 * n // sms) for n in sorted(units))
