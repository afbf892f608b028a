"""Shares of SMs through the same calls as shares of cores, over the stand-in and over a GPU."""

from __future__ import annotations

import pytest

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.compute.cuda import MOST_LEVELS, CudaPartition
from windrow_sidecar.compute.mode import Ground, choose_sharing
from windrow_sidecar.compute.partition import Partition


@pytest.fixture
def streams() -> list[int]:
    """The streams that compute was told to use, in order."""
    return []


@pytest.fixture(params=["cuda_standin", pytest.param("gpu", marks=pytest.mark.gpu)])
def partition(request, streams) -> CudaPartition:
    request.getfixturevalue(request.param)
    return CudaPartition(use_stream=streams.append)


def test_levels_are_few_whole_groups_and_leave_decode_one(partition: Partition):
    levels = partition.finetune_levels(decode_busy=True)
    assert 1 <= len(levels) <= MOST_LEVELS
    assert list(levels) == sorted(set(levels))
    assert levels[-1] < partition.total_units
    assert partition.finetune_levels(decode_busy=False) == (partition.total_units,)


def test_every_level_and_its_complement_run_on_different_sms(partition):
    other_process = CudaPartition(use_stream=lambda _: None)
    for units in partition.finetune_levels(decode_busy=True):
        worker = partition.measure_finetune(units)
        decode = other_process.measure_decode(partition.total_units - units)
        assert len(worker) == units
        assert choose_sharing(Ground("", "", "green", decode, worker)).mode == "spatial"


def test_the_whole_device_is_every_sm(partition):
    assert len(partition.measure_decode(0)) == partition.total_units


def test_each_share_has_one_stream_and_an_unchanged_share_makes_no_call(partition, streams):
    low, high = partition.finetune_levels(decode_busy=True)[:2]
    for units in (low, low, high, low):
        partition.activate_finetune(units)
    assert len(streams) == 3
    assert streams[0] == streams[2] != streams[1]


def test_decode_takes_the_complement_and_gets_everything_back(partition, streams):
    level = partition.finetune_levels(decode_busy=True)[0]
    partition.activate_decode(partition.total_units - level)
    partition.release()
    partition.activate_decode(0)
    assert len(set(streams)) == len(streams) == 2


@pytest.mark.parametrize("units", [-8, 3, 0, 4096])
def test_a_share_that_the_device_does_not_have_is_refused(partition, streams, units):
    with pytest.raises(ValueError, match="cannot take"):
        partition.activate_finetune(units)
    assert streams == []


@pytest.mark.parametrize("units", [-8, 3, 4096])
def test_decode_is_not_left_without_a_group(partition, units):
    with pytest.raises(ValueError, match="cannot take"):
        partition.activate_decode(units)


def test_a_machine_without_a_gpu_is_told_what_to_do():
    _core.use_libcuda("libcuda-that-is-not-there.so")
    try:
        with pytest.raises(UserError, match="Share the GPU in time") as error:
            CudaPartition()
    finally:
        _core.use_libcuda("libcuda.so.1")
    assert error.value.reason == "NoGreenContexts"
