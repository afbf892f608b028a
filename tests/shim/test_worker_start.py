"""What a worker beside decode asks of torch's CUDA as it starts, with our allocator in place."""

from __future__ import annotations

SLOT = """
import sys
from pathlib import Path
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.unshared import Unshared
from windrow_sidecar.finetune.beside.slotdevice import slot_device

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=128, dtype_bytes=4, block_bytes=2 << 20,
                    chunks=8, layout="token-major")
decode = Arena.create(GEOMETRY, reserved_chunks=0, driver="cuda")
decode.lend(8, owner=7)
decode.serve(path := sys.argv[1] + "/a.sock")
worker = Arena.attach(path)
slot = slot_device(worker, 7, Unshared("finetune", 2), {})
slot.memory.settle()
import torch
"""


def test_a_worker_takes_torchs_memory_from_lent_chunks_from_its_first_tensor(shim, tmp_path):
    found = shim.run(
        SLOT
        + """
tensor = torch.zeros(1 << 20, device=slot.device.torch)
assert tensor.is_cuda
assert worker.chunk_offset(0) >= 0
held = slot.memory.held_chunks, slot.device.free_bytes(), slot.device.peak_bytes()
print(*held, slot.memory._budget.used_bytes() >= tensor.nbytes)
""",
        tmp_path,
    )
    print(found)
