"""Rates of a worker beside decode on one H200, and the assumptions that agree with them.

Fitted to `benchmarks/results/h200/first_light*.json`: Llama 3 8B, decode on every SM, the worker
under MPS. The law was measured there alone and is assumed of other GPUs and models.

- The GPU, kept busy, would train at `_BUSY` of a matrix product's rate. No run kept it busy: the
  host queues the worker's layers, at `DEDICATED` tokens a second for a plain process on a device of
  its own and at `LENT` for the worker that can be stopped, on lent memory.
- Decode's step beside a worker is longer by the time for which the worker's kernels run.
- Beside decode the worker's kernels get `_BESIDE` of the GPU at most.
- A tasklet of fewer tokens than a row costs the host as much as one of a row.
"""

from __future__ import annotations

import math
from typing import Literal

from windrow.errors import UserError
from windrow_simulator.hardware import gpu_named, model_named
from windrow_simulator.truth import Assumptions, RooflineTruth
from windrow_simulator.worker_rate import other_bound

RatesOf = Literal["measured", "published"]

MEASURED_GPU, MEASURED_MODEL = "H200", "llama-3-8b"
DEDICATED, LENT = 6458.4, 2209.4  # tokens a second, `first_light.json`
_BUSY = 0.35
_BESIDE = 0.75
_OVERHEAD_US = 1200.0
_NOISE, _NOISE_BESIDE = 0.065, 0.08
_ROW_TOKENS = 1024


def measured(worker_rate: tuple[float, ...] = ()) -> Assumptions:
    """Return the assumptions that agree with what was measured.

    Args:
        worker_rate: tokens a second of a worker that was measured on that kind of GPU with that
            model, dedicated and on lent memory; of the first alone the second follows in
            proportion; (): that H200's.
    """
    dedicated = worker_rate[0] if worker_rate else DEDICATED
    lent = worker_rate[1] if len(worker_rate) > 1 else dedicated * LENT / DEDICATED
    gpu, model = gpu_named(MEASURED_GPU), model_named(MEASURED_MODEL)
    busy = RooflineTruth(gpu, model, model, Assumptions(finetune=_BUSY)).dedicated_rate * 1e6
    return Assumptions(
        finetune=_BUSY,
        overhead_us=_OVERHEAD_US,
        queued_tokens_s=other_bound(lent, busy),
        plain_tokens_s=other_bound(dedicated, busy),
        beside=_BESIDE,
        row_tokens=_ROW_TOKENS,
        noise=_NOISE,
        noise_beside=_NOISE_BESIDE,
    )


def check_worker_rate(worker_rate: tuple[float, ...]) -> None:
    """Raise UserError where these are not one or two rates, the second no more than the first."""
    sound = len(worker_rate) <= 2 and all(0 < rate < math.inf for rate in worker_rate)
    if not sound or list(worker_rate) != sorted(worker_rate, reverse=True):
        raise UserError(
            f"{':'.join(f'{rate:g}' for rate in worker_rate)} is not a dedicated rate, "
            "or one and a rate beside an idle decode that is at most as high",
            field="--worker-rate",
            remedy="Write tokens a second, for example 6458:2209 or 6458.",
        )
