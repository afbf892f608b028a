"""Profile how long a decode step takes with rows of others in its products: FlexLLM's f(c, s).

Attention is left out: decode's own is in the step's prediction, whatever joins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from windrow_sidecar.engines.builtin.llama.model import LlamaModel
from windrow_sidecar.engines.builtin.llama.riding import Product, RidingPass
from windrow_sidecar.qos.hybrid_tokens import JoinedCost, JoinedSample

BATCHES, TOKENS = (1, 8, 32), (0, 16, 64, 256)
_RUNS = 5


@torch.inference_mode()
def profile_joined(
    model: LlamaModel, *, max_batch: int, clock_ns: Callable[[], int] = time.monotonic_ns
) -> JoinedCost:
    """Run passes over made-up rows; no request may be there, since they write to the cache.

    Args:
        model: on the threads that decode computes with.
        max_batch: requests that decode runs at once.
        clock_ns: nanoseconds.
    """
    samples = []
    for batch in sorted({min(batch, max_batch) for batch in BATCHES}):
        rows = torch.zeros(batch, dtype=torch.int64, device=model.device)
        for tokens in TOKENS:
            taken = [_timed(model, rows, tokens, clock_ns) for _ in range(1 + _RUNS)]
            samples.append(JoinedSample(batch, tokens, median(taken[1:])))
    return JoinedCost(samples)


def _timed(
    model: LlamaModel, rows: torch.Tensor, tokens: int, clock_ns: Callable[[], int]
) -> float:
    """Return the microseconds of a pass over `rows` [n], int64, that `tokens` rows join."""
    first = model.layers[0]
    weights = (first.qkv, first.out, first.gate_up, first.down)
    others = [weight.new_ones(tokens, weight.shape[1]) for weight in weights]
    began_ns = clock_ns()
    riding = RidingPass(model, rows, rows, rows, lambda _, q: q.flatten(1), model.ops)
    if tokens:
        for layer in range(len(model.layers)):
            for product in Product:
                riding.join(layer, product, others[product])
    riding.finish()
    return (clock_ns() - began_ns) / 1e3
