"""Shares of SMs through the same calls as shares of cores, over the stand-in and over a GPU."""

from __future__ import annotations

import pytest

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.compute.cuda import MOST_LEVELS, CudaPartition
from windrow_sidecar.compute.partition import UnknownLevel
from windrow_sidecar.compute.sharing import GpuCapabilities, choose_sharing


@pytest.fixture(params=["cuda_standin", pytest.param("gpu", marks=pytest.mark.gpu)])
def sides(request) -> tuple[CudaPartition, CudaPartition]:
    """Decode's and the worker's, as two processes would make them."""
    request.getfixturevalue(request.param)
    decode, worker = (CudaPartition(s, use_stream=lambda _: None) for s in ("decode", "finetune"))
    return decode, worker


def test_the_worker_has_few_levels_of_whole_groups_and_leaves_decode_one(sides):
    _, worker = sides
    *shared, whole = worker.levels()
    assert 1 <= len(shared) <= MOST_LEVELS
    group_units = _core.driver("cuda").partition().group_units
    assert {units % group_units for units in shared} == {0}
    assert shared[-1] < whole == worker.total_units


def test_every_level_and_its_complement_run_on_different_sms(sides):
    decode, worker = sides
    for units in worker.levels()[:-1]:
        ours, theirs = worker.measure(units), decode.measure(decode.total_units - units)
        assert len(ours) == units
        assert choose_sharing(GpuCapabilities("", "", "green", theirs, ours)).mode == "spatial"


def test_the_whole_device_is_every_sm(sides):
    for partition in sides:
        assert len(partition.measure(partition.total_units)) == partition.total_units


def test_each_share_keeps_its_one_stream(sides):
    streams: list[int] = []
    worker = CudaPartition("finetune", use_stream=streams.append)
    low, high = worker.levels()[:2]
    for units in (low, high, low):
        worker.activate(units)
    assert streams[0] == streams[2] != streams[1]


def test_sms_that_make_no_group_are_no_level(sides):
    for partition in sides:
        with pytest.raises(UnknownLevel):
            partition.activate(3)


def test_a_machine_without_a_gpu_is_told_what_to_do():
    _core.use_libcuda("libcuda-that-is-not-there.so")
    try:
        with pytest.raises(UserError, match="Share the GPU in time") as error:
            CudaPartition("decode")
    finally:
        _core.use_libcuda("libcuda.so.1")
    assert error.value.reason == "NoGreenContexts"
