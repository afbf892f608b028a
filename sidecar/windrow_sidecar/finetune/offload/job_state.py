"""Offload a job's own tensors (adapter, optimizer) to the host, and bring them back.

Between jobs that share a base model, and in pauses that are long. Only what changes with training
moves: adapter, moments, sums of gradients; the boundaries of a group that is on its way are moved
by `TaskletStream.spill`. Values stay the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# Of the host's free memory: what the boundaries of one group may take.
SPILL_SHARE = 0.5


class Home(Protocol):
    """The memory that a job's tensors live in while it trains; offloaded ones are on the host."""

    def out(self, tensor: Tensor) -> Tensor:
        """Return `tensor` [...] as it is on the host, valid after `settle`."""

    def back(self, tensor: Tensor) -> Tensor:
        """Return what `out` returned, [...], as it is at home, valid after `settle`."""

    def settle(self) -> None:
        """Wait until all copies are there."""


class HostHome:
    """The worker's own host memory: nothing of it is lent, so nothing is offloaded."""

    def out(self, tensor: Tensor) -> Tensor:
        """Return `tensor` [...] itself."""
        return tensor

    def back(self, tensor: Tensor) -> Tensor:
        """Return `tensor` [...] itself."""
        return tensor

    def settle(self) -> None:
        """Do nothing: nothing is copied."""


class DeviceHome:
    """A GPU's memory; offloaded tensors are pinned, so that copies run at the link's rate.

    torch keeps pinned memory for the next swap, which makes only the first one slow.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def out(self, tensor: Tensor) -> Tensor:
        """Begin the copy of `tensor` [...] to pinned memory, on the current stream."""
        there = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return there.copy_(tensor, non_blocking=True)

    def back(self, tensor: Tensor) -> Tensor:
        """Begin the copy of `tensor` [...] to the device, on the current stream."""
        return tensor.to(self._device, non_blocking=True)

    def settle(self) -> None:
        """Wait for what this thread has queued."""
        torch.cuda.current_stream(self._device).synchronize()


class Offloadable(Protocol):
    """Owner of tensors that can be offloaded (see `stream.TaskletStream`)."""

    @property
    def device(self) -> torch.device:
        """Device on which it trains, or is stored."""

    @property
    def away_bytes(self) -> int:
        """Bytes that `bring_back` would bring; 0: nothing is away."""

    def offload(self, home: Home, room_bytes: int) -> None:
        """Leave the device, with at most `room_bytes` for activations on the host."""

    def bring_back(self, home: Home) -> None:
        """Come back."""


class JobOffload:
    """Offload a job's state, and bring it back.

    Where the state is, the job knows: one that is joined with others is moved with them too.

    Args:
        job: what moves.
        free_bytes: of the host's memory.
        home: of the job (default: the device on which it is now).
    """

    def __init__(
        self, job: Offloadable, free_bytes: Callable[[], int], home: Home | None = None
    ) -> None:
        self._job, self._free_bytes = job, free_bytes
        self._home = home or home_of(job.device)

    def out(self) -> None:
        """Go to the host; twice is once."""
        self._job.offload(self._home, int(SPILL_SHARE * self._free_bytes()))

    def back(self) -> bool:
        """Come home. Returns whether anything was away."""
        was_out = bool(self._job.away_bytes)
        if was_out:
            self._job.bring_back(self._home)
        return was_out


def copies_on_host(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return copies in host memory, of the shapes [...] they have, without graph; None stays None.

    Those of a GPU are pinned: they are queued one behind the other at the link's rate and waited
    for once, where copies to other memory go through a small buffer and are waited for one by one.
    torch keeps pinned memory for the next copies of about that size; the first ones pin it.
    """
    homes: dict[torch.device, DeviceHome] = {}
    copies: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None or tensor.device.type == "cpu":
            copies.append(None if tensor is None else tensor.detach().clone())
        else:
            home = homes.setdefault(tensor.device, DeviceHome(tensor.device))
            copies.append(home.out(tensor.detach()))
    for home in homes.values():
        home.settle()
    return copies


def home_of(device: torch.device) -> Home:
    """Return the home of tensors on a device."""
    return HostHome() if device.type == "cpu" else DeviceHome(device)
