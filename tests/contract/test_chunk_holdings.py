"""Check which chunks SGLang's allocator holds, over a real arena."""

from __future__ import annotations

import random

import pytest

from windrow_sidecar._core import Arena, Geometry, plan_lending
from windrow_sidecar.engines.chunks import ChunkHoldings

CHUNKS, PAGES, OWNER = 8, 4, 3
N_PAGES = CHUNKS * PAGES - 3  # ids 1 to 29: the last chunk is not whole


def geometry_of(chunks: int) -> Geometry:
    return Geometry(
        layers=1,
        kv_heads=1,
        head_dim=32,
        dtype_bytes=4,
        block_bytes=8192,
        chunks=chunks,
        layout="token-major",
    )


@pytest.fixture
def arena():
    made = Arena.create(geometry_of(CHUNKS), reserved_chunks=1)
    yield made
    made.check()
    made.close()


@pytest.fixture
def holdings(arena):
    return ChunkHoldings(arena, pages_per_chunk=PAGES, n_pages=N_PAGES)


def test_at_first_every_page_is_held_but_the_padding(arena, holdings):
    pages = [page for chunk in holdings.held() for page in holdings.pages_of(chunk)]
    assert pages == list(range(1, N_PAGES + 1))
    assert holdings.take() is None
    assert (holdings.returned_pages, holdings.lent_pages) == (0, 0)


def test_empty_chunks_go_from_the_highest_id_and_never_the_first(holdings):
    free = [len(holdings.pages_of(chunk)) for chunk in range(CHUNKS)]
    assert holdings.emptiest(free, at_most=3, keep_pages=0) == [7, 6, 5]
    assert 0 not in holdings.emptiest(free, at_most=CHUNKS, keep_pages=0)
    free[6] -= 1  # one of its pages holds KV
    assert holdings.emptiest(free, at_most=2, keep_pages=0) == [7, 5]
    assert holdings.emptiest(free, at_most=8, keep_pages=sum(free)) == []
    assert holdings.emptiest(free, at_most=8, keep_pages=sum(free) - 3) == [7]


@pytest.mark.parametrize("chunks", [2, 3, 4, 5, 8])
def test_as_many_can_be_lent_as_lending_ever_lends(chunks):
    geometry = geometry_of(chunks)
    arena = Arena.create(geometry, reserved_chunks=1)
    holdings = ChunkHoldings(arena, pages_per_chunk=PAGES, n_pages=chunks * PAGES - 1)
    free = [len(holdings.pages_of(chunk)) for chunk in range(chunks)]
    for chunk in holdings.emptiest(free, at_most=chunks, keep_pages=PAGES):
        holdings.give(chunk)
    lent = 0
    needs = {"wanted": chunks, "limit": chunks, "reserve": 1, "kv_short": False}
    while (lend := plan_lending(arena.counts(), **needs, since_revoke_ns=10**18)[1]) > 0:
        lent += len(arena.lend(lend, owner=OWNER))
    arena.close()
    assert lent == max(0, chunks - 4)
    again = Arena.create(geometry, reserved_chunks=1)
    held = ChunkHoldings(again, pages_per_chunk=PAGES, n_pages=chunks * PAGES - 1)
    assert held.most_lendable() == lent
    again.close()


def test_what_is_lent_is_not_available_and_what_came_back_is_at_the_next_look(arena, holdings):
    for chunk in (6, 5, 4):
        holdings.give(chunk)
    assert holdings.returned_pages == 3 * PAGES
    (lent,) = arena.lend(1, owner=OWNER)
    holdings.refresh()
    assert (holdings.returned_pages, holdings.lent_pages) == (2 * PAGES, PAGES)
    arena.reclaim(OWNER)
    assert holdings.lent_pages == PAGES  # nobody has looked
    holdings.refresh()
    assert (holdings.returned_pages, holdings.lent_pages) == (3 * PAGES, 0)
    taken = {holdings.take() for _ in range(3)}
    assert taken == {4, 5, 6}
    assert [chunk for chunk in taken if holdings.was_lent(chunk)] == [lent]
    assert not holdings.was_lent(lent)


@pytest.mark.parametrize("seed", range(5))
def test_pages_add_up_after_every_turn_of_a_random_life(arena, holdings, seed):
    chance = random.Random(seed)
    whole = set(range(1, CHUNKS))  # chunks without KV: all that are held, here
    for _ in range(400):
        turn = chance.randrange(5)
        if turn == 0 and (own := [c for c in holdings.held() if c in whole]):
            holdings.give(chance.choice(own))
        elif turn == 1:
            holdings.take()
        elif turn == 2:
            arena.lend(chance.randrange(1, 4), owner=OWNER)
            holdings.refresh()
        elif turn == 3:
            arena.reclaim(OWNER)
        else:
            holdings.refresh()
        held = sum(len(holdings.pages_of(chunk)) for chunk in holdings.held())
        assert held + holdings.returned_pages + holdings.lent_pages == N_PAGES


def test_chunks_of_a_worker_that_is_gone_are_taken_back(arena, holdings):
    for chunk in (6, 5):
        holdings.give(chunk)
    arena.lend(1, owner=OWNER)
    holdings.refresh()
    holdings.reclaim_of_the_dead(arena)
    assert (holdings.returned_pages, holdings.lent_pages) == (2 * PAGES, 0)
