"""Slots over several GPUs beside slots of one: what a group harvests of the same GPUs.

Harli's form over ranks keeps one copy of the served weights on two GPUs in place of two, and what
that frees holds more of the worker's frozen layers. Rows compare the same GPUs under the same
requests: N slots of one GPU, or one slot of N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from windrow_simulator.hardware import gpu_named, model_named
from windrow_simulator.run import simulate
from windrow_simulator.scenario import ALONE, SimulationSettings, build
from windrow_simulator.truth import RooflineTruth

GPUS = 4
_BASE = SimulationSettings(
    rates="published",
    gpus=1,
    policy="harli,windrow",
    levels=(10, 20, 30, 40, 50, 60, 70, 80, 90),
    max_batch=128,
    max_memory_percent=90,
)
# GPU, model, objective and requests a second of each GPU: Harli's own devices and objective; cards
# that NVLink connects, with models that leave them much memory and little.
SETUPS = (
    ("RTX-6000-Ada", "llama-3-8b", 40.0, 2.765),
    ("H100", "llama-3-8b", 15.0, 8.0),
    ("H100", "qwen2.5-14b", 25.0, 4.0),
    ("H100", "qwen2.5-32b", 40.0, 2.0),
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Figures of four GPUs, as slots of so many each, whose worker trains a copy of the model.

    Attributes:
        policy: of the slots.
        ranks: GPUs of a slot.
        free_gb: of a GPU's memory, that decode's weights leave.
        resident: share of the worker's frozen layers for which lent memory has room.
        exchange: share of the worker's time that it waits for other GPUs of its slot.
        step_ms: decode's median step.
        tokens_per_second: that the four GPUs finetune.
        gain: over slots of one GPU.
        over: share of steps over the objective.
    """

    gpu: str
    model: str
    objective_ms: float
    policy: str
    ranks: int
    free_gb: float
    resident: float
    exchange: float
    step_ms: float
    tokens_per_second: float
    gain: float
    over: float


def group_rows(
    *,
    seconds: float = 600.0,
    traces: str = "",
    seed: int = 7,
    processes: int = 2,
    progress: Say = lambda text: None,
) -> list[GroupRow]:
    """Simulate every setup at 1, 2 and 4 GPUs a slot.

    `traces`: folder of the published traces; "": generated ones like them.
    """
    rows = []
    for gpu, model, objective_ms, rate in SETUPS:
        alone: dict[str, float] = {}
        for ranks in (1, 2, 4):
            settings = replace(
                _BASE,
                gpu=gpu,
                model=model,
                train=model,
                objectives_ms=(objective_ms,),
                rate=rate * ranks,
                max_batch=_BASE.max_batch * ranks,
                ranks=ranks,
                seconds=seconds,
                traces=traces,
                seed=seed,
                processes=processes,
            )
            for row in _rows(settings, alone, progress):
                alone.setdefault(row.policy, row.tokens_per_second)
                rows.append(row)
    return rows


def _rows(
    settings: SimulationSettings, alone: Mapping[str, float], progress: Say
) -> list[GroupRow]:
    ground = build(settings)
    part = model_named(settings.model).cut(settings.ranks)
    lendable = ground.geometry.chunks * settings.max_memory_percent // 100
    assert isinstance(ground.truth, RooflineTruth)
    rows = []
    for figures in simulate(ground, progress=progress):
        if figures.policy == ALONE:
            continue
        rate = figures.tokens_per_second * GPUS / settings.ranks
        before = alone.get(figures.policy, 0.0)
        rows.append(
            GroupRow(
                gpu=settings.gpu,
                model=settings.model,
                objective_ms=settings.objectives_ms[0],
                policy=figures.policy,
                ranks=settings.ranks,
                free_gb=gpu_named(settings.gpu).memory_gb - part.weight_bytes / 1e9,
                resident=min(1.0, lendable / ground.memory.frozen),
                exchange=ground.truth.exchange_share,
                step_ms=figures.tpot_p50_ms,
                tokens_per_second=rate,
                gain=rate / before - 1 if before else 0.0,
                over=figures.over,
            )
        )
    return rows
