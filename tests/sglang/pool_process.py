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
SIZE, PAGE, LAYERS = 960, 16, 3
HEADS = {"head_num": 2, "head_dim": 16}
LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
INDEX = {"index_head_dim": 128, "index_buf_size": SIZE, "kv_cache_dim": 32}


def kind_of(kind: str, dtype: Any) -> tuple[type[Any], dict[str, Any]]:
    """(SGLang's class of pool, its arguments)."""
    from sglang.srt.mem_cache import memory_pool

    stock, shape = {
        "heads": (memory_pool.MHATokenToKVPool, HEADS),
        "latent": (memory_pool.MLATokenToKVPool, LATENT),
        # Its index is one of pages of 64 tokens.
        "latent with an index": (memory_pool.DSATokenToKVPool, LATENT | INDEX | {"page_size": 64}),
    }[kind]
    return stock, {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": dtype,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
        **shape,
    }


def pools(kind: str, dtype: Any) -> tuple[Any, Any, Any]:
    """(the pool over an arena, the stock pool, the arena)."""
    from windrow_sidecar.engines.sglang.pool import make_arena, use_arena

    stock, options = kind_of(kind, dtype)
    arenas = []

    def over_an_arena(pool: Any) -> None:
        arenas.append(make_arena(pool))
        use_arena(pool, arenas[0])

    plain, own = stock(**options), stock._create_buffers
    owner = next(cls for cls in stock.__mro__ if "_create_buffers" in vars(cls))
    owner._create_buffers = over_an_arena
    try:
        return stock(**options), plain, arenas[0]
    finally:
        owner._create_buffers = own


def play(kind: str, dtype: Any) -> dict[str, Any]:
    import torch

    from windrow_sidecar.engines.sglang.pool import buffers_of

    ours, stock, arena = pools(kind, dtype)
    draw = torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        at = torch.randperm(SIZE, generator=draw)[:40] + ours.page_size
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
        "whole_pages": g.slots_per_chunk % ours.page_size == 0,
        "tokens": g.chunks * g.slots_per_chunk >= SIZE + ours.page_size,
    }


def hybrid(**options: Any) -> Any:
    """A pool as SGLang has it for a model of which two layers in five attend."""
    import torch
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    return HybridLinearKVPool(
        size=SIZE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        full_attention_layer_ids=[1, 4],
        device="cpu",
        mamba_pool=None,
        **options,
    )


def lend(of: str) -> dict[str, Any]:
    """Lend of a target's pool while another one lies under the same page numbers."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from windrow.rundir import RunDir
    from windrow_sidecar._core import Arena
    from windrow_sidecar.engines.sglang.plugin import Plugin
    from windrow_sidecar.engines.sglang.pool import buffers_of, bytes_beside, pool_of_tokens

    ours = Plugin(RunDir(Path(sys.argv[1]).parent), {})
    stock = {cls: cls._create_buffers for cls in (MHATokenToKVPool, MLATokenToKVPool)}
    for cls, own in stock.items():
        cls._create_buffers = lambda pool, own=own: ours.create_buffers(own, pool)
    draft = None
    try:
        if of == "hybrid":
            target = hybrid(**HEADS)
        elif of == "hybrid, latent":
            target = hybrid(head_num=1, head_dim=32, use_mla=True, **LATENT)
        else:
            kind = "heads" if of == "EAGLE" else of.removesuffix(", MTP")
            cls, options = kind_of(kind, torch.bfloat16)
            target = cls(**options)
            if of == "EAGLE" or of.endswith("MTP"):  # a draft's heads are its own
                other = {"head_num": 1} if of == "EAGLE" else {}
                draft = cls(**options | other | {"layer_num": 1})
    finally:
        for cls, own in stock.items():
            cls._create_buffers = own
    page = target.page_size
    allocator = ours.paged_allocator(None)(
        SIZE, page_size=page, dtype=torch.bfloat16, device="cpu", kvcache=target, need_sort=True
    )
    arena, mine = ours.arena, buffers_of(pool_of_tokens(target))
    socket = str(Path(sys.argv[1]).with_name(f"{LENT.index(of)}.sock"))
    arena.serve(socket)
    worker = Arena.attach(socket)
    theirs = buffers_of(draft) if draft is not None else []
    theirs += [*getattr(target, "index_k_with_scale_buffer", ())]
    for buffer in (*mine, *theirs):
        buffer.fill_(7)
    before = [buffer.clone() for buffer in theirs]

    def all_pages() -> list[int]:
        """Every page that the allocator hands out; they are freed again."""
        taken = []
        while (slots := allocator.alloc(page)) is not None:
            taken.append(slots)
        left = allocator.available_size()
        assert left == 0, f"{left} tokens are free but cannot be allocated"
        allocator.free(torch.cat(taken))
        return sorted(int(slots[0]) // page for slots in taken)

    everything = all_pages()
    allocator.set_free(2, keep_pages=0)  # one of them is decode's reserve
    allocator.settle(1 << 62)
    (chunk,) = arena.lend(1, owner=7)
    allocator.chunks.refresh()
    torch.from_dlpack(worker.tensor(worker.chunk_offset(chunk), arena.geometry.chunk_bytes)).fill_(
        0xFF
    )
    lent = set(allocator.chunks.pages_of(chunk))
    between = all_pages()
    arena.revoke(1)
    for drained in worker.draining(7):
        worker.give_back(drained, owner=7)
    allocator.chunks.refresh()
    slots = arena.geometry.slots_per_chunk
    rows = slice(chunk * slots, (chunk + 1) * slots)
    afterwards = all_pages()
    return {
        "lent": len(lent),
        "none of the lent is handed out": between == sorted(set(everything) - lent),
        "all come back": afterwards == everything == [*range(1, SIZE // page + 1)],
        "zeroed": not any(buffer[rows].any() for buffer in mine),
        "others keep theirs": all(map(torch.equal, theirs, before)),
        "others reach every page": all(len(b) * b[0].numel() >= SIZE for b in theirs),
        "layers": len(mine),
        "beside": [len(theirs), ours.draft_bytes + bytes_beside(target)],
    }


LENT = (
    *("EAGLE", "heads, MTP", "latent, MTP", "latent with an index"),
    *("hybrid", "hybrid, latent"),
)


def main() -> None:
    import torch

    found = {
        f"{kind}, {name}": play(kind, dtype)
        for kind in ("heads", "latent", "latent with an index")
        for name, dtype in (
            ("bf16", torch.bfloat16),
            ("fp8_e4m3", torch.float8_e4m3fn),
            ("fp8_e5m2", torch.float8_e5m2),
        )
        if kind != "latent with an index" or name == "bf16"
    }
    found["lent"] = {of: lend(of) for of in LENT}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
