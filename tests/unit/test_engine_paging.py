from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from windrow.errors import InvariantBroken
from windrow_sidecar.engines.builtin.kv.paging import PagePool

PAGES_PER_CHUNK = 4


class Chunks:
    """An owner's table in plain Python: lowest free chunk first, some of them lent meanwhile."""

    def __init__(self, n: int) -> None:
        self.state = ["free"] * n

    def take_kv(self) -> int:
        for wanted in ("free", "reserved"):
            if wanted in self.state:
                chunk = self.state.index(wanted)
                self.state[chunk] = "kv"
                return chunk
        return -1

    def return_kv(self, chunk: int) -> None:
        assert self.state[chunk] == "kv", f"chunk {chunk} is returned but {self.state[chunk]}"
        self.state[chunk] = "free"

    def counts(self) -> tuple[int, int, int, int, int]:
        names = ("free", "kv", "lent", "reserved", "draining")
        return tuple(self.state.count(name) for name in names)  # type: ignore[return-value]


class PoolMachine(RuleBasedStateMachine):
    """Requests come, grow, end and are retracted, while chunks are lent and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = Chunks(6)
        self.pool = PagePool(self.chunks, pages_per_chunk=PAGES_PER_CHUNK)
        self.requests: list[list[int]] = []

    @rule(n=st.integers(0, 14))
    def admit(self, n):
        available = self.pool.available
        pages = self.pool.allocate(n)
        assert (pages is not None) == (n <= available)
        if pages is not None:
            assert len(pages) == n
            self.requests.append(pages)

    @rule(data=st.data())
    def grow(self, data):
        if self.requests:
            pages = self.pool.allocate(1)
            if pages is not None:
                data.draw(st.sampled_from(self.requests)).extend(pages)

    @rule(data=st.data())
    def end(self, data):
        if self.requests:
            at = data.draw(st.integers(0, len(self.requests) - 1))
            pages = self.requests.pop(at)
            random.Random(at).shuffle(pages)
            self.pool.release(pages)

    @rule(n=st.integers(1, 6))
    def lend(self, n):
        for chunk in reversed(range(6)):
            if n and self.chunks.state[chunk] == "free":
                self.chunks.state[chunk] = "lent"
                n -= 1

    @rule()
    def give_back(self):
        self.chunks.state = ["free" if s == "lent" else s for s in self.chunks.state]

    @invariant()
    def every_page_has_one_user_and_lies_in_a_chunk_of_ours(self):
        used = [page for pages in self.requests for page in pages]
        assert len(used) == len(set(used))
        assert all(self.chunks.state[page // PAGES_PER_CHUNK] == "kv" for page in used)
        self.pool.check(used)

    @invariant()
    def at_most_one_empty_chunk_is_kept(self):
        used = {page // PAGES_PER_CHUNK for pages in self.requests for page in pages}
        assert self.pool.chunks_held - len(used) <= 1


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=30, stateful_step_count=30)


def test_low_pages_are_used_first_so_that_high_chunks_empty():
    chunks = Chunks(4)
    pool = PagePool(chunks, pages_per_chunk=PAGES_PER_CHUNK)
    first, second = pool.allocate(6), pool.allocate(6)
    assert first == [0, 1, 2, 3, 4, 5]
    pool.release(first)
    assert pool.allocate(2) == [0, 1]
    pool.release(second)
    assert chunks.state == ["kv", "kv", "free", "free"]


def test_an_allocation_that_does_not_fit_changes_nothing():
    chunks = Chunks(2)
    pool = PagePool(chunks, pages_per_chunk=PAGES_PER_CHUNK)
    kept = pool.allocate(3)
    assert pool.allocate(6) is None
    pool.check(kept)
    assert pool.available == 5


def test_a_page_that_is_released_twice_is_noticed():
    pool = PagePool(Chunks(2), pages_per_chunk=PAGES_PER_CHUNK)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(InvariantBroken, match="not in use"):
        pool.release(pages[:1])


def test_a_lost_page_is_noticed_by_the_check():
    pool = PagePool(Chunks(2), pages_per_chunk=PAGES_PER_CHUNK)
    pages = pool.allocate(3)
    with pytest.raises(InvariantBroken, match="do not add up"):
        pool.check(pages[1:])
