"""An arena is whole or absent whatever call of a driver fails, and nothing is left behind."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from support.faults import each_call_failing

from windrow_sidecar import _core
from windrow_sidecar._core import Arena, FaultyDriver, SharedWeights


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("windrow" in line or "libcuda-standin" in line for line in maps)


@pytest.mark.parametrize("layout", ["per-layer", "token-major"])
def test_an_arena_that_could_not_be_made_leaves_nothing(driver, geometry, layout):
    before = descriptors(), mappings()
    failed = 0
    for faulty in each_call_failing(driver):
        try:
            arena = Arena.create(
                geometry(chunks=2, layout=layout), reserved_chunks=1, driver=faulty
            )
        except _core.Error as error:
            assert "injected fault" in str(error)  # noqa: PT017  the sweep ends without one
            failed += 1
        else:
            arena.check()
            arena.close()
        assert (descriptors(), mappings()) == before
    assert failed >= 5


def test_a_peer_that_could_not_attach_leaves_the_owner_as_it_was(served, driver):
    owner, path = served
    before = owner.states()
    failed = 0
    for faulty in each_call_failing(driver):
        try:
            Arena.attach(path, driver=faulty).close()
        except _core.AttachError as error:
            assert "injected fault" in str(error)  # noqa: PT017
            failed += 1
        owner.check()
    assert owner.states() == before
    assert failed >= 5


def test_weights_that_could_not_be_imported_are_imported_by_the_next_try(served, driver):
    owner, path = served
    weights = SharedWeights.create(5000, driver=driver)
    torch.from_dlpack(weights.tensor()).fill_(3)
    weights.seal()
    owner.export("weights", weights.fd, n_bytes=5000)
    for n in (1, 2, 3):
        faulty = FaultyDriver(driver)
        peer = Arena.attach(path, driver=faulty)
        faulty.fail_any(n)
        with pytest.raises(_core.Error, match="injected fault"):
            peer.imported("weights")
        assert torch.from_dlpack(peer.imported("weights")).sum() == 15000
        peer.close()


def test_a_lost_descriptor_is_the_peers_error_and_decode_goes_on(driver, geometry, run_dir):
    faulty = FaultyDriver(driver)
    faulty.lose_export(2)
    owner = Arena.create(geometry(chunks=2), reserved_chunks=0, driver=faulty)
    owner.serve(path := str(run_dir / "a.sock"))
    with pytest.raises(_core.AttachError):
        Arena.attach(path)
    assert owner.take_kv() == 0
    owner.check()
    owner.close()


CHILD_DIES = """
import sys
from windrow_sidecar._core import Arena
from support.faults import FaultyDriver, kill_at
driver = FaultyDriver(sys.argv[2])
kill_at(driver, sys.argv[3], 1)
Arena.attach(sys.argv[1], driver=driver)
"""


@pytest.mark.parametrize("call", ["import", "reserve", "map"])
def test_a_peer_that_dies_while_it_attaches_is_no_peer_and_takes_nothing(
    served, driver, child, call
):
    owner, path = served
    before = owner.states()
    worker = child(CHILD_DIES, path, driver, call)
    _, errors = worker.communicate(timeout=60)
    assert worker.returncode == -signal.SIGKILL, errors
    assert owner.peers() == []
    assert owner.states() == before


def test_a_delayed_call_goes_its_way(driver, geometry):
    faulty, seen = FaultyDriver(driver), []
    faulty.before("map", 1, lambda: seen.append(faulty.calls))
    Arena.create(geometry(chunks=2), reserved_chunks=0, driver=faulty).close()
    assert len(seen) == 1
    assert faulty.fired == 1


def test_a_call_that_no_driver_has_and_a_number_before_the_first_are_refused():
    faulty = FaultyDriver("host")
    with pytest.raises(ValueError, match="no call 'mmap'"):
        faulty.fail("mmap", 1)
    with pytest.raises(ValueError, match="number 1"):
        faulty.fail_any(0)
