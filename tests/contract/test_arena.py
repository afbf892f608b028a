"""The arena keeps its promises: sizes, tensors, lending, attaching, sharing weights, closing."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch
from chunk_tensors import chunk_tensor
from torch.utils.dlpack import from_dlpack

from windrow_sidecar import _core
from windrow_sidecar._core import Arena, Geometry, SharedWeights
from windrow_sidecar.memory.tensors import arena_tensor, kv_tensor

FREE, KV, LENT, RESERVED, DRAINING = range(5)


def test_the_states_are_those_of_counts():
    named = (_core.FREE, _core.KV, _core.LENT, _core.RESERVED, _core.DRAINING)
    assert named == (FREE, KV, LENT, RESERVED, DRAINING)


def test_a_chunk_holds_k_and_v_of_every_layer():
    g = Geometry(layers=6, kv_heads=4, head_dim=32, dtype_bytes=4, block_bytes=131072, chunks=128)
    assert g.slots_per_chunk == 256
    assert g.chunk_bytes == 1_572_864
    assert g.arena_bytes == 128 * 1_572_864


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"chunks": -1}, "chunks is -1"),
        ({"block_bytes": 5000}, "multiple of 4096"),
        ({"kv_heads": 3}, "whole number of tokens"),
        ({"layers": 2**50, "chunks": 2**20}, "63 bits"),
    ],
)
def test_a_geometry_that_makes_no_arena_is_refused(change, message):
    sound = {
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 32,
        "dtype_bytes": 4,
        "block_bytes": 8192,
        "chunks": 16,
    }
    with pytest.raises(_core.GeometryError, match=message):
        Geometry(**(sound | change))


def test_a_reserve_larger_than_the_arena_is_refused(arena, driver):
    with pytest.raises(_core.GeometryError, match="reserved_chunks is 99"):
        Arena.create(arena.geometry, reserved_chunks=99, driver=driver)


def test_the_arena_starts_free_with_its_reserve_filled(arena):
    assert arena.counts() == (14, 0, 0, 2, 0)
    assert arena.is_owner


def test_a_workers_chunk_is_one_range_whatever_decodes_is(served):
    owner, path = served
    peer = Arena.attach(path)
    chunk_bytes = owner.geometry.chunk_bytes
    assert [peer.chunk_offset(i) for i in (0, 1, 15)] == [0, chunk_bytes, 15 * chunk_bytes]
    assert peer.block_stride == owner.geometry.block_bytes
    peer.close()


@pytest.mark.parametrize("layout", ["per-layer", "token-major"])
def test_k_and_v_are_found_by_layer_and_slot_in_both_layouts_on_both_sides(
    driver, geometry, run_dir, layout
):
    owner = Arena.create(geometry(layout=layout), reserved_chunks=0, driver=driver)
    owner.serve(path := str(run_dir / "a.sock"))
    peer = Arena.attach(path)
    owner.lend(owner.geometry.chunks, owner=1)  # a worker on a device sees no more than that
    for layer in (0, 1):
        for value in (False, True):
            kv_tensor(owner, layer, torch.float32, value=value).fill_(10 * layer + value)
    kv_tensor(owner, 1, torch.float32, value=True)[3, 5, 1] = 7
    for layer in (0, 1):
        for value in (False, True):
            seen = kv_tensor(peer, layer, torch.float32, value=value)
            assert seen.shape == (16, owner.geometry.slots_per_chunk, 2, 32)
            if (layer, value) == (1, True):
                assert (seen[3, 5, 1] == 7).all()
                seen[3, 5, 1] = 11
            assert (seen == 10 * layer + value).all()
    del seen
    peer.close()
    owner.close()


def test_a_layout_that_is_none_is_refused(geometry):
    with pytest.raises(_core.GeometryError, match="use per-layer or token-major"):
        geometry(layout="layer-major")


@pytest.mark.parametrize("name", ["metal", "cuda:", "cuda:x", ""])
def test_a_driver_that_is_none_is_refused(name):
    with pytest.raises(ValueError, match="use host, cuda, or cuda:N"):
        _core.driver(name)


def test_without_a_gpu_cuda_says_what_to_do():
    _core.use_libcuda("libcuda-that-is-not-there.so")
    try:
        with pytest.raises(_core.DriverUnavailable, match="install NVIDIA's driver"):
            _core.driver("cuda")
    finally:
        _core.use_libcuda("libcuda.so.1")


def test_tensors_over_the_same_bytes_alias(arena):
    a = arena_tensor(arena, 4096, (4, 8), torch.float32)
    b = arena_tensor(arena, 4096, (32,), torch.float32)
    a.copy_(torch.arange(32.0).view(4, 8))
    assert torch.equal(b.cpu(), torch.arange(32.0))


def test_a_chunk_is_seen_as_blocks_of_slots(arena):
    kv = chunk_tensor(arena, 3, torch.float32)
    assert kv.shape == (4, arena.geometry.slots_per_chunk, 2, 32)
    kv[3, -1] = 7
    assert (kv_tensor(arena, 1, torch.float32, value=True)[3, -1] == 7).all()
    elements = arena.geometry.block_bytes // 2
    assert chunk_tensor(arena, 3, torch.bfloat16).shape == (4, elements)


@pytest.mark.parametrize(("offset", "n_bytes"), [(-1, 1), (0, 0), (0, 1 << 40), (1 << 62, 1 << 62)])
def test_a_tensor_outside_of_the_arena_is_refused(arena, offset, n_bytes):
    with pytest.raises(IndexError, match="not inside"):
        arena.tensor(offset, n_bytes)


def test_an_unaligned_tensor_is_refused(arena):
    with pytest.raises(ValueError, match="not a multiple of 4"):
        arena_tensor(arena, 2, (1,), torch.float32)


def test_closing_with_live_tensors_names_them(driver, geometry):
    arena = Arena.create(geometry(layers=1, chunks=2), reserved_chunks=0, driver=driver)
    tensor = torch.from_dlpack(arena.tensor(4096, 64))
    view = tensor[3:].view(61)
    with pytest.raises(_core.LiveTensorsError, match="1 tensor: 64 bytes at offset 4096"):
        arena.close()
    del tensor
    with pytest.raises(_core.LiveTensorsError):  # a view of it still lives
        arena.close()
    del view
    arena.close()
    arena.close()
    with pytest.raises(_core.Error, match="closed"):
        arena.take_kv()


def test_a_tensor_outlives_an_arena_that_was_only_dropped(driver, geometry):
    arena = Arena.create(geometry(layers=1, chunks=2), reserved_chunks=0, driver=driver)
    tensor, page = torch.from_dlpack(arena.tensor(0, 64)), arena.page
    del arena
    gc.collect()
    tensor.fill_(5)
    page.beat(0)
    assert tensor.sum() == 5 * 64


def test_wrong_transitions_are_refused_and_change_nothing(arena):
    kv = arena.take_kv()
    lent = arena.lend(2, owner=7)
    before = arena.states()
    for wrong in (
        lambda: arena.return_kv(lent[0]),
        lambda: arena.return_kv(1),
        lambda: arena.give_back(kv, owner=7),
        lambda: arena.give_back(lent[0], owner=8),
    ):
        with pytest.raises(_core.OwnershipError, match="chunk"):
            wrong()
    with pytest.raises(IndexError, match="none of the arena's 16"):
        arena.return_kv(16)
    with pytest.raises(ValueError, match="job epoch"):
        arena.lend(1, owner=0)
    assert arena.states() == before


def test_a_double_return_is_refused(arena):
    chunk = arena.take_kv()
    arena.return_kv(chunk)
    with pytest.raises(_core.OwnershipError, match="returned twice"):
        arena.return_kv(chunk)


def test_a_peer_maps_the_same_memory_and_may_only_give_back(served):
    owner, path = served
    peer = Arena.attach(path)
    assert peer.geometry == owner.geometry
    assert not peer.is_owner
    (chunk,) = owner.lend(1, owner=3)
    assert peer.held(3) == [chunk]
    chunk_tensor(owner, chunk, torch.float32).fill_(2.5)
    assert (chunk_tensor(peer, chunk, torch.float32) == 2.5).all()
    with pytest.raises(_core.OwnershipError, match="decode's call"):
        peer.take_kv()
    assert owner.revoke(5) == [chunk]
    assert peer.draining(3) == [chunk]
    assert peer.chunk(chunk).owner == 3
    peer.give_back(chunk, owner=3)
    assert owner.counts() == (14, 0, 0, 2, 0)
    peer.close()


def test_attaching_where_nobody_serves_says_so(run_dir):
    with pytest.raises(_core.AttachError, match="no arena is served at"):
        Arena.attach(str(run_dir / "none.sock"), timeout_s=0)


def test_a_path_too_long_for_a_socket_says_so(arena):
    with pytest.raises(_core.AttachError, match="shorter run directory"):
        arena.serve("/tmp/" + "x" * 120)


def test_a_worker_on_a_device_reaches_lent_chunks_only(served, driver):
    owner, path = served
    kv = owner.take_kv()
    (lent,) = owner.lend(1, owner=21)
    peer = Arena.attach(path)
    torch.from_dlpack(peer.tensor(peer.chunk_offset(lent), 16)).fill_(3)
    before = peer.states()
    if driver == "host":
        peer.tensor(peer.chunk_offset(kv), 16)
    else:
        with pytest.raises(_core.OwnershipError, match=f"chunk {kv} is KV; .* lent chunks only"):
            peer.tensor(peer.chunk_offset(kv), 16)
    assert peer.states() == before
    peer.close()


CHILD_ATTACH = """
import sys, torch
from windrow_sidecar._core import Arena
arena = Arena.attach(sys.argv[1])
epoch = int(sys.argv[2])
for chunk in arena.held(epoch):
    torch.from_dlpack(arena.tensor(arena.chunk_offset(chunk), 16)).fill_(epoch)
print("ready")
sys.stdin.readline()
for chunk in arena.draining(epoch):
    arena.give_back(chunk, owner=epoch)
arena.close()
"""


def test_a_child_process_borrows_writes_and_gives_back(served, child):
    owner, path = served
    lent = owner.lend(3, owner=21)
    worker = child(CHILD_ATTACH, path, 21)
    assert worker.stdout.readline() == "ready\n"
    assert owner.peers() == [worker.pid]
    assert torch.from_dlpack(owner.tensor(owner.chunk_offset(lent[2]), 16)).tolist() == [21] * 16
    owner.revoke(2)
    _, errors = worker.communicate("go on\n", timeout=60)
    assert worker.returncode == 0, errors
    assert owner.counts() == (13, 0, 1, 2, 0)
    assert owner.peers() == []


def test_a_killed_borrower_is_no_peer_and_its_chunks_are_reclaimed(served, child):
    owner, path = served
    owner.lend(3, owner=5)
    other = owner.lend(1, owner=6)
    owner.revoke(1)
    worker = child(CHILD_ATTACH, path, 5)
    assert worker.stdout.readline() == "ready\n"
    worker.send_signal(signal.SIGKILL)
    worker.wait(timeout=60)
    assert owner.peers() == []
    assert owner.reclaim(5) == 3
    assert owner.held(6) + owner.draining(6) == other
    assert owner.reclaim(5) == 0


CHILD_WRITE = """
import sys, warnings, torch
warnings.simplefilter("error")
from windrow_sidecar._core import Arena
arena = Arena.attach(sys.argv[1])
weights = torch.from_dlpack(arena.imported("weights"))
print(weights.numel(), int(weights.sum()))
weights[0] = 1
if weights.is_cuda:
    torch.cuda.synchronize()
print("still alive")
"""


def test_a_write_to_shared_weights_kills_the_writer_and_nobody_else(served, child, driver):
    owner, path = served
    weights = SharedWeights.create(5000, driver=driver)
    mine = torch.from_dlpack(weights.tensor())
    mine.fill_(3)
    weights.seal()
    owner.export("weights", weights.fd, n_bytes=5000)
    output, errors = (worker := child(CHILD_WRITE, path)).communicate(timeout=60)
    assert output == "5000 15000\n", errors
    # A GPU ends the writer's work there: torch raises then.
    assert worker.returncode == (1 if mine.is_cuda else -signal.SIGSEGV)
    assert mine.sum() == 15000


CHILD_SHARE = """
import sys, torch
from windrow_sidecar._core import Arena
def kib(kind):
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(kind + ":"))
before = kib("Pss"), kib("Private_Dirty")
arena = Arena.attach(sys.argv[1])
weights = torch.from_dlpack(arena.imported("weights"))
assert weights.max() == 3
print(kib("Pss") - before[0], kib("Private_Dirty") - before[1])
"""


def test_shared_weights_are_in_memory_once_however_many_read_them(run_dir, child):
    size, path = 64 * 2**20, str(run_dir / "a.sock")
    owner = Arena.create(
        Geometry(layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2),
        reserved_chunks=0,
    )
    weights = SharedWeights.create(size)
    torch.from_dlpack(weights.tensor()).fill_(3)
    weights.seal()
    owner.export("weights", weights.fd, n_bytes=size)
    owner.serve(path)
    output, errors = child(CHILD_SHARE, path).communicate(timeout=60)
    assert output, errors
    share_kib, dirty_kib = map(int, output.split())
    # Pss counts each page by the part of those that map it: half of them, and nothing of its own.
    assert share_kib < 0.7 * size / 1024
    assert dirty_kib < 0.25 * size / 1024
    owner.close()


def test_a_peer_reads_the_weights_that_are_exported_to_it(served, driver):
    owner, path = served
    weights = SharedWeights.create(4096, driver=driver)
    from_dlpack(weights.tensor())[64:88].view(torch.float32).copy_(torch.ones(6))
    weights.seal()
    owner.export("w", weights.fd, n_bytes=4096)
    peer = Arena.attach(path)
    assert (from_dlpack(peer.imported("w"))[64:88].view(torch.float32) == 1).all()
    peer.close()


def test_unsealed_memory_is_not_exported_where_seals_can_be_seen():
    owner = Arena.create(
        Geometry(layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2),
        reserved_chunks=0,
    )
    weights = SharedWeights.create(4096)
    with pytest.raises(_core.Error, match="not sealed"):
        owner.export("weights", weights.fd)
    owner.close()


def test_asking_for_weights_that_nobody_exported_names_what_there_is(served, driver):
    owner, path = served
    weights = SharedWeights.create(1, driver=driver)
    weights.seal()
    owner.export("base", weights.fd)
    peer = Arena.attach(path)
    with pytest.raises(_core.AttachError, match=r"nothing named 'tuned' \(it exports: base\)"):
        peer.imported("tuned")
    peer.close()


def test_closing_removes_the_socket_and_no_descriptor_is_left(driver, geometry, run_dir):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    owner = Arena.create(geometry(layers=1, chunks=2), reserved_chunks=0, driver=driver)
    owner.serve(str(run_dir / "a.sock"))
    peer = Arena.attach(str(run_dir / "a.sock"))
    peer.close()
    owner.close()
    assert list(run_dir.iterdir()) == []
    assert descriptors() == before
