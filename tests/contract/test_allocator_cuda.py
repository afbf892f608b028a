"""The worker's allocator over CUDA's driver keeps the rules of mappings and events of a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from chunk_tensors import chunk_tensor

from windrow_sidecar import _core
from windrow_sidecar._core import Arena, DeviceAllocator, Geometry
from windrow_sidecar.memory.allocator import LentBudget

MIB = 1 << 20
WORKER = 7


@pytest.fixture
def violations(cuda_standin) -> Iterator[None]:
    """Fails the test that broke a rule of CUDA's."""
    library = ctypes.CDLL(str(cuda_standin))
    library.windrow_standin_take_violations.restype = ctypes.c_char_p
    library.windrow_standin_take_violations()
    yield
    assert library.windrow_standin_take_violations() == b""


@pytest.fixture(params=["per-layer", "token-major"])
def owner(request, violations) -> Iterator[Arena]:
    geometry = Geometry(
        layers=2,
        kv_heads=2,
        head_dim=32,
        dtype_bytes=4,
        block_bytes=2 * MIB,
        chunks=4,
        layout=request.param,
    )
    arena = Arena.create(geometry, reserved_chunks=1, driver="cuda")
    yield arena
    arena.check()
    arena.close()


@pytest.fixture
def peer(owner, run_dir) -> Iterator[Arena]:
    """The worker's view of it."""
    owner.serve(path := str(run_dir / "a.sock"))
    attached = Arena.attach(path)
    yield attached
    attached.close()


def test_a_tensor_of_the_worker_lies_in_the_lent_chunks(owner, peer):
    allocator = DeviceAllocator.over(peer)
    for chunk in owner.lend(2, owner=WORKER):
        allocator.lend(chunk)
    address = allocator.allocate(5 * MIB, stream=0)
    ctypes.memset(address, 7, 5 * MIB)
    written = sum(
        int((chunk_tensor(owner, chunk, torch.uint8) == 7).sum()) for chunk in owner.held(WORKER)
    )
    assert written == 5 * MIB
    allocator.free(address)


def test_a_tensor_larger_than_a_chunk_is_one_range(owner, peer):
    allocator = DeviceAllocator.over(peer)
    for chunk in owner.lend(3, owner=WORKER):
        allocator.lend(chunk)
    address = allocator.allocate(21 * MIB, stream=0)
    ctypes.memset(address, 9, 21 * MIB)
    assert ctypes.string_at(address + 20 * MIB, MIB) == bytes([9]) * MIB
    calls = allocator.stats()["num_device_alloc"]
    assert calls == (3 if owner.geometry.layout == "token-major" else 11)
    allocator.free(address)


def test_the_budget_follows_the_table_and_gives_back_what_is_quiet(owner, peer):
    allocator = DeviceAllocator.over(peer)
    budget = LentBudget(peer, WORKER, allocator)
    lent = owner.lend(3, owner=WORKER)
    assert budget.settle()
    held = allocator.allocate(10 * MIB, stream=0)
    owner.revoke(2)
    budget.settle()
    # A tensor of 10 MiB takes the highest two of three chunks of 8 MiB.
    assert owner.draining(WORKER) == sorted(lent)[1:2]
    allocator.free(held)
    budget.settle()
    assert owner.draining(WORKER) == []
    assert owner.held(WORKER) == sorted(lent)[2:]


def test_chunks_that_hold_no_whole_piece_are_refused_with_what_to_choose(violations):
    geometry = Geometry(
        layers=2,
        kv_heads=2,
        head_dim=32,
        dtype_bytes=4,
        block_bytes=4096,
        chunks=2,
        layout="token-major",
    )
    arena = Arena.create(geometry, reserved_chunks=0, driver="cuda")
    arena.lend(1, owner=WORKER)
    before = arena.states()
    with pytest.raises(_core.GeometryError, match="choose block_bytes so that"):
        DeviceAllocator.over(arena)
    assert arena.states() == before
    arena.check()
    arena.close()


def test_memory_freed_on_one_share_is_reused_on_another_after_its_work_is_over(owner):
    allocator = DeviceAllocator.over(owner)
    (chunk,) = owner.lend(1, owner=WORKER)
    allocator.lend(chunk)
    partition = _core.driver("cuda").partition()
    first, second = partition.enter("finetune", 1), partition.enter("finetune", 2)
    address = allocator.allocate(8 * MIB, stream=first)
    allocator.record_stream(address, second)
    allocator.free(address)
    again = allocator.allocate(8 * MIB, stream=second)
    assert again
    allocator.free(again)


def test_memory_of_a_stream_that_is_none_is_not_lost(cuda_standin, owner, capfd):
    allocator = DeviceAllocator.over(owner)
    (chunk,) = owner.lend(1, owner=WORKER)
    allocator.lend(chunk)
    address = allocator.allocate(2 * MIB, stream=0)
    allocator.record_stream(address, 0xBAD)
    allocator.free(address)
    assert "freed memory waits for all streams: recording an event" in capfd.readouterr().err
    allocator.drain(chunk)
    assert allocator.take_quiet() == [chunk]
    library = ctypes.CDLL(str(cuda_standin))
    library.windrow_standin_take_violations()
