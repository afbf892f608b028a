"""A worker beside decode on a GPU, from its first call of torch's: with our allocator in place."""

from __future__ import annotations

import json

import pytest
from worker_pod import Pod, lend_what_is_wanted, started_on_gpu, until

from windrow.protocol import Ending

SLOT = """
import sys
from pathlib import Path
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.colocated.slot_device import slot_device

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=128, dtype_bytes=4, block_bytes=2 << 20,
                    chunks=8, layout="token-major")
decode = Arena.create(GEOMETRY, reserved_chunks=0, driver="cuda")
decode.lend(8, owner=7)
decode.serve(path := sys.argv[1] + "/a.sock")
worker = Arena.attach(path)
slot = slot_device(worker, 7, WholeDevice("finetune", 2), {})
slot.memory.settle()
import torch
"""


def test_torch_takes_memory_from_lent_chunks_from_its_first_tensor_on(shim, tmp_path):
    counts = tmp_path / "counts"
    code = """
tensor = torch.zeros(1 << 20, device=slot.device.torch)
print(slot.memory.held_chunks, slot.device.peak_bytes() >= tensor.nbytes)
left = slot.device.free_bytes()
del tensor
torch.cuda.empty_cache()
print(slot.device.free_bytes() - left)
"""
    found = shim.run(SLOT + code, tmp_path, WINDROW_SHIM_COUNTS=str(counts))
    assert found.split() == ["8", "True", str(4 << 20)]
    assert json.loads(counts.read_text())["most_device_bytes"] == 0, "torch has memory of its own"


@pytest.mark.extended
def test_tensors_that_live_until_the_process_ends_are_freed_after_libcuda_without_a_word(
    shim, tmp_path
):
    """libcuda ends before torch and Python do, and refuses every call from then on."""
    code = """
import builtins
builtins.kept = [torch.ones(1 << 20, device=slot.device.torch), torch.ones(8, device="cuda")]
builtins.slot = slot
print(len(builtins.kept))
"""
    assert shim.run(SLOT + code, tmp_path) == "2"


@pytest.mark.extended
def test_a_tensor_of_decodes_weights_does_not_come_before_the_allocator(shim, tmp_path):
    """DLPack asks torch for the current stream, which initialises CUDA."""
    code = """
from torch.utils.dlpack import from_dlpack
from windrow_sidecar._core import SharedWeights
shared = SharedWeights.create(1 << 20, driver="cuda")
weights = from_dlpack(shared.tensor())
weights.zero_()
print(weights.device, int(weights[:8].cpu().sum()))
"""
    assert shim.run(SLOT + code, tmp_path) == "cuda:0 0"
    early = SLOT.replace(
        "slot = slot_device",
        "import torch; torch.from_dlpack(worker.tensor(0, 16))\nslot = slot_device",
    )
    with pytest.raises(AssertionError, match="Install the allocator before"):
        shim.run(early, tmp_path)


@pytest.mark.extended
def test_a_stream_of_a_partition_outlives_it_while_torch_computes_there(shim):
    code = """
import gc, torch
from windrow_sidecar.compute.cuda import CudaPartition
def move(partition):
    partition.activate(partition.levels()[0])
for _ in range(3):
    move(CudaPartition("finetune"))
    gc.collect()
    torch.cuda.current_stream().synchronize()
assert torch.cuda.current_stream() != torch.cuda.default_stream()
"""
    shim.run(code)


WAITS = """
import ctypes, json, os, sys
import torch
from windrow_sidecar.compute.cuda_device import CudaDevice
from windrow_sidecar.qos.view import Phase
from windrow_sidecar.testing.tinyjob import tiny_job, tiny_llama

shim = ctypes.CDLL(None)
for count in (shim.windrow_shim_waits, shim.windrow_shim_unpinned, shim.windrow_shim_orders):
    count.restype = ctypes.c_longlong

def waited():
    return shim.windrow_shim_waits() + shim.windrow_shim_unpinned()

device = CudaDevice()
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("options", "losses"),
    [
        ("", 1),
        ("micro_batches=2", 2),
        ("sizing=Windows(5)", 3),
        ("evaluation_policy=EvaluationPolicy(packed=True), line_sizes=LineSizes(24, 24)", 1),
        # A mixture of experts; what torch's product of groups does itself is not seen here.
        ("base=random_model('Mixtral').requires_grad_(False).to(device.torch)", 1),
    ],
    ids=["rows", "micro-batches", "windows", "packed", "experts"],
)
def test_between_its_first_layer_and_its_last_a_group_never_waits_for_the_device(
    shim, options, losses
):
    """A wait holds up a tasklet, and decode with it; what is not queued in time is lost."""
    code = """
from windrow_sidecar.finetune.engine.packing import LineSizes
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.testing.architectures import random_model
job = tiny_job(**dict(base=tiny_llama().to(device.torch), steps=3) | dict(OPTIONS))
found, steps = [], 0
while (tasklet := job.stream.peek()) is not None:
    before = waited()
    outcome = job.stream.run(tasklet)
    found.append((tasklet, waited() - before, job.stream.between_micro_batches))
    steps += tasklet.phase is Phase.OPTIMIZER
assert steps == 3
shapes = set()
for tasklet, waits, is_last in found:
    if tasklet.phase is Phase.OPTIMIZER:
        assert waits == 1, (tasklet, waits)  # the norm of its gradient
    elif is_last:
        assert 1 <= waits <= LOSSES, (tasklet, waits)  # of each micro-batch or window
    elif tasklet.micro.packed:  # masks are made of the rows' numbers, which the host knows
        assert waits == 0, (tasklet, waits)
    elif (shape := (tasklet.micro.lines, tasklet.micro.width)) not in shapes:
        shapes.add(shape)  # how the model calls its layers is asked once for each
    else:
        assert waits == 0, (tasklet, waits)
print(len(found), len(shapes))
""".replace("OPTIONS", options).replace("LOSSES", str(losses))
    said = shim.run(WAITS + code, computes=True, WINDROW_SHIM_LAGS="1")
    n, shapes = map(int, said.split())
    assert n > 4 * shapes


@pytest.mark.extended
def test_a_job_on_a_gpu_goes_on_from_a_checkpoint_that_was_read_on_the_host(shim):
    code = """
from windrow_sidecar.testing.tinyjob import adapter_of, bit_equal

def made():
    return tiny_job(base=tiny_llama().to(device.torch), steps=3)

def run(job, until=lambda stream: False):
    while not until(job.stream) and (tasklet := job.stream.peek()) is not None:
        job.stream.run(tasklet)

whole, first, second = made(), made(), made()
run(whole)
run(first, lambda stream: stream.position.step == 1 and stream.position.committed_rows)
held = {name: tensor.cpu() for name, tensor in first.stream.tensors().items()}
second.stream.restore(first.stream.position, held)
print({kind.partition("/")[0] for kind in held} == {"parameter", "state", "sum"})
print(all(tensor.is_cuda for tensor in second.stream.tensors().values()))
run(second)
print(bit_equal(adapter_of(whole), adapter_of(second)))
"""
    assert shim.run(WAITS + code, computes=True).split() == ["True"] * 3


@pytest.mark.extended
def test_a_checkpoint_is_copied_behind_what_the_share_has_computed(shim):
    """Its thread has torch's default stream, for which streams of shares do not wait."""
    code = """
import threading
from windrow_sidecar.compute.cuda import CudaPartition
from windrow_sidecar.finetune.training.snapshot import TensorSnapshot

partition = CudaPartition("finetune")
partition.activate(partition.levels()[0])
tensor = torch.ones(1 << 10, device=device.torch)
snapshot = TensorSnapshot({"sum/a": tensor})
before, found = shim.windrow_shim_orders(), []
thread = threading.Thread(target=lambda: found.append(snapshot.take()))
thread.start()
thread.join()
print(shim.windrow_shim_orders() - before, bool((found[0]["sum/a"] == 1).all()))
"""
    assert shim.run(WAITS + code, computes=True).split() == ["1", "True"]


def step_of(pod: Pod) -> int:
    return pod.agent.progress[-1].step if pod.agent.progress else 0


@pytest.mark.paired
@pytest.mark.extended
def test_a_job_learns_beside_decode_with_all_of_its_memory_in_lent_chunks(pod):
    worker = started_on_gpu(pod)
    until(lambda: worker.poll() is not None, pod=pod, within=120)
    assert worker.returncode == Ending.SUCCEEDED, pod.logs()
    assert "rule broken" not in pod.logs()
    last = pod.agent.events[-1]
    assert (last.kind, pod.agent.kinds().count("CHECKPOINTED")) == ("SUCCEEDED", 5)
    assert last.tuned_eval_loss < last.base_eval_loss
    assert pod.agent.progress[-1].memory_bytes > 1 << 20
    # What the adapter lay in until the process ended, decode takes itself.
    assert pod.decode.arena.counts()[2] == pod.decode.arena.reclaim(1) <= 2
    pod.decode.arena.check()
    # Triton's compilers, which a worker starts for the loss, have the shim and lines of their own.
    lines = [json.loads(line) for line in (pod.root / "counts").read_text().splitlines()]
    (counts,) = [line for line in lines if line["pid"] == worker.pid]
    assert counts["most_device_bytes"] == 0, "torch has memory of its own"


@pytest.mark.paired
@pytest.mark.extended
def test_a_job_over_decodes_weights_leaves_every_chunk_and_goes_on_in_others(pod):
    worker = started_on_gpu(pod, maxSteps=100_000)
    until(lambda: step_of(pod) >= 2, pod=pod, worker=worker)
    arena = pod.decode.arena
    arena.revoke(arena.geometry.chunks)
    until(lambda: not (arena.counts()[2] or arena.counts()[4]), pod=pod, worker=worker)
    arena.check()
    at = step_of(pod)
    arena.lend(arena.geometry.chunks - 1, owner=1)
    until(lambda: step_of(pod) > at + 1, pod=pod, worker=worker)
    assert "rule broken" not in pod.logs()


@pytest.mark.paired
@pytest.mark.extended
@pytest.mark.parametrize("pod", [True], indirect=True)
def test_a_client_of_mps_computes_on_the_share_that_is_granted_and_on_the_whole(pod):
    worker = started_on_gpu(pod, maxSteps=100_000)
    pod.decode.go(units=64)
    until(lambda: step_of(pod) >= 1, pod=pod, worker=worker)
    at = step_of(pod)
    pod.decode.go(units=132)
    until(lambda: step_of(pod) > at, pod=pod, worker=worker)
    assert "the GPU is shared in spatial mode" in pod.logs()
    assert "rule broken" not in pod.logs()


@pytest.mark.paired
@pytest.mark.extended
def test_a_worker_that_is_no_client_waits_for_the_whole_beside_a_decode_that_grants_parts(pod):
    worker = pod.start(maxSteps=100_000)
    until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=worker)
    pod.decode.go(units=64)
    lend_what_is_wanted(pod, worker)
    until(lambda: pod.decode.offer.tokens > 0, pod=pod, worker=worker)
    pod.decode.pause()
    epoch = pod.decode.grant.pause_epoch
    until(lambda: pod.decode.offer.pause_epoch_seen == epoch, pod=pod, worker=worker)
    assert pod.decode.offer.tasklet_id == 0, "it has run none on a part"
    pod.decode.go(units=132)
    until(lambda: step_of(pod) >= 1, pod=pod, worker=worker)
    assert "shares the GPU in time only" in pod.logs()
