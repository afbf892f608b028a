"""The worker's allocator over CUDA's driver keeps the rules of mappings and events of a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from windrow_sidecar import _core
from windrow_sidecar._core import Arena, DeviceAllocator, Geometry
from windrow_sidecar.memory.tensors import chunk_tensor

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


@pytest.fixture
def owner(violations) -> Iterator[Arena]:
    geometry = Geometry(
        layers=2, kv_heads=2, head_dim=32, dtype_bytes=4, block_bytes=2 * MIB, chunks=4
    )
    arena = Arena.create(geometry, reserved_chunks=1, driver="cuda")
    yield arena
    arena.check()
    arena.close()


def test_a_tensor_of_the_worker_lies_in_the_lent_chunks(owner, run_dir):
    owner.serve(path := str(run_dir / "a.sock"))
    peer = Arena.attach(path)
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
    del allocator
    peer.close()


def test_a_token_major_arena_is_refused_with_what_to_use_and_stays_as_it_was(violations):
    geometry = Geometry(
        layers=2,
        kv_heads=2,
        head_dim=32,
        dtype_bytes=4,
        block_bytes=2 * MIB,
        chunks=2,
        layout="token-major",
    )
    arena = Arena.create(geometry, reserved_chunks=0, driver="cuda")
    arena.lend(1, owner=WORKER)
    before = arena.states()
    with pytest.raises(_core.GeometryError, match=r"one memory of 8388608 .*'per-layer'"):
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


def test_a_stream_that_is_none_is_an_error_and_no_crash(cuda_standin, owner):
    allocator = DeviceAllocator.over(owner)
    (chunk,) = owner.lend(1, owner=WORKER)
    allocator.lend(chunk)
    address = allocator.allocate(2 * MIB, stream=0)
    # Which of the two looks at the stream is the allocator's choice.
    with pytest.raises(_core.Error, match="recording an event"):  # noqa: PT012
        allocator.record_stream(address, 0xBAD)
        allocator.free(address)
    library = ctypes.CDLL(str(cuda_standin))
    library.windrow_standin_take_violations()
