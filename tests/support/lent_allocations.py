"""A worker's memory on chunks that decode lends, over an arena of six in this process."""

from __future__ import annotations

from pathlib import Path

from windrow_sidecar._core import Arena, DeviceAllocator, Geometry
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.memory.allocated import AllocatedMemory
from windrow_sidecar.finetune.offload.job_state import Home
from windrow_sidecar.memory.allocator import LentBudget

CHUNKS, BLOCK_BYTES = 6, 2 << 20


class LentAllocations:
    """Memory of torch on a GPU: an allocator, its budget, and what obeys decode.

    Args:
        run_dir: a short path; the arena's socket goes there.
        owner: the worker's epoch.
        driver, layout: of the arena; a chunk has 8 MiB in either layout.
        home: of what jobs offload (default: the host's memory, where nothing moves).

    Attributes:
        decode, worker: the arena as either side has it.
        allocator, budget, memory: the worker's, of what it is lent.
    """

    def __init__(
        self,
        run_dir: Path,
        owner: int,
        *,
        driver: str = "host",
        layout: str = "per-layer",
        home: Home | None = None,
    ) -> None:
        geometry = Geometry(
            layers=2,
            kv_heads=2,
            head_dim=32,
            dtype_bytes=4,
            block_bytes=BLOCK_BYTES,
            chunks=CHUNKS,
            layout=layout,
        )
        self._owner = owner
        self.decode = Arena.create(geometry, reserved_chunks=0, driver=driver)
        self.decode.serve(path := str(run_dir / "a.sock"))
        self.worker = Arena.attach(path)
        self.allocator = DeviceAllocator.over(self.worker)
        self.budget = LentBudget(self.worker, owner, self.allocator)
        self.memory = AllocatedMemory(
            self.budget,
            HostDevice(),
            chunk_bytes=geometry.chunk_bytes,
            host_free_bytes=lambda: 1 << 30,
            home=home,
        )

    def lend(self, chunks: int) -> None:
        """Decode lends so many more, and the worker sees it."""
        self.decode.lend(chunks, owner=self._owner)
        self.memory.settle()

    def close(self) -> None:
        """Leave nothing behind, and find the arena as it must be."""
        del self.memory, self.budget, self.allocator
        self.worker.close()
        self.decode.check()
        self.decode.close()
