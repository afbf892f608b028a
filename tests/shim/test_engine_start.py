"""The engine on a GPU: how it starts, and that its captured steps give what plain ones do."""

from __future__ import annotations

import json

import pytest

from windrow_sidecar.testing.models import save_random_llama

ENGINE = """
import logging, sys
from dataclasses import replace
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
import torch
from windrow_sidecar.engines.builtin import profiling
from windrow_sidecar.engines.builtin.device import open_device
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.loading import load, make_arena
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.threads import Threads

def loaded(*flags):
    settings = EngineSettings.from_command_line(
        ["--model-path", sys.argv[1], "--device=cuda", "--arena-bytes=256MiB",
         "--max-running-requests=4", *flags], {})
    config = read_config(settings.model_path)
    device = open_device(settings, Threads(1))
    arena = make_arena(settings, config, device)
    return load(settings, config, device, arena, None, 128, "0")

def decoded(*flags):
    parts = loaded(*flags)
    for i in range(3):
        parts.scheduler.submit(profiling.request(i, 3 + 17 * i, 4 + i))
    requests = list(parts.scheduler.waiting)
    with profiling.muted(parts) as loop:
        while not parts.scheduler.is_empty:
            loop.step()
    captures = getattr(parts.decoder, "captures", None)
    return [r.tokens[-r.n_completed:] for r in requests], captures
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    # Heads as large as the kernels' tiles want them.
    save_random_llama(folder, hidden_size=256, num_key_value_heads=2, head_dim=64)
    return folder


def test_captured_steps_give_the_tokens_of_plain_ones(shim, model):
    code = """
plain, none = decoded("--dtype=float32", "--decode-step=gathered")
assert none is None
captured, captures = decoded("--dtype=float32", "--attention-backend=torch")
assert captured == plain, (captured, plain)
print(captures.graphs)
"""
    assert shim.run(ENGINE + code, model, computes=True).splitlines()[-1] == "3"


@pytest.mark.extended
def test_a_step_waits_for_the_device_once_also_where_tokens_are_drawn(shim, model):
    """A wait between the graph and what draws from its logits would show the host's time."""
    code = """
import ctypes
waits = ctypes.CDLL(None).windrow_shim_waits
waits.restype = ctypes.c_longlong
parts = loaded("--dtype=float32", "--attention-backend=torch")
for i in range(3):
    asked = profiling.request(i, 3 + 17 * i, 12)
    parts.scheduler.submit(replace(asked, temperature=0.8, top_p=0.9, seed=7))
counted = []
with profiling.muted(parts) as loop:
    for _ in range(6):
        before = waits()
        loop.step()
        counted.append(waits() - before)
print(counted)
"""
    said = shim.run(ENGINE + code, model, computes=True).splitlines()[-1]
    assert json.loads(said)[2:] == [1] * 4


@pytest.mark.extended
def test_triton_is_tried_at_the_start_and_its_kernels_are_captured(shim, model, tmp_path):
    code = """
import ctypes
parts = loaded()
print(type(parts.decoder._attention).__name__, parts.decoder.captures.graphs)
launches = ctypes.CDLL("libcuda.so.1").windrow_shim_triton_launches
launches.restype = ctypes.c_longlong
print(launches() > 0)
"""
    said = shim.run(ENGINE + code, model, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert said[-2:] == ["TritonPagedAttention 3", "True"]


WAYS_TO_FAIL = {
    "compiler": ({"CC": "no-such-compiler"}, "CC names 'no-such-compiler', which is not a program"),
    "cache": ({"TRITON_CACHE_DIR": "/dev/null/cache"}, "its cache cannot be written"),
}


@pytest.mark.extended
@pytest.mark.parametrize("lacking", WAYS_TO_FAIL)
def test_where_triton_cannot_launch_torchs_attention_serves_and_one_line_says_why(
    shim, model, tmp_path, lacking
):
    environ, why = WAYS_TO_FAIL[lacking]
    code = """
from windrow.errors import UserError
parts = loaded()
print(type(parts.decoder._attention).__name__, parts.decoder.captures.graphs)
try:
    loaded("--attention-backend=triton")
except UserError as error:
    print(error.field, error.reason)
"""
    said = shim.run(
        ENGINE + code, model, **({"TRITON_CACHE_DIR": str(tmp_path)} | environ)
    ).splitlines()
    told = [line for line in said if line.startswith("--attention-backend torch is used")]
    assert len(told) == 1
    assert why in told[0]
    assert "TorchPagedAttention 3" in said
    assert said[-1] == "--attention-backend NoTriton"


@pytest.mark.extended
def test_another_thread_may_take_memory_while_a_step_is_captured(shim):
    """A capture of the mode `global` ends where any thread does."""
    code = """
import threading, torch
from windrow_sidecar.engines.builtin.step.static_step import GraphRunner

def compute(bucket):
    torch.zeros(bucket, device="cuda").add_(1)
    if torch.cuda.is_current_stream_capturing():
        beside = threading.Thread(target=lambda: torch.empty(1 << 20, pin_memory=True))
        beside.start()
        beside.join()

print(GraphRunner(compute).capture([1, 2]).graphs)
"""
    assert shim.run(code) == "2"


@pytest.mark.extended
def test_a_confined_decode_replays_the_graphs_of_the_share_that_was_decided(shim, model, tmp_path):
    """As `WINDROW_DECODE_PARTITION=green` has it: a set of graphs for each of decode's shares."""
    (tmp_path / "control").touch()
    code = """
import os
from windrow_sidecar.engines.confined import GraphShares
plain, _ = decoded("--dtype=float32", "--attention-backend=torch")
os.environ["WINDROW_DECODE_PARTITION"] = "green"
parts = loaded("--dtype=float32", "--attention-backend=torch")
shares = parts.partition
assert isinstance(shares, GraphShares), shares
levels = shares.levels()
graphs = parts.decoder._runner._graphs
assert sorted({units for units, _ in graphs}) == [*levels], graphs
replayed = []
for key, graph in graphs.items():
    class Counted:
        def __init__(self, key, graph):
            self.key, self.graph = key, graph
        def replay(self):
            replayed.append(self.key[0])
            self.graph.replay()
    graphs[key] = Counted(key, graph)
for i in range(3):
    parts.scheduler.submit(profiling.request(i, 3 + 17 * i, 4 + i))
requests = list(parts.scheduler.waiting)
decided = [levels[0], levels[-1], levels[1]]
class Decides(profiling._OnUnits):
    def before_step(self, facts):
        self.units = decided[len(replayed) % 3]
        return super().before_step(facts)
from windrow_sidecar.engines.hook import FailClosed
parts = replace(parts, hook=FailClosed(Decides()))
with profiling.muted(parts) as loop:
    while not parts.scheduler.is_empty:
        loop.step()
assert [r.tokens[-r.n_completed:] for r in requests] == plain
assert replayed == [decided[i % 3] for i in range(len(replayed))], replayed
print(len(levels), len(replayed))
"""
    engine = ENGINE.replace("*flags], {})", "*flags], os.environ)").replace(
        "import logging, sys", "import logging, os, sys"
    )
    mps = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "WINDROW_STANDIN_MPS": "1"}
    said = shim.run(engine + code, model, computes=True, **mps).splitlines()[-1]
    n_levels, steps = map(int, said.split())
    assert n_levels >= 3
    assert steps >= 3
