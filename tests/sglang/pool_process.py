"""SGLang's KV pools over an arena and over their own memory, written and read by SGLang's methods.

`python pool_process.py RESULT.json` under SGLang's own environment; no server is started.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
SIZE, PAGE, LAYERS = 512, 16, 3


def pools(kind: str, dtype: Any) -> tuple[Any, Any, Any]:
    """(the pool over an arena, the stock pool, the arena)."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from windrow_sidecar.engines.sglang.pool import make_arena, use_arena

    stock = MHATokenToKVPool if kind == "heads" else MLATokenToKVPool
    shape = (
        {"head_num": 2, "head_dim": 16}
        if kind == "heads"
        else {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
    )
    options = {
        **shape,
        "size": SIZE,
        "page_size": PAGE,
        "dtype": dtype,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    arenas = []

    def over_an_arena(pool: Any) -> None:
        arenas.append(make_arena(pool))
        use_arena(pool, arenas[0])

    plain, own = stock(**options), stock._create_buffers
    stock._create_buffers = over_an_arena
    try:
        return stock(**options), plain, arenas[0]
    finally:
        stock._create_buffers = own


def play(kind: str, dtype: Any) -> dict[str, Any]:
    import torch

    from windrow_sidecar.engines.sglang.pool import buffers_of

    ours, stock, arena = pools(kind, dtype)
    draw = torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        at = torch.randperm(SIZE, generator=draw)[:40] + PAGE
        shape = (40, 2, 16) if kind == "heads" else (40, 1, 32)
        k, v = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
        for pool in (ours, stock):
            written = buffers_of(pool)
            if kind == "heads":
                pool.set_kv_buffer(SimpleNamespace(layer_id=layer), at, k.clone(), v.clone())
            else:  # on cores its own writer needs a parallel group
                written[layer][at] = k.view(pool.store_dtype)
    same = all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        for layer in range(LAYERS)
        for mine, theirs in zip(
            [t.contiguous() for t in ours.get_kv_buffer(layer)],
            [t.contiguous() for t in stock.get_kv_buffer(layer)],
            strict=True,
        )
    )
    places, lengths, items = ours.get_contiguous_buf_infos()
    _, *theirs = stock.get_contiguous_buf_infos()
    inside = all(
        buffer.is_contiguous() and buffer.data_ptr() in places for buffer in buffers_of(ours)
    )
    g = arena.geometry
    return {
        "same": same,
        "inside": inside,
        "infos": [lengths, items] == theirs,
        "dtype_bytes": g.dtype_bytes,
        "token_bytes": g.chunk_bytes // g.slots_per_chunk,
        "whole_pages": g.slots_per_chunk % PAGE == 0,
        "tokens": g.chunks * g.slots_per_chunk >= SIZE + PAGE,
    }


def main() -> None:
    import torch

    found = {
        f"{kind}, {name}": play(kind, dtype)
        for kind in ("heads", "latent")
        for name, dtype in (
            ("bf16", torch.bfloat16),
            ("fp8_e4m3", torch.float8_e4m3fn),
            ("fp8_e5m2", torch.float8_e5m2),
        )
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
