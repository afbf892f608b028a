"""Ranks agree on which chunks are lent and which are KV, however late workers give them back.

Over real arenas, tables and page allocators: what rank 0 of an engine decides travels to the other
ranks, which apply it when they come to it, and workers attach, leave and die at any time.
"""

from __future__ import annotations

import random
from collections import deque
from contextlib import ExitStack

import pytest

from windrow_sidecar._core import DRAINING, FREE, KV, LENT, Arena, Geometry, Inspection
from windrow_sidecar.engines.builtin.kv.paging import PagePool
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.rank_chunks import RankChunks

CHUNKS, PAGES_PER_CHUNK = 24, 4
GEOMETRY = Geometry(
    layers=1, kv_heads=1, head_dim=16, dtype_bytes=4, block_bytes=4096, chunks=CHUNKS
)


class Rank:
    """One rank of decode, with its allocator, what it was told, and its worker's process."""

    def __init__(self, socket: str) -> None:
        self.arena = Arena.create(GEOMETRY, reserved_chunks=0)
        self.arena.serve(socket)
        self.socket, self.chunks = socket, RankChunks(self.arena)
        self.pool = PagePool(self.chunks, pages_per_chunk=PAGES_PER_CHUNK)
        self.told: deque[tuple[str, object]] = deque()
        self.worker: Arena | None = None
        self.epoch = 0

    def attach(self, epoch: int) -> None:
        self.worker, self.epoch = Arena.attach(self.socket), epoch

    def die(self) -> None:
        """End the worker, which gives nothing back."""
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def give_back(self, draw: random.Random) -> None:
        """Have the worker return what it was asked for, and now and then a chunk besides."""
        if self.worker is None:
            return
        back = self.worker.draining(self.epoch)
        held = self.worker.held(self.epoch)
        if held and draw.random() < 0.05:
            back.append(draw.choice(held))
        for chunk in back:
            self.worker.give_back(chunk, owner=self.epoch)

    def close(self) -> None:
        self.die()
        self.arena.close()


class Group:
    """Ranks of an engine; `followed` is what the others have done of what rank 0 did."""

    def __init__(self, folder, ranks: int) -> None:
        self.ranks = [Rank(str(folder / f"arena-{n}.sock")) for n in range(ranks)]
        tables = [Inspection.open(rank.socket) for rank in self.ranks[1:]]
        self.lending = GroupChunks(self.ranks[0].chunks, [table.states for table in tables])
        self.lent = self.handed_back = 0

    def on_all(self, act: str, value: object) -> object:
        """Do it on rank 0, and have the others come to it later; returns what rank 0 got."""
        for rank in self.ranks[1:]:
            rank.told.append((act, value))
        return _do(self.ranks[0], act, value)

    def decide(self, *, harvests: bool = True) -> None:
        decision = self.lending.decide(harvests=harvests)
        if decision is not None:
            self.lent += len(decision.lend)
            self.handed_back += len(decision.hand_back)
            for rank in self.ranks[1:]:
                rank.told.append(("apply", decision))

    def follow(self, draw: random.Random | None = None) -> None:
        """Have every other rank do what it was told, all of it or so much as is drawn."""
        for n, rank in enumerate(self.ranks[1:], 1):
            for _ in range(draw.randint(0, len(rank.told)) if draw else len(rank.told)):
                act, value = rank.told.popleft()
                _do(rank, act, value)
                lending = rank.chunks.lending
                self.lending.heard(n, applied=lending.number, failed=lending.failed)

    def agree(self) -> None:
        """Hold all ranks to one account, and each table to it where a chunk is KV."""
        first = self.ranks[0].chunks
        for rank in self.ranks:
            own = rank.chunks
            assert own.home == first.home
            assert own.lending.taken == first.lending.taken
            assert own.lending.asked_back == first.lending.asked_back
            states = rank.arena.states()
            taken = own.lending.taken
            assert {c for c, s in enumerate(states) if s in (LENT, DRAINING)} <= taken
            assert {c for c, s in enumerate(states) if s == KV}.isdisjoint(taken)
            assert all(states[chunk] == FREE for chunk in own.home)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def _do(rank: Rank, act: str, value) -> object:
    if act == "apply":
        return rank.chunks.apply(value)
    if act == "allocate":
        wanted, expected = value
        pages = rank.pool.allocate(wanted)
        if expected:  # what rank 0 got
            assert pages == expected[0]
        expected.append(pages)
        return pages
    return rank.pool.release(value)


@pytest.fixture
def group_of(tmp_path):
    with ExitStack() as ends:

        def make(ranks: int) -> Group:
            group = Group(tmp_path, ranks)
            ends.callback(group.close)
            return group

        yield make


def one_of_all(group: Group, draw: random.Random, pages: list, epoch: int) -> int:
    """Do one operation, whichever is drawn; returns the epoch of the worker."""
    lending, ranks = group.lending, group.ranks
    kind = draw.random()
    if kind < 0.25:
        got = group.on_all("allocate", (draw.randint(1, 12), []))
        if got:
            pages.append(got)
    elif kind < 0.5 and pages:
        group.on_all("release", pages.pop(draw.randrange(len(pages))))
    elif kind < 0.65:
        lending.lend(draw.randint(1, 6), owner=epoch)
    elif kind < 0.8:
        lending.revoke(draw.randint(1, 6))
    elif kind < 0.805:  # the worker dies; its ranks one after the other
        for rank in draw.sample(ranks, len(ranks)):
            rank.die()
        lending.reclaim(epoch)
        epoch += 1
    elif kind < 0.83:
        if not lending.lent:
            for rank in ranks:
                rank.die()
                rank.attach(epoch)
    else:
        for rank in draw.sample(ranks, draw.randint(1, len(ranks))):
            rank.give_back(draw)
    group.decide()
    group.follow(draw)
    return epoch


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_10_000_random_operations_ranks_differ_in_no_iteration(group_of, ranks):
    group, draw, pages, epoch = group_of(ranks), random.Random(ranks), [], 1
    for rank in group.ranks:
        rank.attach(epoch)
    for number in range(10_000):
        epoch = one_of_all(group, draw, pages, epoch)
        if number % 7 == 0:
            group.follow()
            group.agree()
    group.follow()
    group.agree()
    assert group.lending.off == ""
    assert group.lent > 1_000
    assert group.handed_back > 1_000
    assert epoch > 10


def lend(group: Group, chunks: int, *, epoch: int = 1) -> list[int]:
    """Lend so many chunks on every rank; a worker is attached to each."""
    for rank in group.ranks:
        rank.attach(epoch)
    lent = group.lending.lend(chunks, owner=epoch)
    group.decide()
    group.follow()
    return lent


def test_a_chunk_comes_back_when_every_ranks_worker_has_left_it(group_of):
    group = group_of(2)
    lent = lend(group, 3)
    assert lent == [21, 22, 23]
    assert [rank.worker.held(1) for rank in group.ranks] == [lent, lent]
    assert group.lending.revoke(1) == [21]
    group.decide()
    group.follow()
    group.ranks[0].worker.give_back(21, owner=1)
    group.decide()
    group.follow()
    assert 21 not in group.ranks[0].chunks.home  # the other one has it still
    group.ranks[1].worker.give_back(21, owner=1)
    group.decide()
    group.follow()
    assert [21 in rank.chunks.home for rank in group.ranks] == [True, True]
    group.agree()


def test_what_a_worker_leaves_without_being_asked_is_asked_back_from_all(group_of):
    group = group_of(2)
    lend(group, 2)
    group.ranks[1].worker.give_back(23, owner=1)
    group.decide()
    group.follow()
    assert group.ranks[0].worker.draining(1) == [23]


def test_a_chunk_that_a_rank_has_not_lent_yet_does_not_count_as_left(group_of):
    group = group_of(2)
    for rank in group.ranks:
        rank.attach(1)
    group.lending.lend(2, owner=1)
    group.decide()
    assert group.lending.waits
    group.lending.revoke(2)
    group.decide()  # rank 1 has not come to it: nothing is decided over its head
    assert len(group.ranks[1].told) == 1
    group.follow()
    group.decide()
    group.follow()
    assert [rank.worker.draining(1) for rank in group.ranks] == [[22, 23], [22, 23]]


def test_a_rank_that_cannot_lend_ends_harvesting_on_all_and_allocators_stay_alike(group_of):
    group = group_of(2)
    for rank in group.ranks:
        rank.attach(1)
    group.ranks[1].arena.take_kv_chunk(23)  # its table is not what the ranks agreed on
    group.lending.lend(2, owner=1)
    group.decide()
    group.follow()
    group.decide()
    group.follow()
    assert group.lending.off == "rank 1: chunk 23 cannot be lent"
    assert group.ranks[0].worker.draining(1) == [22, 23]
    assert group.lending.lend(1, owner=1) == [21]
    group.decide()
    assert group.ranks[0].worker.held(1) == []  # nothing is lent any more
    for rank in group.ranks:
        rank.give_back(random.Random(0))
    homes = [rank.chunks.home for rank in group.ranks]
    assert homes[0] == homes[1]


def test_kv_on_a_chunk_that_is_not_free_by_the_table_goes_on_and_is_told(group_of):
    rank = group_of(2).ranks[1]
    rank.arena.lend_chunk(0, owner=1)
    assert rank.pool.allocate(1) == [0]
    assert rank.chunks.failed.startswith("chunk 0 is LENT")


def test_a_dead_workers_chunks_come_back_when_its_process_of_that_rank_has_gone(group_of):
    group = group_of(2)
    lend(group, 2)
    group.ranks[0].die()
    group.lending.reclaim(1)
    for _ in range(2):
        group.decide()
        group.follow()
    assert group.ranks[0].arena.counts()[2:] == (0, 0, 0)
    assert group.ranks[1].worker.draining(1) == [22, 23]  # it may still write there
    assert group.lending.lend(1, owner=2) == []
    group.ranks[1].die()
    for _ in range(2):
        group.decide()
        group.follow()
    assert group.lending.lent == frozenset()
    group.agree()


def test_once_the_hook_is_off_all_comes_back_also_from_a_dead_worker(group_of):
    group = group_of(2)
    lend(group, 2)
    group.decide(harvests=False)
    group.follow()
    assert group.ranks[1].worker.draining(1) == [22, 23]
    for rank in group.ranks:
        rank.die()
    for _ in range(3):
        group.decide(harvests=False)
        group.follow()
    assert group.lending.lent == frozenset()
    group.agree()


def test_the_reserve_is_of_the_account_and_is_not_lent(group_of):
    group = group_of(2)
    lending = group.lending
    assert lending.counts() == (CHUNKS - 1, 0, 0, 1, 0)
    assert lending.set_reserve(4) == 4
    assert len(lending.lend(CHUNKS, owner=1)) == CHUNKS - 4
    group.decide()
    group.follow()
    assert lending.counts() == (0, 0, CHUNKS - 4, 4, 0)
    assert group.ranks[0].pool.available == 4 * PAGES_PER_CHUNK
