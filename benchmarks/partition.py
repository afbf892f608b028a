"""Cost of moving to another share of a device; on a GPU also what decode feels of each share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.harness import Baseline, Result, middle
from windrow.errors import UserError
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.compute.partition import Partition

MOVES = 200
# A decode step reads its weights once; a worker's layer multiplies matrices of this side. Enough of
# them are queued that they outlast the step on any share.
WEIGHT_BYTES = 1 << 30
SIDE = 4096
QUEUED = 16


def measure_partition(driver: str, repeats: int) -> list[Result]:
    """Rows of this device; none, with the reason printed, where it cannot be shared.

    Args:
        driver: "host" or "cuda".
        repeats: of each figure.
    """
    try:
        with _partition(driver) as worker:
            moved = _switching(worker, repeats)
            return [*moved, *_disturbance(worker, repeats)] if driver == "cuda" else moved
    except UserError as error:
        print(f"shares are not measured: {error}")
        return []


@contextmanager
def _partition(driver: str) -> Iterator[Partition]:
    """The worker's; given back afterwards."""
    if driver == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("torch sees no GPU", remedy="Install a torch that is built for CUDA.")
        worker: Partition = CudaPartition("finetune", driver)
    else:
        worker = HostPartition.from_affinity("finetune")
    try:
        yield worker
    finally:
        worker.release()


def _switching(worker: Partition, repeats: int) -> list[Result]:
    low, *_, high = worker.levels()
    for level in (low, high):
        worker.activate(level)  # a share is made when it is first used
    costs_us = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        for _ in range(MOVES):
            worker.activate(low)
            worker.activate(high)
        costs_us.append((time.perf_counter_ns() - began) / (2 * MOVES) / 1e3)
    value, spread = middle(costs_us)
    return [Result("move to another level", value, "us", "lower", None, spread)]


def _disturbance(worker: Partition, repeats: int) -> list[Result]:
    """Decode on every SM (`decode_partition: none`), the worker on each of its levels in turn.

    Within each repeat all levels are tried, so that a slow moment hits them alike. Both sides run
    in this process: what MPS adds is not in it.
    """
    import torch

    weights = torch.ones(WEIGHT_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    matrix = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(matrix)
    decode = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    steps_us: dict[int, list[float]] = {level: [] for level in (0, *worker.levels())}

    def step_us() -> float:
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(decode):
            began.record()
            weights.sum()
            ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) * 1e3

    for repeat in range(-1, repeats):  # the first one warms up
        for level, seen in steps_us.items():
            torch.cuda.synchronize()
            if level:
                worker.activate(level)
                for _ in range(QUEUED):
                    torch.mm(matrix, matrix, out=product)
            taken = step_us()
            if repeat >= 0:
                seen.append(taken)
    torch.cuda.synchronize()
    alone = Baseline("alone", middle(steps_us.pop(0))[0])
    return [
        Result(
            f"decode reads 1 GiB beside the worker on {level} of {worker.total_units} SMs",
            middle(seen)[0],
            "us",
            "lower",
            None,
            middle(seen)[1],
            alone,
        )
        for level, seen in steps_us.items()
    ]
