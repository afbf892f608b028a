"""SGLang's KV pools over an arena and over their own memory, written and read by SGLang's methods.

`python pool_process.py RESULT.json` under SGLang's own environment; no server is started.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def plugged(plugin: Any) -> Iterator[None]:
    """Hook what makes pools and allocators, as the plugin does where it runs."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.platforms import current_platform

    stock = {cls: cls._create_buffers for cls in (MHATokenToKVPool, MLATokenToKVPool)}
    platform = type(current_platform)
    allocators = platform.get_paged_allocator_cls
    for cls, own in stock.items():
        cls._create_buffers = lambda pool, own=own: plugin.create_buffers(own, pool)
    platform.get_paged_allocator_cls = lambda self: plugin.paged_allocator(allocators(self))
    try:
        yield
    finally:
        platform.get_paged_allocator_cls = allocators
        for cls, own in stock.items():
            cls._create_buffers = own


def lend(of: str) -> dict[str, Any]:
    """Lend of a target's pool while another one lies under the same page numbers."""
    import torch

    from windrow.rundir import RunDir
    from windrow_sidecar._core import Arena
    from windrow_sidecar.engines.sglang.plugin import Plugin
    from windrow_sidecar.engines.sglang.pool import buffers_of, bytes_beside, pool_of_tokens

    ours = Plugin(RunDir(Path(sys.argv[1]).parent), {})
    draft = None
    with plugged(ours):
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
        "beside": [len(theirs), ours.unlent_bytes + bytes_beside(target)],
    }


class Windows:
    """Pool and allocator as SGLang has them for a model in which layers 1 and 4 see all tokens."""

    FULL, WINDOWED = (1, 4), (0, 2, 3)
    SIZE_OF_WINDOWS, SPAN = 320, 24

    def __init__(self) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        options = {"dtype": torch.bfloat16, "page_size": PAGE, "device": "cpu"}
        self.pool = SWAKVPool(
            size=SIZE,
            size_swa=self.SIZE_OF_WINDOWS,
            full_attention_layer_ids=[*self.FULL],
            swa_attention_layer_ids=[*self.WINDOWED],
            enable_memory_saver=False,
            **HEADS,
            **options,
        )
        self.allocator = SWATokenToKVPoolAllocator(
            SIZE, self.SIZE_OF_WINDOWS, kvcache=self.pool, need_sort=True, **options
        )
        self.slots: dict[int, Any] = {}  # of each request's tokens, in the whole context's pool
        self.passed: dict[int, int] = {}  # tokens of a request that no window sees any more

    def begin(self, request: int, kv: Any) -> None:
        import torch

        n = len(kv[0])
        lengths, none = torch.tensor([n]), torch.tensor([0])
        self.slots[request] = self.allocator.alloc_extend(
            none, none, lengths, lengths, torch.tensor([-1]), n
        )
        self.passed[request] = 0
        self._write(self.slots[request], kv)

    def step(self, kv: Any) -> None:
        """Add a token to every request."""
        import torch

        lengths = torch.tensor([len(slots) + 1 for slots in self.slots.values()])
        last = torch.stack([slots[-1] for slots in self.slots.values()])
        found = self.allocator.alloc_decode(lengths, lengths, last)
        self._write(found, kv)
        for request, slot in zip(self.slots, found, strict=True):
            self.slots[request] = torch.cat([self.slots[request], slot[None]])

    def slide(self) -> None:
        """Free what windows have passed, as SGLang does while a request runs."""
        for request, slots in self.slots.items():
            at, until = self.passed[request], (len(slots) - self.SPAN) // PAGE * PAGE
            if until > at:
                self.allocator.free_swa_segment(slots[at:until], start_pos=at)
                self.passed[request] = until

    def end(self, request: int) -> None:
        slots, at = self.slots.pop(request), self.passed.pop(request)
        self.allocator.free_full_segment(slots[:at], start_pos=0)
        self.allocator.free_segment(slots[at:], start_pos=at)

    def read(self, request: int) -> list[Any]:
        """KV of a request, layer by layer: of windows what they still see."""
        slots, at = self.slots[request], self.passed[request]
        inside = self.pool.translate_loc_from_full_to_swa(slots[at:])
        places = {**dict.fromkeys(self.FULL, slots), **dict.fromkeys(self.WINDOWED, inside)}
        return [
            buffer[place]
            for layer, place in places.items()
            for buffer in self.pool.get_kv_buffer(layer)
        ]

    def _write(self, slots: Any, kv: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        at = KVWriteLoc(slots, self.pool.translate_loc_from_full_to_swa(slots))
        for layer in (*self.FULL, *self.WINDOWED):
            k, v = (part + layer for part in kv)
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer), at, k, v)


def windows(seed: int) -> dict[str, Any]:
    """Play requests at random on ours and on stock pools, while pages of ours are lent."""
    import torch

    from windrow.rundir import RunDir
    from windrow_sidecar._core import DRAINING, Arena
    from windrow_sidecar._core import LENT as LENT_STATE
    from windrow_sidecar.engines.sglang.lookups import allocator_of_tokens, lent_tokens
    from windrow_sidecar.engines.sglang.plugin import Plugin

    plugin = Plugin(RunDir(Path(sys.argv[1]).parent), {})
    with plugged(plugin):
        ours = Windows()
    stock, arena = Windows(), plugin.arena
    socket = str(Path(sys.argv[1]).with_name("windows.sock"))
    arena.serve(socket)
    worker = Arena.attach(socket)
    chance, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    lending = allocator_of_tokens(ours.allocator)
    seen = {"lent": 0, "asked back": 0, "most requests": 0}
    wrong: list[str] = []

    def lend_some() -> None:
        lending.set_free(chance.randrange(1, 3), keep_pages=4)
        lending.settle(1 << 62)
        for chunk in arena.lend(2, owner=7):
            at, n = worker.chunk_offset(chunk), arena.geometry.chunk_bytes
            torch.from_dlpack(worker.tensor(at, n)).fill_(0xFF)  # NaN in bfloat16
            seen["lent"] += 1
        lending.chunks.refresh()

    def ask_back() -> None:
        arena.revoke(arena.geometry.chunks)
        for chunk in worker.draining(7):
            worker.give_back(chunk, owner=7)
            seen["asked back"] += 1
        lending.chunks.refresh()

    def kv_of(n: int) -> tuple[Any, ...]:
        shape = (n, HEADS["head_num"], HEADS["head_dim"])
        return tuple(torch.randn(shape, generator=draw).to(torch.bfloat16) for _ in range(2))

    def both(call: str, tokens: int, *args: Any) -> None:
        """Do it on both where there is room, as SGLang asks before; ours may have lent it."""
        if stock.allocator.available_size() < tokens:
            return
        if ours.allocator.available_size() < tokens:
            ask_back()
        for one in (stock, ours):
            getattr(one, call)(*args)

    def check() -> None:
        held = {page for slots in ours.slots.values() for page in (slots // PAGE).tolist()}
        lent = {
            page
            for chunk, state in enumerate(arena.states())
            if state in (LENT_STATE, DRAINING)
            for page in lending.chunks.pages_of(chunk)
        }
        if held & lent:
            wrong.append("a lent page is a request's")
        free = lending.available_size() + lent_tokens(ours.allocator)
        if free != stock.allocator.full_available_size():
            wrong.append(f"{free} tokens are free or lent")
        if ours.allocator.swa_available_size() != stock.allocator.swa_available_size():
            wrong.append("windows have other pages free")
        if ours.slots:
            request = chance.choice([*ours.slots])
            pairs = zip(ours.read(request), stock.read(request), strict=True)
            if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
                wrong.append("a request reads other KV")

    for n in range(300):
        what = chance.random()
        if what < 0.15 and len(stock.slots) < 6:
            length = chance.randrange(1, 90)
            both("begin", length + PAGE, n, kv_of(length))
        elif what < 0.6 and stock.slots:
            both("step", len(stock.slots) * PAGE, kv_of(len(stock.slots)))
        elif what < 0.7 and stock.slots:
            both("end", 0, chance.choice([*stock.slots]))
        elif what < 0.9:
            lend_some()
        elif what < 0.95:
            ask_back()
        ours.slide()
        stock.slide()
        seen["most requests"] = max(seen["most requests"], len(stock.slots))
        check()
    for request in [*stock.slots]:
        both("end", 0, request)
    check()
    ask_back()
    check()
    infos = [pool.get_contiguous_buf_infos() for pool in (ours.pool, stock.pool)]
    states = [pool.get_state_buf_infos() for pool in (ours.pool, stock.pool)]
    full, window = ours.pool.full_kv_pool, ours.pool.swa_kv_pool
    g = arena.geometry
    return {
        "wrong": wrong[:5],
        **seen,
        "infos": [list(map(list, i[1:])) == list(map(list, j[1:])) for i, j in (infos, states)],
        "sent from": [
            {*infos[0][0]} == {b.data_ptr() for b in (*full.k_buffer, *full.v_buffer)},
            {*states[0][0]} == {b.data_ptr() for b in (*window.k_buffer, *window.v_buffer)},
        ],
        "layers": g.layers,
        "unlent": plugin.unlent_bytes,
        "cleared": [ours.allocator.clear(), ours.allocator.full_available_size()][1],
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
    found["windows"] = windows(seed=4)
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
