"""Every call of `torch.cuda` in the worker and the engine answers with our allocator in place."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SIDECAR = Path(__file__).parents[2] / "sidecar" / "windrow_sidecar"

SLOT = """
import sys
import torch
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.colocated.slot_device import slot_device

geometry = Geometry(layers=2, kv_heads=2, head_dim=128, dtype_bytes=4, block_bytes=2 << 20,
                    chunks=8, layout="token-major")
decode = Arena.create(geometry, reserved_chunks=0, driver="cuda")
decode.lend(8, owner=7)
decode.serve(path := sys.argv[1] + "/a.sock")
worker = Arena.attach(path)
slot = slot_device(worker, 7, WholeDevice("finetune", 2), {})
slot.memory.settle()
gpu = slot.device.torch
"""

# How each is called; a new one fails until it is listed here. With one stream and event they are
# what `compute/cuda_device.py` makes of them.
CALLS = {
    "CUDAGraph": "torch.cuda.CUDAGraph()",
    "Event": "torch.cuda.Event(enable_timing=True, blocking=True).record()",
    "ExternalStream": "torch.cuda.ExternalStream(slot.partition._shares.enter('finetune', 1))"
    " if hasattr(slot.partition, '_shares') else torch.cuda.ExternalStream(0)",
    "Stream": "torch.cuda.Stream(gpu)",
    "current_device": "assert_equal(torch.cuda.current_device(), 0)",
    "current_stream": "torch.cuda.current_stream(gpu).synchronize()",
    "device_count": "assert_equal(torch.cuda.device_count(), 1)",
    "empty_cache": "torch.cuda.empty_cache()",
    "get_device_properties": "torch.cuda.get_device_properties(gpu).multi_processor_count",
    "graph": "captured()",
    "graph_pool_handle": "assert_equal(len(torch.cuda.graph_pool_handle()), 2)",
    "is_available": "assert_equal(torch.cuda.is_available(), True)",
    "max_memory_allocated": "slot.device.peak_bytes()",
    "mem_get_info": "torch.cuda.mem_get_info(gpu)",
    "memory.CUDAPluggableAllocator": "torch.cuda.empty_cache()",
    "memory.change_current_allocator": "torch.cuda.empty_cache()",
    "memory_allocated": "slot.device.free_bytes()",
    "memory_reserved": "slot.device.free_bytes()",
    "set_device": "torch.cuda.set_device(gpu)",
    "set_stream": "torch.cuda.set_stream(torch.cuda.Stream(gpu))",
    "stream": "torch.cuda.stream(torch.cuda.Stream(gpu)).__enter__()",
    "synchronize": "torch.cuda.synchronize()",
}
# Answered by torch's own allocator alone: where ours is in place, they raise.
OF_TORCHS_ALLOCATOR = {
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
}


def calls_of(path: Path) -> Iterator[str]:
    """Names below `torch.cuda` that are used in a file; of types, those that are called."""
    tree = ast.parse(path.read_text())
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if isinstance(part, ast.AST)
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in annotations:
            words = ast.unparse(node)
            # Not what results of calls are asked for.
            if re.fullmatch(r"torch\.cuda\.[\w.]+", words) and words != "torch.cuda.memory":
                yield words.removeprefix("torch.cuda.")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"):
            yield from (alias.name for alias in node.names)


def used() -> dict[str, set[Path]]:
    """Return where each is called, outside of what only tests use."""
    found: dict[str, set[Path]] = {}
    for path in SIDECAR.rglob("*.py"):
        if "testing" not in path.parts:
            for name in calls_of(path):
                found.setdefault(name, set()).add(path.relative_to(SIDECAR))
    return found


def test_every_call_of_torch_cuda_is_tried_here():
    assert set(used()) == set(CALLS)


def test_figures_of_torchs_own_allocator_are_asked_for_in_compute_alone():
    outside = {
        name: sorted(map(str, paths))
        for name, paths in used().items()
        if name.removeprefix("memory.") in OF_TORCHS_ALLOCATOR
        and any(path.parts[0] != "compute" for path in paths)
    }
    assert not outside, "ask ComputeDevice.peak_bytes or memory.allocator.memory_stats instead"


def test_each_answers_with_our_allocator_in_place(shim, tmp_path):
    code = """
def assert_equal(found, wanted):
    assert found == wanted, found

def captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(gpu), capture_error_mode="thread_local"):
        pass

"""
    lines = "\n".join(f"{call}\nprint({name!r})" for name, call in CALLS.items())
    assert shim.run(SLOT + code + lines, tmp_path).splitlines() == list(CALLS)


def test_torch_still_refuses_its_own_figures_then(shim, tmp_path):
    """Where it answers one day, `ComputeDevice.peak_bytes` may ask it."""
    code = """
for ask in (torch.cuda.max_memory_allocated, torch.cuda.memory_reserved, torch.cuda.memory_stats):
    try:
        ask()
    except RuntimeError as error:
        print("does not yet support" in str(error))
"""
    assert shim.run(SLOT + code, tmp_path).split() == ["True"] * 3


@pytest.mark.parametrize("kept", ["0", "1"])
def test_cublas_takes_little_of_what_is_lent_and_gives_it_back(shim, tmp_path, kept):
    """torch before 2.15 keeps a workspace for each stream, and a later one where it is told to."""
    counts = tmp_path / "counts"
    code = """
from windrow_sidecar.compute.cuda import CudaPartition
partition = CudaPartition("finetune")
used = slot.memory.budget.used_bytes
for level in partition.levels()[:2]:
    partition.activate(level)
    a = torch.empty(64, 64, device=gpu)
    a @ a
del a
workspaces = used() - 2 * (2 << 20)  # beside the small pool of each stream
decode.revoke(8)
slot.memory.settle()
print(workspaces, decode.counts()[2] + decode.counts()[4])
"""
    # On Hopper torch takes 32 MiB for each handle and stream unasked.
    environ = {"WINDROW_SHIM_COUNTS": str(counts), "WINDROW_SHIM_CAPABILITY": "9"}
    environ["TORCH_CUBLAS_WORKSPACE_CACHE"] = kept
    workspaces, left = map(int, shim.run(SLOT + code, tmp_path, **environ).split())
    assert (workspaces > 0) == (kept == "1")
    assert left == 0
    assert 0 < json.loads(counts.read_text())["workspace_bytes"] <= 9 << 20


def test_pinned_copies_take_no_more_than_their_room(shim, tmp_path):
    """torch pins powers of two, so a piece of 5 MiB takes 8."""
    code = """
from pathlib import Path
from windrow_sidecar.engines.streaming.tensor_files import OpenFiles, Stored
from windrow_sidecar.engines.streaming.copying import StagedPiece, Staging
file = Path(sys.argv[1]) / "weights"
file.write_bytes(bytes(20 << 20))
room = 20 << 20
staging = Staging(slot.device, room, OpenFiles())
for i in range(4):
    stored = Stored(file, i * (5 << 20), 5 << 20, (5 << 20,), torch.uint8)
    staging.bytes_of(StagedPiece(stored, 0, 5 << 20, torch.uint8), 5 << 20)
print(staging.kept_bytes == 2 * (5 << 20))
pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
print(pinned - 2 * (8 << 20) <= room, pinned)  # two buffers beside what is kept
"""
    assert shim.run(SLOT + code, tmp_path).split()[:2] == ["True", "True"]


def test_times_of_events_hang_on_a_stream_of_their_own_and_on_the_best_of_three_looks(shim):
    """A stream that another part is handed too may be busy when the clock is looked at."""
    code = """
import torch
from windrow_sidecar.compute.cuda_device import CudaDevice, _Anchor
clock = CudaDevice()._clock
handed_out = {torch.cuda.Stream().cuda_stream for _ in range(64)}
looks = iter([900, 40, 700])
print(clock._idle.cuda_stream in handed_out)
clock._try = lambda: _Anchor(None, 0, next(looks))
print(clock.anchor().within_ns)
"""
    assert shim.run(code).split() == ["False", "40"]


def test_what_is_not_lent_is_told_as_memory_that_is_missing(shim, tmp_path):
    code = """
from windrow_sidecar.compute.host_device import out_of_memory
try:
    torch.empty(1 << 33, dtype=torch.uint8, device=gpu)
except RuntimeError as error:
    print(out_of_memory(error), "8 chunks" in str(error))
"""
    assert shim.run(SLOT + code, tmp_path).split() == ["True", "True"]


PAGES = """
import triton, triton.language as tl

@triton.jit
def fill(out, first, n: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, n)
    tl.store(out + at, first + tl.cdiv(at, 2))
"""


def test_a_kernel_that_says_which_memory_is_whose_computes(shim, tmp_path):
    (tmp_path / "pages_of.py").write_text(PAGES)
    (tmp_path / "others.py").write_text(PAGES)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import torch, kernels_on_host; "
        "from windrow_sidecar import _core; _core.driver('cuda').facts; "
        "kernels_on_host.interpret('pages_'); import others, pages_of; "
        "out = [torch.zeros(8, dtype=torch.int64, device='cuda') for _ in range(2)]; "
        "others.fill[(2,)](out[0], 5, 4); pages_of.fill[(2,)](out[1], 5, 4); "
        "print([one.tolist() for one in out])"
    )
    said = shim.run(code, tmp_path, computes=True, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert said == str([[0] * 8, [5, 6, 6, 7, 7, 8, 8, 9]])


def test_the_loss_of_numbers_of_16_bits_has_the_gradient_that_floats_have(shim):
    code = (
        "import torch; torch.manual_seed(0); "
        "half = torch.randn(4, 9, device='cuda').half().requires_grad_(); "
        "plain = half.detach().cpu().float().requires_grad_(); goal = torch.arange(4); "
        "of = torch.nn.functional; "
        "pair = [of.nll_loss(of.log_softmax(one, -1, dtype=torch.float32), goal.to(one.device)) "
        "for one in (half, plain)]; [one.backward() for one in pair]; "
        "print(half.grad.dtype, torch.equal(half.grad.cpu(), plain.grad.half()), "
        "torch.equal(pair[0].cpu(), pair[1]))"
    )
    assert shim.run(code, computes=True) == "torch.float16 True True"
