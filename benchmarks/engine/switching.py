"""Time that a worker takes from one job to another that shares its base model."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.engine.shapes import RANK, adapter_parameters, stepped_optimizer
from benchmarks.harness import Result, middle
from windrow_sidecar.finetune.memory.training_memory import OwnMemory
from windrow_sidecar.finetune.model.loading import BaseModel
from windrow_sidecar.finetune.model.shallow_clone import shallow_clone
from windrow_sidecar.finetune.offload.job_state import DeviceHome, Home, HostHome, JobOffload
from windrow_sidecar.testing.tinyjob import tiny_job, tiny_llama

GOAL_MS = 100.0


class _Away:
    """Host memory that plays the device: what leaves is copied, into memory that exists already.

    torch keeps pinned memory for the next swap of a GPU; here the buffers are kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def out(self, tensor: Tensor) -> Tensor:
        """Copy it into its buffer; what it lay in is kept for the way back."""
        there = self._kept.pop(tensor.data_ptr(), None)
        there = torch.empty_like(tensor) if there is None else there
        there.copy_(tensor)
        self._kept[there.data_ptr()] = tensor
        return there

    def back(self, tensor: Tensor) -> Tensor:
        """Copy it to where it lay before."""
        here = self._kept.pop(tensor.data_ptr()).copy_(tensor)
        self._kept[here.data_ptr()] = tensor
        return here

    def settle(self) -> None:
        """Copies are done when they return."""


class _Copying(HostHome):
    """The same for state that comes and goes, with new memory each time."""

    def out(self, tensor: Tensor) -> Tensor:
        """Copy it."""
        return tensor.clone()

    back = out


class _Adapter:
    """A rank-16 adapter of an 8B shape after a step, and what its optimizer remembers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.away_bytes = device, 0
        self._optimizer = stepped_optimizer(adapter_parameters(device))

    def offload(self, home: Home, room_bytes: int) -> None:
        """Offload as `TaskletStream.offload` does, between two groups."""
        del room_bytes
        self._optimizer.move(home.out)
        home.settle()
        self.away_bytes = 1

    def bring_back(self, home: Home) -> None:
        """Bring back as `TaskletStream.bring_back` does."""
        self._optimizer.move(home.back)
        home.settle()
        self.away_bytes = 0


def switching(*, rounds: int, device: torch.device) -> list[Result]:
    """Switch between two adapters of an 8B shape, and between two whole jobs of a tiny model."""
    what = f"switch of jobs, rank {RANK} of an 8B shape"
    results = []
    if device.type != "cpu":
        home = DeviceHome(device)
        results.append(_adapters(f"{what}, GPU to pinned and back", home, rounds, device))
    else:
        results.append(_adapters(f"{what}, host", HostHome(), rounds, device))
        results.append(_adapters(f"{what}, copied as if from a device", _Away(), rounds, device))
    results.append(_jobs(rounds))
    return results


def _adapters(name: str, home: Home, rounds: int, device: torch.device) -> Result:
    swaps = [JobOffload(_Adapter(device), lambda: 1 << 40, home) for _ in range(2)]
    swaps[1].out()
    times_ms = [_switch_ms(swaps[n % 2].out, swaps[(n + 1) % 2].back) for n in range(rounds + 2)]
    value, spread = middle(times_ms[2:])  # the first ones make the buffers
    # Copies from host memory to host memory say nothing of a device's link: no goal for them.
    goal = None if isinstance(home, _Away) else GOAL_MS
    return Result(name, value, "ms", "lower", goal=goal, spread=spread)


def _switch_ms(leaves: Callable[[], object], comes: Callable[[], object]) -> float:
    began = time.perf_counter()
    leaves()
    comes()
    return (time.perf_counter() - began) * 1e3


def _jobs(rounds: int) -> Result:
    """Switch in the middle of a step: what is on its way is spilled, and goes on from there."""
    base = BaseModel(tiny_llama(), None, None, shared=False)
    jobs = [tiny_job(base=shallow_clone(base).model, steps=10**6) for _ in range(2)]
    memories = [OwnMemory(job.stream, _Copying()) for job in jobs]
    memories[1].offload()
    times_ms = []
    for n in range(4 * rounds):
        now, other = n % 2, (n + 1) % 2
        for _ in range(3):
            tasklet = jobs[now].stream.peek()
            assert tasklet is not None  # a million steps
            jobs[now].stream.run(tasklet)
        times_ms.append(_switch_ms(memories[now].offload, memories[other].restore))
    value, spread = middle(times_ms)
    name = "switch of jobs in the middle of a step, tiny model"
    return Result(name, value, "ms", "lower", goal=GOAL_MS, spread=spread)
