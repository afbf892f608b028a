"""Measure what each share of a device reads and computes: the rates of the roofline prior.

Takes a fraction of a second for each share, where a profile takes ten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import torch

from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.qos.roofline import Rates, StepSize

_SIDE = 512  # of the matrices that stand for weights
_ROWS = 64  # a product of so many rows computes longer than it reads
_MOST_BYTES = 1 << 28
_REPEATS = 9


def step_size(config: LlamaConfig, dtype: torch.dtype) -> StepSize:
    """Return the size of a decode step of that model."""
    width = config.heads * config.head_dim
    layer = 2 * config.hidden * (width + config.kv_width) + 3 * config.hidden * config.intermediate
    parameters = config.layers * layer + config.hidden * config.vocab
    return StepSize(
        weight_bytes=parameters * dtype.itemsize,
        parameters=parameters,
        kv_token_bytes=2 * config.layers * config.kv_width * dtype.itemsize,
    )


@torch.inference_mode()
def measure_rates(
    partition: Partition, shares: Iterable[int], size: StepSize, device: str, dtype: torch.dtype
) -> dict[int, Rates]:
    """Return the rates of each number of units; leaves the partition on the last."""
    one = _SIDE * _SIDE * dtype.itemsize
    count = max(1, min(size.weight_bytes, _MOST_BYTES) // one)
    weights = [torch.randn(_SIDE, _SIDE, device=device).to(dtype) for _ in range(count)]
    row, rows = (torch.randn(n, _SIDE, device=device).to(dtype) for n in (1, _ROWS))

    def through(x: torch.Tensor) -> Callable[[], object]:
        return lambda: [torch.mm(x, weight) for weight in weights]

    rates = {}
    for units in shares:
        partition.activate(units)
        rates[units] = Rates(
            bytes_per_us=count * one / _median_us(through(row), device),
            flops_per_us=2 * _ROWS * count * _SIDE * _SIDE / _median_us(through(rows), device),
        )
    return rates


def _median_us(call: Callable[[], object], device: str) -> float:
    took = []
    for _ in range(_REPEATS):
        _settle(device)
        begin_ns = time.perf_counter_ns()
        call()
        _settle(device)
        took.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return median(took)


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
