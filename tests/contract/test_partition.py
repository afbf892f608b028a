"""One suite for every partition: levels, activation, and what is refused, for either side."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from support.faults import FaultyDriver

from windrow.errors import InvariantBroken
from windrow_sidecar import _core
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.compute.partition import NotMoved, Partition, Side, UnknownLevel
from windrow_sidecar.compute.whole_device import WholeDevice


@pytest.fixture
def moves() -> list[int]:
    """Return what compute was told at each move: how many threads, or which stream."""
    return []


@pytest.fixture
def faulty(driver) -> FaultyDriver:
    """Return what partitions are made over: each driver, with calls that can be made to fail."""
    return FaultyDriver(driver)


@pytest.fixture
def make(request, driver, faulty, moves) -> Callable[[Side], Partition]:
    """Makes partitions of one device, on each driver."""
    if driver == "cuda":
        return lambda side: CudaPartition(side, faulty, use_stream=moves.append)
    cpus = request.getfixturevalue("cores")
    return lambda side: HostPartition(side, cpus, set_threads=moves.append, driver=faulty)


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


def masks() -> dict[str, set[int]]:
    """Cores of each thread."""
    return {name: os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}


@pytest.mark.parametrize("to_more", [False, True])
def test_a_share_that_cannot_be_entered_leaves_the_process_where_it_was(
    partition, faulty, moves, to_more
):
    low, *_, whole = partition.levels()
    old, new = (low, whole) if to_more else (whole, low)
    partition.activate(old)
    before = moves[-1], masks()
    faulty.fail("enter", 1)
    with pytest.raises(NotMoved, match="stays on the share that it had: injected fault: enter"):
        partition.activate(new)
    assert (moves[-1], masks()) == before
    partition.activate(new)
    assert moves[-1] != before[0]


def test_a_device_that_cannot_be_shared_now_makes_no_partition(make, faulty):
    faulty.fail("partition", 1)
    with pytest.raises(_core.Error, match="injected fault: partition failed"):
        make("decode")
    make("decode").release()


def test_release_gives_the_whole_device_back(partition, moves):
    partition.activate(partition.levels()[0])
    partition.release()
    released = moves[-1]
    partition.activate(partition.total_units)
    assert moves[-1] == released != moves[0]


def test_a_device_that_is_not_shared_has_one_level():
    threads: list[int] = []
    whole = WholeDevice.cores("decode", set_threads=threads.append)
    assert whole.levels() == (whole.total_units,)
    whole.activate(whole.total_units)
    with pytest.raises(UnknownLevel):
        whole.activate(whole.total_units + 1)
    assert threads == [whole.total_units]
