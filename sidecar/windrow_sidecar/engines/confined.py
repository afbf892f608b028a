"""Confine decode to shares of a GPU's SMs: one set of its CUDA graphs for each share.

A graph keeps the green context that it was captured in, wherever it is replayed. So an engine
captures its decode graphs once for every share, and a share is chosen by which of them is replayed:
no stream is moved. What is no graph, such as a prompt, runs on every SM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from windrow_sidecar import _core
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.partition import Side, UnknownLevel
from windrow_sidecar.compute.sharing import (
    GpuCapabilities,
    choose_sharing,
)
from windrow_sidecar.engines.device import EngineDevice
from windrow_sidecar.qos.levels import Partitioning, PartitionLevel, whole_levels


class GraphShares:
    """Decode's shares of a GPU as sets of CUDA graphs (see `compute.partition.Partition`).

    Args:
        driver: "cuda:N", or a fake driver.
        as_stream: makes torch's stream of a CUstream.

    Attributes:
        units: SMs of the share whose graphs are replayed.

    Raises:
        UserError: no GPU, or one whose driver has no green contexts.
    """

    side: Side = "decode"

    def __init__(
        self, driver: _core.Driver | str, *, as_stream: Callable[[int], Any] | None = None
    ) -> None:
        self._stream: Any = None
        self._as_stream = as_stream or _torch_stream
        # Its streams serve to capture only: work goes on where it went.
        self._partition = CudaPartition("decode", driver, use_stream=self._keep)
        self.units = self._partition.total_units

    @property
    def total_units(self) -> int:
        """SMs of the device."""
        return self._partition.total_units

    def levels(self) -> tuple[int, ...]:
        """SMs of each share, ascending; the last is every SM."""
        return self._partition.levels()

    def activate(self, level: int) -> None:
        """Replay the graphs of that share from now on. Raises UnknownLevel."""
        if level not in self.levels():
            raise UnknownLevel(self.side, level, self.levels(), "SMs")
        self.units = level

    def release(self) -> None:
        """Replay the graphs of the whole device."""
        self.units = self.total_units

    def measure(self, level: int) -> frozenset[int]:
        """Return the SMs on which that share really runs (see `CudaPartition.measure`)."""
        return self._partition.measure(level)

    @contextmanager
    def capturing(self, level: int) -> Iterator[Any]:
        """Capture for that share: yields its stream (torch's, in the share's green context).

        Raises:
            NotMoved: the driver makes no such share.
        """
        before = self.units
        self._partition.activate(level)
        self.activate(level)
        try:
            yield self._stream
        finally:
            self.units = before

    def _keep(self, stream: int) -> None:
        self._stream = self._as_stream(stream)


def _torch_stream(stream: int) -> Any:  # noqa: ANN401
    import torch

    return torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]


def confine(gpu: EngineDevice, shares: GraphShares) -> EngineDevice:
    """Return a GPU that is shared in space with decode on `shares`; one in time as it is.

    The worker has what decode's share leaves, where the two were measured on different SMs; where
    they meet, it runs only while decode does not.
    """
    if gpu.sharing is None or gpu.sharing.mode != "spatial":
        return gpu
    sharing = choose_sharing(_measured(gpu.driver, shares))
    if sharing.mode == "spatial":
        return replace(gpu, partition=shares, splits=disjoint_levels(shares), sharing=sharing)
    return replace(gpu, splits=whole_levels(gpu.units), finetune_levels=(), sharing=sharing)


def _measured(driver: str, shares: GraphShares) -> GpuCapabilities:
    """See on which SMs decode's smallest share and the worker's largest run; waits for both."""
    level = shares.levels()[0]
    worker = CudaPartition("finetune", driver, use_stream=lambda _: None)
    return GpuCapabilities(
        green_missing="",
        mps_missing="",
        decode_partition="green",
        decode_sms=shares.measure(level),
        finetune_sms=worker.measure(shares.total_units - level),
    )


def disjoint_levels(decode: GraphShares) -> Partitioning:
    """Return the splits in which the worker has what decode's share leaves."""
    units = decode.total_units
    shares = [units - level for level in reversed(decode.levels())]
    return Partitioning(units, tuple(PartitionLevel(share, units - share) for share in shares))
