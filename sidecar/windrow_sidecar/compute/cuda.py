"""A GPU's partition: SMs by green contexts, and the stream that torch computes on.

Shares are made of groups of SMs (8 on Hopper). Each is a stream in a green context of its own,
made when it is first used: a CUDA graph keeps the context that it was captured in, and each stream
caches activations of its own, so few levels are kept.
"""

from __future__ import annotations

from collections.abc import Callable

from windrow.errors import UserError
from windrow_sidecar._core import DriverUnavailable, GreenPartition

# Each level is a set of graphs on decode's side and a cache of activations on the worker's.
MOST_LEVELS = 6


def _use_torch_stream(stream: int) -> None:
    import torch

    torch.cuda.set_stream(torch.cuda.ExternalStream(stream))  # type: ignore[no-untyped-call]


class CudaPartition:
    """The SMs of one GPU as a device (see `Partition`).

    Args:
        driver: "cuda", or "cuda:N".
        use_stream: makes a CUstream the one that compute is launched on; torch's by default, as an
            `ExternalStream`.

    Raises:
        UserError: no GPU, or one whose driver has no green contexts.
    """

    def __init__(
        self, driver: str = "cuda", *, use_stream: Callable[[int], None] = _use_torch_stream
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
        self._use_stream = use_stream
        self._active: int | None = None

    @property
    def total_units(self) -> int:
        """SMs of the device."""
        return self._green.total_units

    def finetune_levels(self, *, decode_busy: bool) -> tuple[int, ...]:
        """At most `MOST_LEVELS` sizes, evenly spread, that leave decode a group; all when idle."""
        if not decode_busy:
            return (self.total_units,)
        most = self._green.groups - 1
        n = min(MOST_LEVELS, most)
        groups = sorted({round(most * (i + 1) / n) for i in range(n)})
        return tuple(g * self._green.group_units for g in groups)

    def activate_decode(self, units: int) -> None:
        """Launch on the first SMs: as many groups as the rest of the device leaves; 0: all.

        Raises:
            ValueError: more units than there are, or so few that they make no group.
        """
        self._activate("decode", self._decode_groups(units or self.total_units))

    def activate_finetune(self, units: int) -> None:
        """Launch on the last `units` SMs: whole groups, or the whole device.

        Raises:
            ValueError: the device has no such share.
        """
        self._activate("finetune", self._finetune_groups(units))

    def release(self) -> None:
        """Launch on every SM again."""
        self._activate("decode", self._green.groups)

    def measure_decode(self, units: int) -> frozenset[int]:
        """SMs on which decode's share really runs; waits for a few small kernels."""
        groups = self._decode_groups(units or self.total_units)
        return frozenset(self._green.measure("decode", groups))

    def measure_finetune(self, units: int) -> frozenset[int]:
        """SMs on which the worker's share really runs."""
        return frozenset(self._green.measure("finetune", self._finetune_groups(units)))

    def _activate(self, side: str, groups: int) -> None:
        stream = self._green.stream(side, groups)
        if stream != self._active:
            self._use_stream(stream)
            self._active = stream

    def _decode_groups(self, units: int) -> int:
        left = self.total_units - units
        groups = self._green.groups - -(-left // self._green.group_units)
        if units > self.total_units or groups < 1:
            raise ValueError(f"decode cannot take {units} of {self.total_units} SMs")
        return groups

    def _finetune_groups(self, units: int) -> int:
        if units == self.total_units:
            return self._green.groups
        groups, rest = divmod(units, self._green.group_units)
        if rest or not 1 <= groups < self._green.groups:
            raise ValueError(f"the worker cannot take {units} of {self.total_units} SMs")
        return groups
