"""SGLang's own page allocators of several ranks over arenas that lend together, at random.

`python rank_lending_process.py OPERATIONS RESULT.json` under SGLang's environment, with 2 and 4
ranks. They come to what rank 0 did later, each in its own time, as processes do; workers attach,
leave chunks and die.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
SIZE, PAGE = 4096, 16
OWN_GUARD_TURNS = 7  # what a rank sets free is written to for so long, by its own count


class Rank:
    """One rank of decode: its arena, SGLang's allocator over it, and its worker's process."""

    def __init__(self, folder: Path, number: int) -> None:
        import torch
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from windrow_sidecar.engines.rank_chunks import RankChunks
        from windrow_sidecar.engines.sglang.allocator import allocator_class
        from windrow_sidecar.engines.sglang.pool import make_arena, use_arena
        from windrow_sidecar.engines.sglang.rank_lending import LendingRank

        def over_an_arena(pool: Any) -> None:
            self.arena = make_arena(pool, reserved_chunks=0)
            use_arena(pool, self.arena)

        own = MHATokenToKVPool._create_buffers
        MHATokenToKVPool._create_buffers = over_an_arena
        try:
            self.pool = MHATokenToKVPool(
                size=SIZE,
                page_size=PAGE,
                dtype=torch.float32,
                head_num=1,
                head_dim=16,
                layer_num=2,
                device="cpu",
                enable_memory_saver=False,
            )
        finally:
            MHATokenToKVPool._create_buffers = own
        self.turn = 0
        self.chunks = RankChunks(self.arena)
        made = allocator_class(self.arena, self.fence, self.chunks)
        self.allocator = made(SIZE, PAGE, torch.float32, "cpu", self.pool, False)
        self.lending = LendingRank(self.chunks, self.allocator, self.arena.page)
        self.socket = str(folder / f"{number}.sock")
        self.arena.serve(self.socket)
        self.told: deque[tuple[str, bytes]] = deque()
        self.worker: Any = None

    def fence(self) -> Any:
        quiet_at = self.turn + OWN_GUARD_TURNS
        return lambda now_ns: self.turn >= quiet_at

    def attach(self) -> None:
        from windrow_sidecar._core import Arena

        self.worker = Arena.attach(self.socket)

    def die(self) -> None:
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def give_back(self, draw: random.Random, epoch: int) -> None:
        if self.worker is None:
            return
        back, held = self.worker.draining(epoch), self.worker.held(epoch)
        if held and draw.random() < 0.05:
            back.append(draw.choice(held))
        for chunk in back:
            self.worker.give_back(chunk, owner=epoch)

    def do(self, act: str, value: bytes) -> Any:
        import torch

        self.turn += 1
        what = pickle.loads(value)
        found = None
        if act == "moves":
            self.lending.apply(what)
        elif act == "alloc":
            got = self.allocator.alloc(what * PAGE)
            found = None if got is None else got.tolist()
        else:
            self.allocator.free(torch.tensor(what, dtype=torch.int64))
        self.lending.tell(0)
        return found

    def free_pages(self) -> list[int]:
        return self.allocator.get_all_free_pages().tolist()


def play(ranks: int, operations: int) -> dict[str, int]:
    from windrow_sidecar._core import DRAINING, LENT, Inspection
    from windrow_sidecar.engines.sglang.rank_lending import LeadingRank

    folder = Path(tempfile.mkdtemp(prefix="wr-"))
    draw = random.Random(ranks)
    all_ranks = [Rank(folder, n) for n in range(ranks)]
    first, *others = all_ranks
    leading = LeadingRank(first.lending, [Inspection.open(rank.socket) for rank in others])
    group, epoch = leading.group, 1
    held: list[list[int]] = []
    counts = SimpleNamespace(lent=0, back=0, differ=0, refused=0, deaths=0)
    for rank in all_ranks:
        rank.attach()

    def on_all(act: str, what: Any) -> Any:
        value = pickle.dumps(what)
        found = first.do(act, value)
        for rank in others:
            rank.told.append((act, value, found))
        return found

    def follow(rank: Rank, n: int) -> None:
        for _ in range(n):
            act, value, found = rank.told.popleft()
            counts.differ += rank.do(act, value) != found

    for number in range(operations):
        kind = draw.random()
        if kind < 0.3:
            got = on_all("alloc", draw.randint(1, 24))
            counts.refused += got is None
            if got is not None:
                held.append(got)
        elif kind < 0.6 and held:
            on_all("free", held.pop(draw.randrange(len(held))))
        elif kind < 0.7:
            group.lend(draw.randint(1, 6), owner=epoch)
        elif kind < 0.8:
            group.revoke(draw.randint(1, 4))
        elif kind < 0.803:
            for rank in draw.sample(all_ranks, ranks):
                rank.die()
            group.reclaim(epoch)
            epoch, counts.deaths = epoch + 1, counts.deaths + 1
        elif kind < 0.82 and not group.lent:
            for rank in all_ranks:
                rank.die()
                rank.attach()
        else:
            for rank in draw.sample(all_ranks, draw.randint(1, ranks)):
                rank.give_back(draw, epoch)
        moves = leading.moves(0, harvests=True, keep_pages=16, set_free=draw.choice((0, 0, 2)))
        if moves is not None:
            if moves.decision is not None:
                counts.lent += len(moves.decision.lend)
                counts.back += len(moves.decision.hand_back)
            on_all("moves", moves)
        for rank in others:
            follow(rank, draw.randint(0, len(rank.told)))
        if number % 11 == 0:
            for rank in others:
                follow(rank, len(rank.told))
            counts.differ += any(rank.free_pages() != first.free_pages() for rank in others)
            for rank in all_ranks:
                states = rank.arena.states()
                out = {c for c, s in enumerate(states) if s in (LENT, DRAINING)}
                in_use = {page // PAGE for pages in held for page in pages}
                free = {*rank.free_pages()} | in_use
                of_worker = {p for c in out for p in rank.allocator.chunks.pages_of(c)}
                assert not free & of_worker, "a page is decode's and a worker's"
                total = rank.allocator.available_size() + sum(len(pages) for pages in held)
                assert total + rank.allocator.lent_tokens == SIZE
    for rank in all_ranks:
        rank.die()
        rank.arena.check()
    assert not group.off
    return vars(counts)


if __name__ == "__main__":
    operations, result = int(sys.argv[1]), Path(sys.argv[2])
    result.write_text(json.dumps({ranks: play(ranks, operations) for ranks in (2, 4)}))
