"""Attention over a page table, in both forms, against attention over what the pages hold."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from windrow_sidecar.engines.builtin.kv.kvcache import KvCache
from windrow_sidecar.engines.builtin.kv.kvplaces import KvPlaces
from windrow_sidecar.engines.builtin.llama.config import LlamaConfig
from windrow_sidecar.engines.builtin.step.paged_attention import PagedAttention, TorchPagedAttention
from windrow_sidecar.testing.rounding import no_farther, relative

PAGE, CHUNKS, SLOTS = 8, 12, 32
# One token; a page and its end; a block of the kernel, one less, one more; as many as there are.
LENGTHS = [1, 7, 8, 9, 63, 64, 65, 130]


def config_of(heads: int, kv_heads: int, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab=8,
        hidden=heads * head_dim,
        intermediate=8,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_positions=256,
        tied_embeddings=True,
        eos_token_ids=(),
    )


def cache_of(config: LlamaConfig, dtype: torch.dtype) -> KvCache:
    """Token-major, so that slots are far apart; NaN everywhere."""
    width, columns = config.kv_width, 2 * config.layers
    places = KvPlaces(
        chunks=CHUNKS,
        slots_per_chunk=SLOTS,
        columns=columns,
        width=width,
        chunk_stride=SLOTS * columns * width,
        slot_stride=columns * width,
        column_stride=width,
    )
    storage = torch.full((CHUNKS * SLOTS * columns * width,), float("nan"), dtype=dtype)
    return KvCache(storage, config, places, page_size=PAGE, max_tokens=160)


def torch_form(config: LlamaConfig, cache: KvCache) -> PagedAttention:
    return TorchPagedAttention(config, cache, fixed=False)


def triton_form(config: LlamaConfig, cache: KvCache) -> PagedAttention:
    from windrow_sidecar.engines.builtin.step.triton_attention import TritonPagedAttention

    return TritonPagedAttention(config, cache, units=8)


@pytest.fixture(params=[torch_form, triton_form])
def form(request):
    if request.param is triton_form:
        pytest.importorskip("triton")  # interpreted: see conftest.py
    return request.param


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(8, 2, 16), (4, 4, 32), (6, 2, 24)], ids=str
)
# Half precision as numpy knows it: Triton's interpreter multiplies no bf16 matrices.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_only_the_tokens_of_a_request_are_attended_to(form, heads, kv_heads, head_dim, dtype):
    ours, theirs = [], []
    for seed in (1, 2):  # over several the luck of rounding evens out
        torch.manual_seed(seed)
        found, plain, truth = attended(form, config_of(heads, kv_heads, head_dim), dtype)
        ours += map(relative, found, truth)
        theirs += map(relative, plain, truth)
    assert no_farther(ours, theirs, dtype)


def attended(form, config, dtype):
    """Over random pages, of each request: what is found, and by torch in `dtype` and in float64."""
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim
    cache = cache_of(config, dtype)
    attend = form(config, cache)
    columns = attend.columns(cache.pages_for(max(LENGTHS)))
    every_row = torch.randperm(CHUNKS * SLOTS // PAGE)
    q = torch.randn(len(LENGTHS), heads, head_dim, dtype=dtype) * head_dim**-0.5
    table = torch.zeros(len(LENGTHS), columns, dtype=torch.int64)
    plain, truth = [], []
    taken = 0
    for request, length in enumerate(LENGTHS):
        pages = cache.pages_for(length)
        rows = every_row[taken : taken + pages]
        taken += pages
        table[request, :pages] = rows
        slots = (rows[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        keys = torch.randn(length, kv_heads, head_dim, dtype=dtype)
        values = torch.randn(length, kv_heads, head_dim, dtype=dtype)
        cache.key_slots[1][slots] = keys.flatten(1)
        cache.value_slots[1][slots] = values.flatten(1)
        inputs = q[request, :, None], keys.transpose(0, 1), values.transpose(0, 1)
        for into, of in ((plain, dtype), (truth, torch.float64)):
            wanted = functional.scaled_dot_product_attention(
                *(tensor.to(of) for tensor in inputs), scale=1.0, enable_gqa=True
            )
            into.append(wanted.flatten())
    found = attend(1, q, torch.tensor(LENGTHS), table)
    assert found.dtype == dtype
    return found, plain, truth
