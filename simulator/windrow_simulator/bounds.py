"""Bound on every policy: the share of a GPU that a roofline leaves beside decode.

Spatial: decode on the fewest groups of SMs on which its step meets the objective, all others for
the worker, which disturbs nobody. Temporal: the whole GPU for what a step leaves of the objective.
What a policy stays below the spatial bound comes of three things, each with its factor: contention
for memory, which the bound does not know; the shares that the engine offers; the policy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from windrow_sidecar.qos.levels import Partitioning, PartitionLevel
from windrow_simulator.hardware import GpuFigures, ModelFigures, gpu_named, model_named
from windrow_simulator.run import simulate
from windrow_simulator.scenario import ALONE, SimulationSettings, build
from windrow_simulator.truth import RooflineTruth

BATCHES = (8, 16, 32, 64)
OBJECTIVES_MS = (8.0, 10.0, 15.0, 20.0, 40.0)
CONTEXT = 1024


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


@dataclass(frozen=True, slots=True)
class Share:
    """A split of a GPU, and what each side gets under it without noise."""

    split: PartitionLevel
    eta: float
    step_ms: float


def contended_shares(truth: RooflineTruth, levels: Partitioning, batch: int) -> list[Share]:
    """Return what splits give beside `batch` requests, contention counted; the largest share first.

    Without decode alone.
    """
    return [
        Share(
            split,
            truth.finetune_rate(split.finetune_units, beside_decode=True) / truth.dedicated_rate,
            truth.step_us(batch, batch * CONTEXT, split.decode_units, split.finetune_units) / 1e3,
        )
        for split in reversed(levels.splits[1:])
    ]


def limits(
    truth: RooflineTruth, levels: Partitioning, batch: int, objective_ms: float
) -> dict[str, Any]:
    """Return what contention leaves of the spatial bound, and what the engine's shares leave of it.

    `contended`: eta on the best split in whole groups of 8 SMs; `offered`: on the best of `levels`,
    whose step takes `step_ms`, and on the next larger one `next_ms`.
    """
    units = levels.units
    groups = (PartitionLevel(units - n, n) for n in range(units // 8 * 8, 0, -8) if n < units)
    whole = Partitioning(units, (levels.splits[0], *groups))

    def best(of: Partitioning) -> tuple[Share | None, Share | None]:
        before = None
        for share in contended_shares(truth, of, batch):
            if share.step_ms <= objective_ms:
                return share, before
            before = share
        return None, before

    (ideal, _), (offered, larger) = best(whole), best(levels)
    return {
        "contended": ideal.eta if ideal else 0.0,
        "offered": offered.eta if offered else 0.0,
        "step_ms": offered.step_ms if offered else None,
        "next_ms": larger.step_ms if larger else None,
    }


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

    A row has batch, objective, both bounds, what `limits` says and, by policy, eta and the share of
    steps over.
    """
    rows = []
    figures_of, sizes = gpu_named(gpu), model_named(model)
    for batch in batches:
        ground = build(
            SimulationSettings(
                rates="published",
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
        truth = ground.truth
        assert isinstance(truth, RooflineTruth)  # of a named GPU
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
                    **limits(truth, ground.levels, batch, objective_ms),
                    "eta": {policy: f.eta for policy, f in of.items()},
                    "over": {policy: f.over for policy, f in of.items()},
                }
            )
    return rows
