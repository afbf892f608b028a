"""Layers are captured over the shim: launches, memory in lent chunks, what a capture forbids."""

from __future__ import annotations

import json

from windrow_sidecar.compute.captures import NODE_BYTES
from windrow_sidecar.finetune.adapter.layer_graphs import NODES_OF_LAYER

CODE = """
import ctypes, json, logging, sys, threading
import torch
from transformers import masking_utils
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.compute.whole_device import WholeDevice
from windrow_sidecar.finetune.adapter import fused_layer
from windrow_sidecar.finetune.adapter.adapters import ADAPTER
from windrow_sidecar.finetune.adapter.layer_programs import use_graphs, use_program
from windrow_sidecar.finetune.colocated.slot_device import slot_device
from windrow_sidecar.finetune.model.boundaries import Replayed, TorchBoundaries
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.testing.equality import small_spec, tuned_model
from windrow_sidecar.testing.architectures import random_model

shim = ctypes.CDLL(None)
for name in ("captures", "graph_launches", "kernels"):
    getattr(shim, f"windrow_shim_{name}").restype = ctypes.c_longlong
geometry = Geometry(layers=2, kv_heads=2, head_dim=128, dtype_bytes=4, block_bytes=2 << 20,
                    chunks=64, layout="token-major")
decode = Arena.create(geometry, reserved_chunks=0, driver="cuda")
decode.lend(64, owner=7)
decode.serve(path := sys.argv[1] + "/a.sock")
slot = slot_device(Arena.attach(path), 7, WholeDevice("finetune", 2), {})
budget = slot.memory.budget
slot.memory.settle()
slot.partition.activate(slot.partition.levels()[-1])
fused_layer.why_not = lambda _: "torch's operators are captured sooner"
torch.allclose = lambda *_, **__: True  # kernels compute nothing
torch.equal = lambda *_: True
masking_utils.find_packed_sequence_indices = lambda _: None

tuned = tuned_model(random_model("Llama"), small_spec()).to(slot.device.torch)
stack = DecoderStack(tuned.get_base_model())
assert use_program(stack, "packed", adapter=ADAPTER, repacks=True) == ""
why = use_graphs(stack, slot.device.captures(), mark=slot.device.mark)
ids, store, n = torch.arange(3, 11, device=slot.device.torch)[None], TorchBoundaries(), stack.depth

def counted():
    return {n: getattr(shim, f"windrow_shim_{n}")() for n in ("captures", "graph_launches")}

def once():
    begun = counted()
    at = stack.begin(ids)
    for layer in range(n):
        stack.forward(at, layer, at.whole, store, learn=True)
    by_graphs = isinstance(at.graphs[0][0], Replayed)
    at.gradient = torch.ones_like(at.inputs[-1])
    for layer in reversed(range(n)):
        if not stack.backward_by_graphs(at, layer, at.whole):
            stack.backward(at, layer, at.whole)
    found = {name: now - begun[name] for name, now in counted().items()}
    grads = sum(p.grad is not None for p in tuned.parameters())
    tuned.zero_grad()
    return {**found, "by_graphs": by_graphs, "gradients": grads}
"""


LENT = """
found = {"why": why, "layers": n, "runs": [once() for _ in range(4)]}
graphs = stack.graphs
found |= {"graphs": graphs.captured, "backed": graphs.backed_bytes}

# In the middle of a group, chunks leave that hold what layers can compute again.
at = stack.begin(ids)
for layer in range(n):
    stack.forward(at, layer, at.whole, store, learn=True)
at.forget_graphs()
assert graphs.leave([at])
found["left"] = graphs.backed_bytes
at.gradient = torch.ones_like(at.inputs[-1])
for layer in reversed(range(n)):
    assert not stack.backward_by_graphs(at, layer, at.whole)
    stack.backward(at, layer, at.whole)
tuned.zero_grad()
del at
budget.wait_freed()
decode.revoke(40)
slot.memory.settle()
found |= {"revoked": 64 - budget.chunks, "again": once(), "backed_again": graphs.backed_bytes}

# Another thread, as one that copies a checkpoint, takes memory while another shape is captured.
over, taken = threading.Event(), []
def take():
    while True:  # once at least
        taken.append(torch.empty(3 << 20, dtype=torch.uint8, device=slot.device.torch).numel())
        if over.is_set():
            return
thread = threading.Thread(target=take)
thread.start()
ids = ids[:, :6]
found["beside"] = [once() for _ in range(3)]
over.set()
thread.join()
decode.check()
print(json.dumps(found | {"taken": len(taken), "refused": graphs.refused}))
"""


def test_layers_are_captured_once_in_lent_memory_that_comes_and_goes(shim, tmp_path):
    found = json.loads(shim.run(CODE + LENT, tmp_path).splitlines()[-1])
    layers, (first, second, third, fourth) = found["layers"], found["runs"]
    assert (found["why"], found["refused"]) == ("", "")
    assert not first["by_graphs"], "the first of a shape runs packed"
    assert second["by_graphs"]
    assert found["graphs"] == 4 * layers
    for run in (third, fourth):
        assert run == {**run, "captures": 0, "graph_launches": 4 * layers, "by_graphs": True}
    assert first["gradients"] == fourth["gradients"] > 0
    assert found["left"] == 0 < found["backed"]
    assert found["revoked"] == 40
    assert found["again"]["by_graphs"]
    assert found["again"]["captures"] == 0, "other memory is behind the same addresses"
    assert found["backed_again"] > 0
    assert found["taken"] > 0
    assert found["beside"][1]["captures"] >= 4 * layers
    assert found["beside"][2] == {**found["beside"][2], "captures": 0, "by_graphs": True}


def test_layers_are_captured_in_torchs_own_memory_too(shim):
    own = """
from windrow_sidecar.compute.captures import taken_for_graphs
from windrow_sidecar.compute.cuda_device import CudaDevice
class slot:
    device = CudaDevice()
"""
    begin = CODE.partition("geometry = ")[0] + own + CODE[CODE.index("fused_layer.why_not") :]
    code = """
graphs, peak = stack.graphs, slot.device.peak_bytes()
expected = graphs.expected_bytes
runs = [once() for _ in range(3)]
found = {"refused": graphs.refused, "runs": runs, "layers": n, "expected": expected}
found |= {"driver": graphs.driver_bytes, "of_worker": taken_for_graphs()}
found |= {"held": slot.device.peak_bytes() - peak}
graphs.drop()
print(json.dumps({**found, "dropped": graphs.driver_bytes}))
"""
    of_graph = 3 << 20
    taking = {"WINDROW_SHIM_GRAPH_BYTES": str(of_graph)}
    found = json.loads(shim.run(begin + code, **taking).splitlines()[-1])
    assert found["refused"] == ""
    assert found["driver"] == found["of_worker"] == 4 * found["layers"] * of_graph
    assert found["held"] >= found["driver"], "it counts with the worker's peak"
    assert found["dropped"] == 0
    assert found["expected"] == found["layers"] * NODES_OF_LAYER * NODE_BYTES
    assert found["runs"][-1]["graph_launches"] == 4 * found["layers"]
