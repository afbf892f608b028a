"""Memory of a real GPU is shared between processes, and torch computes on shares of SMs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.memory.tensors import kv_tensor

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
MIB = 1 << 20


@pytest.fixture(params=["per-layer", "token-major"])
def geometry(request) -> Geometry:
    return Geometry(
        layers=4,
        kv_heads=8,
        head_dim=128,
        dtype_bytes=2,
        block_bytes=2 * MIB,
        chunks=8,
        layout=request.param,
    )


CHILD = """
import sys, torch
from windrow_sidecar._core import Arena
from windrow_sidecar.memory.tensors import kv_tensor
arena = Arena.attach(sys.argv[1])
kv = kv_tensor(arena, 3, torch.bfloat16, value=True)
print(float(kv[5, 7].float().sum()), kv.device.type)
kv[5, 8] = 2
torch.cuda.synchronize()
print("written")
"""


def test_another_process_reads_and_writes_the_same_device_memory(geometry, tmp_path):
    arena = Arena.create(geometry, reserved_chunks=0, driver="cuda")
    arena.lend(geometry.chunks, owner=1)
    arena.serve(path := str(tmp_path / "a.sock"))
    kv = kv_tensor(arena, 3, torch.bfloat16, value=True)
    kv[5, 7] = 1
    torch.cuda.synchronize()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.stdout == f"{8 * 128:.1f} cuda\nwritten\n", child.stderr
    assert (kv[5, 8] == 2).all()
    del kv
    arena.close()


def test_new_memory_is_zero_and_comes_back_when_the_arena_closes(geometry):
    free = torch.cuda.mem_get_info()[0]
    arena = Arena.create(geometry, reserved_chunks=0, driver="cuda")
    assert torch.cuda.mem_get_info()[0] <= free - geometry.arena_bytes
    assert not torch.from_dlpack(arena.tensor(0, geometry.arena_bytes)).any()
    arena.close()
    assert torch.cuda.mem_get_info()[0] > free - geometry.arena_bytes


def test_torch_computes_the_same_on_every_level(geometry):
    partition = CudaPartition("finetune")
    # Whole numbers whose sums stay below 2**24: exact in whatever order a share adds them up.
    a = torch.randint(-8, 9, (1024, 1024), device="cuda").float()
    expected = a @ a
    torch.cuda.synchronize()
    for units in partition.levels():
        partition.activate(units)
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        assert torch.equal(a @ a, expected)
        torch.cuda.synchronize()
    partition.release()
