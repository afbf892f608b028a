"""What a rank leaves on its arena's page is what rank 0 reads, over real arenas."""

from __future__ import annotations

from windrow.rundir import RunDir
from windrow_sidecar._core import Arena, Geometry
from windrow_sidecar.engines.rank_pages import RankFigures, RankMeter, RankPages, look_at_others

GEOMETRY = Geometry(layers=1, kv_heads=1, head_dim=16, dtype_bytes=4, block_bytes=4096, chunks=6)


def test_rank_0_sees_how_long_each_rank_computed_and_what_its_worker_has(tmp_path):
    arenas = [Arena.create(GEOMETRY, reserved_chunks=0) for _ in range(2)]
    arenas[1].serve(str(RunDir(tmp_path).of_rank(1).arena_socket()))
    pages = RankPages(arenas[0], look_at_others(RunDir(tmp_path), 2))
    now_ns = [0]
    meters = [RankMeter(arena.page, lambda: now_ns[0]) for arena in arenas]
    for rank, ns in ((0, 1_000_000_000), (1, 3_000_000_000)):
        meters[rank].begin()
        now_ns[0] += ns
        meters[rank].end()
        now_ns[0] += 500_000_000  # between passes
        meters[rank].end()  # of none
    arenas[0].lend_chunk(5, owner=1)
    for chunk in (4, 5):
        arenas[1].lend_chunk(chunk, owner=1)
    arenas[1].revoke_chunk(4)
    assert pages.figures() == [RankFigures(1.0, 1), RankFigures(3.0, 2)]
    for arena in arenas:
        arena.close()


def test_passes_that_overlap_are_counted_once():
    arena = Arena.create(GEOMETRY, reserved_chunks=0)
    now_ns = [0]
    meter = RankMeter(arena.page, lambda: now_ns[0])
    meter.begin()
    now_ns[0] = 1_000_000_000
    meter.begin()  # launched before the first one is over
    now_ns[0] = 2_000_000_000
    meter.end()
    now_ns[0] = 3_000_000_000
    meter.end()
    assert RankPages(arena, []).figures() == [RankFigures(3.0, 0)]
    arena.close()
