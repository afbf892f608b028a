"""Check what a worker makes of the device of the slot that it has attached to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.queueing_device import QueueingDevice

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.compute.sharing import Sharing
from windrow_sidecar.compute.utilization import visible_device
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.colocated.slot_device import gpu_partition, slot_device
from windrow_sidecar.memory.allocator import memory_stats

WORKER = 7
SPATIAL, TEMPORAL = Sharing("spatial", "a test"), Sharing("temporal", "a test")


def attached(driver: str, folder) -> tuple[Arena, Arena]:
    geometry = Geometry(
        layers=2, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=8192, chunks=4
    )
    decode = Arena.create(geometry, reserved_chunks=0, driver=driver)
    decode.serve(path := str(folder / "a.sock"))
    return decode, Arena.attach(path)


def test_on_the_host_the_partition_stays_that_of_its_cores(run_dir):
    decode, worker = attached("host", run_dir)
    cores = WholeDevice("finetune", 2)
    found = slot_device(worker, WORKER, cores, {})
    assert (found.device.name, found.partition, found.memory) == ("cpu", cores, None)
    assert found.sharing.mode == "spatial"
    worker.close()
    decode.close()


def test_a_gpu_that_torch_does_not_see_is_an_error_that_names_decodes_arena(cuda_standin, run_dir):
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    decode, worker = attached("cuda", run_dir)
    assert worker.driver == decode.driver == "cuda"
    with pytest.raises(UserError, match="sees no GPU here") as error:
        slot_device(worker, WORKER, WholeDevice("finetune", 2), {})
    assert error.value.field == "driver of decode's arena"
    assert memory_stats() == {}, "nothing was installed"
    worker.close()
    decode.close()


WORKER_SHOWN_ONE = """
import sys
from windrow_sidecar._core import Arena, driver
arena = Arena.attach(sys.argv[1], driver="cuda")
print(arena.driver, driver("cuda").facts["uuid"], arena.geometry.chunks)
arena.close()
"""


def test_a_worker_that_is_shown_decodes_gpu_alone_attaches_whatever_its_number_is(
    cuda_standin, run_dir, monkeypatch
):
    monkeypatch.setenv("WINDROW_STANDIN_GPUS", "2")
    first, second = _core.gpu_uuids()
    geometry = Geometry(
        layers=2, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=8192, chunks=4
    )
    decode = Arena.create(geometry, reserved_chunks=0, driver="cuda:1")
    assert _core.driver("cuda:1").facts["uuid"] == second != first
    decode.serve(path := str(run_dir / "a.sock"))
    worker = subprocess.run(
        [sys.executable, "-c", WORKER_SHOWN_ONE, path],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible_device(second, "GPU")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert worker.stdout.split() == ["cuda", second, "4"], worker.stderr
    decode.close()


def test_in_space_the_worker_has_shares_of_sms_and_in_time_all_of_them(cuda_standin):
    device = QueueingDevice()
    shares = gpu_partition(SPATIAL, "cuda", device)
    assert isinstance(shares, CudaPartition)
    assert len(shares.levels()) > 1
    assert shares.side == "finetune"
    alone = gpu_partition(TEMPORAL, "cuda", device)
    assert alone.levels() == (device.total_units(),)


def test_every_gpu_has_its_own_name(cuda_standin):
    assert _core.driver("cuda").name == _core.driver("cuda:0").name == "cuda"
