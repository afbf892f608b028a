"""Tensors from lent chunks: through the bindings, through the C symbols that torch calls."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.allocation_trace import peak_bytes, read_trace, replay
from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar._core import Arena, BudgetError, DeviceAllocator, Error, Geometry
from windrow_sidecar.memory.allocator import LentBudget, install, memory_stats

MIB = 1 << 20
WORKER = 7
DEVICE = 3
TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "lora-2x1024.txt"
# A chunk: 4 blocks of 2 MiB.
GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=32, dtype_bytes=4, block_bytes=2 * MIB, chunks=6)


@pytest.fixture
def owner() -> Iterator[Arena]:
    arena = Arena.create(GEOMETRY, reserved_chunks=1)
    yield arena
    arena.check()
    arena.close()


@pytest.fixture
def allocator(owner: Arena) -> DeviceAllocator:
    made = DeviceAllocator.over(owner)
    for chunk in owner.lend(3, owner=WORKER):
        made.lend(chunk)
    return made


@pytest.fixture
def library(allocator: DeviceAllocator) -> Iterator[ctypes.CDLL]:
    """The C symbols as torch finds them: by their names, in the native module's file."""
    pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
    symbols = ctypes.CDLL(_core.__file__)
    symbols.windrow_alloc.argtypes = [size, ctypes.c_int, pointer]
    symbols.windrow_alloc.restype = pointer
    symbols.windrow_free.argtypes = [pointer, size, ctypes.c_int, pointer]
    symbols.windrow_free.restype = None
    symbols.windrow_record_stream.argtypes = [pointer, pointer]
    symbols.windrow_record_stream.restype = None
    symbols.windrow_last_error.restype = ctypes.c_char_p
    _core.serve_device(DEVICE, allocator)
    yield symbols
    _core.serve_device(DEVICE, None)


def tensor_at(address: int, n_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(address), dtype=torch.uint8)


def test_torchs_symbols_hand_out_memory_that_tensors_can_use(library, allocator):
    small = library.windrow_alloc(5_000, DEVICE, None)
    large = library.windrow_alloc(10 * MIB, DEVICE, None)
    tensor_at(small, 5_000).fill_(1)
    tensor_at(large, 10 * MIB).fill_(2)
    assert int(tensor_at(small, 5_000).sum()) == 5_000
    assert allocator.stats()["requested_bytes.all.current"] == 5_000 + 10 * MIB
    library.windrow_record_stream(large, None)
    library.windrow_free(small, 5_000, DEVICE, None)
    library.windrow_free(large, 10 * MIB, DEVICE, None)
    assert allocator.stats()["allocation.all.current"] == 0
    assert library.windrow_last_error() == b""


def test_a_request_beyond_the_budget_names_the_budget(library, allocator, capfd):
    assert library.windrow_alloc(25 * MIB, DEVICE, None) is None
    assert b"3 chunks of 8.0 MiB" in library.windrow_last_error()
    assert "3 chunks of 8.0 MiB" in capfd.readouterr().err
    with pytest.raises(BudgetError, match=r"3 chunks of 8\.0 MiB, of which 0\.0 MiB are in use"):
        allocator.allocate(25 * MIB)


def test_memory_outlives_the_arena_that_it_came_from():
    arena = Arena.create(GEOMETRY, reserved_chunks=0)
    allocator = DeviceAllocator.over(arena)
    for chunk in arena.lend(1, owner=WORKER):
        allocator.lend(chunk)
    tensor = tensor_at(allocator.allocate(4 * MIB), 4 * MIB)
    arena.close()
    assert int(tensor.fill_(3)[-1]) == 3


def test_figures_have_the_names_of_torch(allocator):
    documented = torch.cuda.memory_stats.__doc__
    names = allocator.stats().keys() - {"num_device_alloc_saved", "num_device_set_access"}
    for name in names:
        # torch documents the number of requests as `allocated` and reports it as `allocation`.
        stem = re.sub(r"^allocation\b", "allocated", name).split(".")[0]
        assert re.search(rf'``"{stem}\b', documented), name
    pools = {name.split(".")[1] for name in names if "." in name}
    assert pools == {"all", "large_pool", "small_pool"}


def test_streams_share_no_memory_before_it_is_freed(allocator):
    addresses = [allocator.allocate(4_096, stream=stream) for stream in (1, 2)]
    assert addresses[0] // (2 * MIB) != addresses[1] // (2 * MIB)
    allocator.free(addresses[0])
    with pytest.raises(Error, match="freed twice"):
        allocator.free(addresses[0])


def test_without_a_gpu_installing_says_what_to_do(allocator):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: tests/gpu installs it")
    with pytest.raises(UserError, match="torch sees no GPU here"):
        install(allocator)
    assert memory_stats() == {}


def test_the_budget_follows_the_table_of_owners(owner, run_dir):
    owner.serve(str(run_dir / "arena.sock"))
    peer = Arena.attach(str(run_dir / "arena.sock"))
    allocator = DeviceAllocator.over(peer)
    budget = LentBudget(peer, WORKER, allocator)
    assert not budget.settle()
    lent = owner.lend(3, owner=WORKER)
    assert budget.settle()
    assert budget.chunks == 3
    held = allocator.allocate(20 * MIB)

    owner.revoke(2)
    assert not budget.settle(), "a tensor lies in them"
    assert owner.draining(WORKER) == sorted(lent)[:2]
    with pytest.raises(BudgetError, match="2 more chunks drain"):
        allocator.allocate(5 * MIB)

    allocator.free(held)
    assert budget.settle()
    assert owner.draining(WORKER) == []
    assert owner.held(WORKER) == sorted(lent)[2:]

    owner.lend(1, owner=WORKER)
    owner.revoke(1)
    assert not budget.settle(), "asked back before it was used"
    assert owner.draining(WORKER) == []
    allocator.check()
    peer.close()


def test_one_lora_iteration_wastes_less_than_100_mb():
    steps = read_trace(TRACE)
    assert sum(0 < n_bytes < 2 * MIB for _, n_bytes in steps) > 5_000
    chunk_bytes = 64 * 2 * MIB
    geometry = Geometry(
        layers=32,
        kv_heads=8,
        head_dim=128,
        dtype_bytes=2,
        block_bytes=2 * MIB,
        chunks=-(-(peak_bytes(steps) + 100 * 10**6) // chunk_bytes),
    )
    arena = Arena.create(geometry, reserved_chunks=0)
    allocator = DeviceAllocator.over(arena)
    for chunk in arena.lend(geometry.chunks, owner=WORKER):
        allocator.lend(chunk)
    blocks = _core.small_pool_blocks_for(steps)
    assert allocator.keep_small(blocks) == blocks
    first, second = replay(steps, allocator), replay(steps, allocator)
    assert max(first.most_fragmentation_bytes, second.most_fragmentation_bytes) < 100 * 10**6
    assert second.mapping_calls < first.mapping_calls / 10
    allocator.check()
    allocator.release_cached()
    assert allocator.stats()["reserved_bytes.all.current"] == 0
    arena.close()


def test_a_trace_that_ends_what_does_not_live_is_refused(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_text("+16\n-0\n-0\n")
    with pytest.raises(ValueError, match="allocation 0 ends"):
        read_trace(file)
