"""What no policy can pass: the share of a GPU that a roofline leaves beside decode.

Spatial: decode on the fewest groups of SMs on which its step meets the objective, all others for
the worker, which disturbs nobody. Temporal: the whole GPU for what a step leaves of the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from windrow_simulator.hardware import GpuFigures, ModelFigures, gpu_named, model_named
from windrow_simulator.run import simulate
from windrow_simulator.scenario import ALONE, SimulationSettings, build
from windrow_simulator.truth import RooflineTruth

BATCHES = (8, 16, 32, 64)
OBJECTIVES_MS = (8.0, 10.0, 15.0, 20.0, 40.0)
CONTEXT = 1024
GOAL = 0.9  # of the spatial bound


def spatial_bound(
    gpu: GpuFigures, model: ModelFigures, batch: int, objective_ms: float, context: int = CONTEXT
) -> float:
    """Return the worker's share of the SMs at best; 0: decode needs them all."""
    truth = RooflineTruth(gpu, model, model)
    group = max(8, gpu.sm_group)
    for decode in range(group, gpu.sms, group):
        if truth.step_us(batch, batch * context, decode, 0) <= objective_ms * 1e3:
            return (gpu.sms - decode) / gpu.sms
    return 0.0


def temporal_bound(
    gpu: GpuFigures, model: ModelFigures, batch: int, objective_ms: float, context: int = CONTEXT
) -> float:
    """Return the share of the time that whole-device turns leave."""
    step_us = RooflineTruth(gpu, model, model).step_us(batch, batch * context, gpu.sms, 0)
    return max(0.0, 1 - step_us / (objective_ms * 1e3))


def against_bounds(
    policies: str = "all",
    *,
    gpu: str = "H200",
    model: str = "llama-3-8b",
    batches: Sequence[int] = BATCHES,
    objectives_ms: Sequence[float] = OBJECTIVES_MS,
    seconds: float = 60.0,
    seed: int = 7,
    contention: float = 0.35,
    processes: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Simulate one GPU with a constant batch under every policy; returns a row for each point.

    A row has batch, objective, both bounds and, by policy, eta and the share of steps over.
    """
    rows = []
    figures_of, sizes = gpu_named(gpu), model_named(model)
    for batch in batches:
        ground = build(
            SimulationSettings(
                gpus=1,
                processes=processes,
                contention=contention,
                gpu=gpu,
                model=model,
                batch=batch,
                context=CONTEXT,
                policy=policies,
                objectives_ms=tuple(objectives_ms),
                seconds=seconds,
                warm_up=20.0,
                seed=seed,
            )
        )
        results = simulate(ground, progress)
        for objective_ms in objectives_ms:
            of = {f.policy: f for f in results if f.objective_ms == objective_ms}
            alone = of.pop(ALONE)
            rows.append(
                {
                    "batch": batch,
                    "objective_ms": objective_ms,
                    "spatial": spatial_bound(figures_of, sizes, batch, objective_ms),
                    "temporal": temporal_bound(figures_of, sizes, batch, objective_ms),
                    "alone_ms": alone.tpot_p50_ms,
                    "eta": {policy: f.eta for policy, f in of.items()},
                    "over": {policy: f.over for policy, f in of.items()},
                }
            )
    return rows
