"""Torch on a real GPU takes its memory from lent chunks, and fails cleanly beyond them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# A process of its own: torch's allocator is chosen once in a process.
CODE = """
import torch
from windrow_sidecar._core import Arena, DeviceAllocator, Geometry
from windrow_sidecar.memory.allocator import install, memory_stats

geometry = Geometry(
    layers=8, kv_heads=8, head_dim=128, dtype_bytes=2, block_bytes=2 << 20, chunks=16
)
arena = Arena.create(geometry, reserved_chunks=1, driver="cuda")
allocator = DeviceAllocator.over(arena)
for chunk in arena.lend(12, owner=7):
    allocator.lend(chunk)
install(allocator)

side = torch.cuda.Stream()
# -1, 0 and 1: sums stay below 2**24 and the mean is over 2**22, so that all of it is exact.
a = torch.randint(-1, 2, (2048, 2048), device="cuda").float().requires_grad_()
b = torch.randint(-1, 2, (2048, 2048), device="cuda").float()
with torch.cuda.stream(side):
    side.wait_stream(torch.cuda.default_stream())
    loss = (a @ b).square().mean()
    b.record_stream(side)
loss.backward()
torch.cuda.synchronize()
expected = 2 * (a.detach() @ b) @ b.T / a.numel()
assert torch.equal(a.grad, expected)
assert memory_stats()["allocated_bytes.all.current"] >= 3 * 16 << 20
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    assert "the budget of 12 chunks" in str(error), error
else:
    raise AssertionError("a terabyte fits")
allocator.check()
print("done")
"""


def test_torch_trains_on_lent_chunks():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "done", done.stderr
