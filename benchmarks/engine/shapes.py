"""A rank-16 adapter of an 8B model at real size: its parameters and moments, without the base."""

from __future__ import annotations

import torch
from torch import nn

from windrow_sidecar.finetune.training.optimizer import AdapterOptimizer, Schedule

RANK, LAYERS, HIDDEN, KV, MLP = 16, 32, 4096, 1024, 14336
# (in, out) of the linears of a Llama 3 8B layer.
SHAPES = [
    (HIDDEN, HIDDEN),
    (HIDDEN, KV),
    (HIDDEN, KV),
    (HIDDEN, HIDDEN),
    (HIDDEN, MLP),
    (HIDDEN, MLP),
    (MLP, HIDDEN),
]


def adapter_parameters(device: torch.device) -> dict[str, nn.Parameter]:
    """Matrices A and B of all linears: 42 million numbers in fp32."""
    return {
        f"{layer}.{n}.{name}": nn.Parameter(torch.zeros(shape, device=device))
        for layer in range(LAYERS)
        for n, (wide_in, wide_out) in enumerate(SHAPES)
        for name, shape in (("A", (RANK, wide_in)), ("B", (wide_out, RANK)))
    }


def stepped_optimizer(parameters: dict[str, nn.Parameter]) -> AdapterOptimizer:
    """AdamW that has made a step, so that its moments are there."""
    made = AdapterOptimizer(parameters, Schedule("constant", 1e-4, 10, 0.0))
    made.commit()
    made.step(0)
    return made
