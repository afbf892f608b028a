"""Partition a GPU's SMs by green contexts, and choose the stream that torch computes on.

Shares are made of groups of SMs (8 on Hopper). Each is a stream in a green context of its own,
made when it is first used: a CUDA graph keeps the context that it was captured in, and each stream
caches activations of its own, so the levels are few.
"""

from __future__ import annotations

from collections.abc import Callable

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.compute.partition import NotMoved, Side, UnknownLevel
from windrow_sidecar.qos.levels import gpu_shares

# Whose stream torch computes on, by driver: torch keeps its number only, and a partition that ends
# takes its streams along.
_in_use: dict[str, _core.Partition] = {}


def _use_torch_stream(stream: int) -> None:
    """Queue new work behind all that was queued before, on whichever stream that was."""
    import torch

    new = torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]
    new.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_stream(new)


class CudaPartition:
    """The SMs of one GPU as a device (see `Partition`).

    Args:
        side: whose share it is.
        driver: "cuda", "cuda:N", or a fake driver.
        use_stream: makes a CUstream the one that compute is launched on; torch's by default, as an
            `ExternalStream`.

    Raises:
        UserError: no GPU, or one whose driver has no green contexts.
    """

    def __init__(
        self,
        side: Side,
        driver: _core.Driver | str = "cuda",
        *,
        use_stream: Callable[[int], None] = _use_torch_stream,
    ) -> None:
        try:
            self._gpu = _core.driver(driver) if isinstance(driver, str) else driver
            self._shares = self._gpu.partition()
        except _core.DriverUnavailable as error:
            raise UserError(
                str(error),
                field="driver",
                remedy="Share the GPU in time (sharing: temporal) or use the host.",
                reason="NoGreenContexts",
            ) from error
        self.side: Side = side
        self._groups = _levels(self._shares, side)
        self._use_stream = use_stream
        self._active: int | None = None

    @property
    def total_units(self) -> int:
        """SMs of the device."""
        return self._shares.total_units

    def levels(self) -> tuple[int, ...]:
        """Few sizes, evenly spread; the worker's are whole groups, decode's their complements."""
        return tuple(self._groups)

    def activate(self, level: int) -> None:
        """Launch on decode's first or the worker's last `level` SMs.

        Raises:
            UnknownLevel: the device has no such share.
            NotMoved: it could not be made; work goes on where it went.
        """
        self._use(self._groups_of(level))

    def release(self) -> None:
        """Launch on every SM again.

        Raises:
            NotMoved: there is no stream for it.
        """
        self._use(self._shares.groups)

    def measure(self, level: int) -> frozenset[int]:
        """SMs on which that share really runs; waits for a few small kernels.

        Raises:
            UnknownLevel: the device has no such share.
        """
        return frozenset(self._shares.measure(self.side, self._groups_of(level)))

    def _use(self, groups: int) -> None:
        try:
            stream = self._shares.enter(self.side, groups)
        except _core.Error as error:
            raise NotMoved(self.side, error) from error
        if stream != self._active:
            self._use_stream(stream)
            self._active = stream
            _in_use[self._gpu.name] = self._shares

    def _groups_of(self, level: int) -> int:
        if level not in self._groups:
            raise UnknownLevel(self.side, level, self.levels(), "SMs")
        return self._groups[level]


def _levels(gpu: _core.Partition, side: Side) -> dict[int, int]:
    """Groups of each level, ascending: `gpu_shares` beside the other side, and all.

    SMs that fill no group are decode's, save where the worker has the whole device.
    """
    shares = gpu_shares(gpu.groups)
    if side == "finetune":
        levels = {groups * gpu.group_units: groups for groups in shares}
    else:
        levels = {
            gpu.total_units - groups * gpu.group_units: gpu.groups - groups
            for groups in reversed(shares)
        }
    return levels | {gpu.total_units: gpu.groups}
