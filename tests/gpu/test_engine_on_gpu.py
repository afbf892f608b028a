"""Captured steps of the engine on a real GPU, with compiled kernels, against its plain ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windrow_sidecar.testing.models import save_random_llama

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

# A process of its own: in the tests' own, Triton interprets.
CODE = """
import sys
import torch
from pathlib import Path
from windrow_sidecar.engines.builtin import profiling
from windrow_sidecar.engines.builtin.llama.config import read_config
from windrow_sidecar.engines.builtin.device import open_device
from windrow_sidecar.engines.builtin.loading import load, make_arena
from windrow_sidecar.engines.builtin.settings import EngineSettings
from windrow_sidecar.engines.builtin.threads import Threads

def decoded(*flags):
    settings = EngineSettings.from_command_line(
        ["--model-path", sys.argv[1], "--device=cuda", "--arena-bytes=256MiB",
         "--max-running-requests=12", *flags], {})
    config = read_config(settings.model_path)
    device = open_device(settings, Threads(1))
    arena = make_arena(settings, config, device)
    parts = load(settings, config, device, arena, None, 512, "0")
    for i in range(9):
        parts.scheduler.submit(profiling.request(i, 3 + 37 * i, 6 + i))
    requests = list(parts.scheduler.waiting)
    with profiling.muted(parts) as loop:
        while not parts.scheduler.is_empty:
            loop.step()
    captures = getattr(parts.decoder, "captures", None)
    return [r.tokens[-r.n_completed:] for r in requests], captures

plain, none = decoded("--dtype=float32", "--decode-step=gathered")
assert none is None
for backend in ("torch", "triton"):
    captured, captures = decoded("--dtype=float32", f"--attention-backend={backend}")
    assert captured == plain, (backend, captured, plain)
    assert captures.graphs == 5 and captures.n_bytes >= 0, captures  # 1, 2, 4, 8, 16
tokens, _ = decoded()  # bf16, as it is served
assert [len(t) for t in tokens] == [6 + i for i in range(9)]
print("done")
"""


def test_captured_steps_give_the_tokens_of_plain_ones(tmp_path: Path):
    # Heads as large as the kernels' tiles want them; a block of 2 MiB holds 4,096 slots of these.
    save_random_llama(tmp_path, hidden_size=256, num_key_value_heads=2, head_dim=64)
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environ,
    )
    assert done.stdout.strip() == "done", done.stderr


KERNEL = """
import torch
from torch.nn import functional
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.step.triton_attention import TritonPagedAttention
from windrow_sidecar.testing.rounding import no_farther, relative

torch.manual_seed(1)
config = LlamaConfig(vocab=8, hidden=4096, intermediate=8, layers=2, heads=32, kv_heads=8,
    head_dim=128, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, max_positions=8192,
    tied_embeddings=True, eos_token_ids=())
width, columns, slots, chunks = config.kv_width, 4, 256, 64
places = KvPlaces(chunks=chunks, slots_per_chunk=slots, columns=columns, width=width,
    chunk_stride=slots * columns * width, slot_stride=columns * width, column_stride=width)
storage = torch.randn(chunks * slots * columns * width, dtype=torch.bfloat16, device="cuda")
cache = KvCache(storage, config, places, page_size=16, max_tokens=2048)
attend = TritonPagedAttention(config, cache, units=132)
lengths = torch.tensor([1, 17, 64, 65, 1000, 2048], device="cuda")
table = torch.stack([torch.randperm(chunks * slots // 16)[:128] for _ in lengths]).cuda()
q = torch.randn(len(lengths), 32, 128, dtype=torch.bfloat16, device="cuda") * 128**-0.5
found = attend(1, q, lengths, table)
ours, theirs = [], []
for i, length in enumerate(lengths.tolist()):
    at = (table[i][:, None] * 16 + torch.arange(16, device="cuda")).flatten()[:length]
    k, v = (s[1][at].view(length, 8, 128).transpose(0, 1)
        for s in (cache.key_slots, cache.value_slots))
    plain, truth = (functional.scaled_dot_product_attention(
        *(t.to(of) for t in (q[i, :, None], k, v)), scale=1.0, enable_gqa=True).flatten()
        for of in (torch.bfloat16, torch.float64))
    ours.append(relative(found[i], truth))
    theirs.append(relative(plain, truth))
assert no_farther(ours, theirs, torch.bfloat16), (ours, theirs)
print("done")
"""


def test_compiled_attention_in_bf16_equals_torchs_own():
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environ,
    )
    assert done.stdout.strip() == "done", done.stderr
