"""One suite for every partition: levels, activation, and what is refused, for either side."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from windrow.errors import InvariantBroken
from windrow_sidecar.compute.cgroup import CgroupLimits
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.compute.partition import Partition, Side, UnknownLevel
from windrow_sidecar.engines.builtin.partition import WholeDevice

UNLIMITED = CgroupLimits(cpus=None, memory_bytes=None)


@pytest.fixture
def moves() -> list[int]:
    """What compute was told at each move: how many threads, or which stream."""
    return []


@pytest.fixture
def make(request, driver, moves) -> Callable[[Side], Partition]:
    """Makes partitions of one device, on each driver."""
    if driver == "cuda":
        return lambda side: CudaPartition(side, use_stream=moves.append)
    request.getfixturevalue("cores")
    return lambda side: HostPartition.from_affinity(
        side, set_threads=moves.append, limits=UNLIMITED
    )


@pytest.fixture(params=["decode", "finetune"])
def partition(request, make) -> Partition:
    return make(request.param)


def test_levels_grow_to_the_whole_device(partition):
    levels = partition.levels()
    assert len(levels) > 1
    assert list(levels) == sorted(set(levels))
    assert levels[0] > 0
    assert levels[-1] == partition.total_units


def test_below_the_whole_device_every_level_has_its_complement_on_the_other_side(make):
    decode, finetune = make("decode"), make("finetune")
    beside = {decode.total_units - level for level in finetune.levels()[:-1]}
    assert beside <= set(decode.levels())


def test_each_level_is_activated_and_an_unchanged_one_makes_no_call(partition, moves):
    for level in partition.levels():
        partition.activate(level)
        partition.activate(level)
    assert len(moves) == len(set(moves)) == len(partition.levels())


@pytest.mark.parametrize("wrong", [-1, 0, "beyond"])
def test_an_unknown_level_is_refused_by_name_and_changes_nothing(partition, moves, wrong):
    partition.activate(partition.levels()[0])
    before = list(moves), os.sched_getaffinity(0)
    level = partition.total_units + 1 if wrong == "beyond" else wrong
    with pytest.raises(UnknownLevel, match=f"cannot take {level} of .*its levels here are") as said:
        partition.activate(level)
    assert "grant only what levels() names" in str(said.value)
    assert isinstance(said.value, InvariantBroken), "harvesting ends, decode does not"
    assert (moves, os.sched_getaffinity(0)) == before


def test_release_gives_the_whole_device_back(partition, moves):
    partition.activate(partition.levels()[0])
    partition.release()
    released = moves[-1]
    partition.activate(partition.total_units)
    assert moves[-1] == released != moves[0]


def test_a_device_that_is_not_shared_has_one_level():
    threads: list[int] = []
    whole = WholeDevice(set_threads=threads.append)
    assert whole.levels() == (whole.total_units,)
    whole.activate(whole.total_units)
    with pytest.raises(UnknownLevel):
        whole.activate(whole.total_units + 1)
    assert threads == [whole.total_units]
