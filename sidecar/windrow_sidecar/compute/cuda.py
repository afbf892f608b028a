"""A GPU's partition: SMs by green contexts, and the stream that torch computes on.

Shares are made of groups of SMs (8 on Hopper). Each is a stream in a green context of its own,
made when it is first used: a CUDA graph keeps the context that it was captured in, and each stream
caches activations of its own, so few levels are kept.
"""

from __future__ import annotations

from collections.abc import Callable

from windrow.errors import UserError
from windrow_sidecar._core import DriverUnavailable, GreenPartition
from windrow_sidecar.compute.partition import Side, UnknownLevel

# Each level is a set of graphs on decode's side and a cache of activations on the worker's.
MOST_LEVELS = 6


def _use_torch_stream(stream: int) -> None:
    import torch

    torch.cuda.set_stream(torch.cuda.ExternalStream(stream))  # type: ignore[no-untyped-call]


class CudaPartition:
    """The SMs of one GPU as a device (see `Partition`).

    Args:
        side: whose share it is.
        driver: "cuda", or "cuda:N".
        use_stream: makes a CUstream the one that compute is launched on; torch's by default, as an
            `ExternalStream`.

    Raises:
        UserError: no GPU, or one whose driver has no green contexts.
    """

    def __init__(
        self,
        side: Side,
        driver: str = "cuda",
        *,
        use_stream: Callable[[int], None] = _use_torch_stream,
    ) -> None:
        try:
            self._green = GreenPartition(driver)
        except DriverUnavailable as error:
            raise UserError(
                str(error),
                field="driver",
                remedy="Share the GPU in time (sidecar.gpuAccess.mps: false) or use the host.",
                reason="NoGreenContexts",
            ) from error
        self.side: Side = side
        self._groups = _levels(self._green, side)
        self._use_stream = use_stream
        self._active: int | None = None

    @property
    def total_units(self) -> int:
        """SMs of the device."""
        return self._green.total_units

    def levels(self) -> tuple[int, ...]:
        """Few sizes, evenly spread; the worker's are whole groups, decode's their complements."""
        return tuple(self._groups)

    def activate(self, level: int) -> None:
        """Launch on decode's first or the worker's last `level` SMs.

        Raises:
            UnknownLevel: the device has no such share.
        """
        self._use(self._groups_of(level))

    def release(self) -> None:
        """Launch on every SM again."""
        self._use(self._green.groups)

    def measure(self, level: int) -> frozenset[int]:
        """SMs on which that share really runs; waits for a few small kernels.

        Raises:
            UnknownLevel: the device has no such share.
        """
        return frozenset(self._green.measure(self.side, self._groups_of(level)))

    def _use(self, groups: int) -> None:
        stream = self._green.stream(self.side, groups)
        if stream != self._active:
            self._use_stream(stream)
            self._active = stream

    def _groups_of(self, level: int) -> int:
        if level not in self._groups:
            raise UnknownLevel(self.side, level, self.levels(), "SMs")
        return self._groups[level]


def _levels(green: GreenPartition, side: Side) -> dict[int, int]:
    """Groups of each level, ascending: at most `MOST_LEVELS` beside the other side, and all.

    SMs that fill no group are decode's, save where the worker has the whole device.
    """
    most = green.groups - 1
    n = min(MOST_LEVELS, most)
    shares = sorted({round(most * (i + 1) / n) for i in range(n)})
    if side == "finetune":
        levels = {groups * green.group_units: groups for groups in shares}
    else:
        levels = {
            green.total_units - groups * green.group_units: green.groups - groups
            for groups in reversed(shares)
        }
    return levels | {green.total_units: green.groups}
