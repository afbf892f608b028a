"""The ranks of a slot never differ in what is lent, whatever the order in which they get on.

A model of decode's and the worker's ranks makes every move in every order, within small bounds, and
10,000 random moves within wide ones. It decides by the functions of the product alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from windrow_sidecar.qos.rank_group import (
    NONE,
    GroupDecision,
    GroupLending,
    GroupWish,
    RankLending,
    RankPage,
    applied,
    decide,
)


@dataclass(frozen=True)
class Rank:
    """A rank of decode, and the chunks that its worker holds."""

    lending: RankLending = RankLending()  # noqa: RUF009 - frozen
    held: frozenset[int] = NONE
    lives: bool = True

    @property
    def page(self) -> RankPage:
        own = self.lending
        return RankPage(own.drained(self.held), own.failed)


@dataclass(frozen=True)
class World:
    """State of all ranks, and what is on its way to them."""

    ranks: tuple[Rank, ...]
    group: GroupLending = GroupLending()  # noqa: RUF009 - frozen
    decision: GroupDecision | None = None
    faults: int = 0

    def with_rank(self, n: int, rank: Rank, **changes) -> World:
        ranks = (*self.ranks[:n], rank, *self.ranks[n + 1 :])
        return replace(self, ranks=ranks, **changes)

    @property
    def iteration_is_over(self) -> bool:
        """Return whether all ranks have applied the last decision, as a forward pass needs."""
        return all(rank.lending.number == self.group.number for rank in self.ranks)


@dataclass(frozen=True)
class Bounds:
    chunks: int
    decisions: int
    faults: int


@dataclass(frozen=True)
class Rules:
    """The function that decides; a test leaves a rule out to see that it is missed."""

    decide: object = staticmethod(decide)


RULES = Rules()


def wishes(world, bounds):
    """Yield nothing, one chunk to lend, one to ask back, or a dead worker's chunks."""
    chunks = frozenset(range(bounds.chunks))
    free, lent = chunks - world.group.lent, world.group.lent - world.group.asked_back
    yield GroupWish()
    for chunk in free:
        yield GroupWish(lend=frozenset({chunk}), owner=1)
    for chunk in lent:
        yield GroupWish(revoke=frozenset({chunk}))
    if not all(rank.lives for rank in world.ranks):
        yield GroupWish(reclaim=1)


def decided(world, wish, rules):
    """Rank 0 decides; what it decided is on its way to all ranks."""
    group, decision = rules.decide(world.group, [rank.page for rank in world.ranks], wish)
    return replace(world, group=group, decision=decision)


def received(world, n, not_lent=NONE):
    """Rank n applies what was decided."""
    rank = world.ranks[n]
    return world.with_rank(
        n,
        replace(rank, lending=applied(rank.lending, world.decision, not_lent)),
        faults=world.faults + bool(not_lent),
    )


def moves(world, bounds, rules):
    """Yield every world that one move leads to."""
    if world.iteration_is_over and world.group.number < bounds.decisions:
        for wish in wishes(world, bounds):
            yield decided(world, wish, rules)
    for n, rank in enumerate(world.ranks):
        if rank.lending.number < world.group.number:
            yield received(world, n)
            if world.decision.lend and world.faults < bounds.faults:
                yield received(world, n, world.decision.lend)
        if world.faults < bounds.faults and rank.lives:
            # A worker that has died holds nothing: decode takes it back by its epoch.
            dead = replace(rank, lives=False, held=NONE)
            yield world.with_rank(n, dead, faults=world.faults + 1)
        if not rank.lives:
            continue
        settled = rank.lending.usable - rank.lending.asked_back
        if settled != rank.held:
            yield world.with_rank(n, replace(rank, held=settled))


def check(world):
    """Hold a world to what must be true of each."""
    for rank in world.ranks:
        # The worker uses no chunk that the allocator has: no page was handed back early.
        assert rank.held <= rank.lending.taken
    if world.iteration_is_over:
        first = world.ranks[0].lending
        for rank in world.ranks:
            own = rank.lending
            assert (own.taken, own.asked_back) == (first.taken, first.asked_back)
        assert first.taken == world.group.lent
    if world.group.off:
        assert world.group.lent == world.group.asked_back
        assert not world.decision.lend


def not_lost(world, rules):
    """Hold a quiet group to drain."""
    asked = world.group.asked_back
    if asked and world.iteration_is_over and not world.faults:
        quiet = replace(
            world,
            ranks=tuple(
                replace(r, held=r.lending.usable - r.lending.asked_back) for r in world.ranks
            ),
        )
        assert decided(quiet, GroupWish(), rules).decision.hand_back == asked


def alike(world):
    """Return the same world with the ranks but the first in a fixed order: they are alike."""
    first, *others = world.ranks
    return replace(world, ranks=(first, *sorted(others, key=repr)))


def explore(ranks, bounds, rules=RULES):
    """Make every move in every order; returns how many worlds there are, by what is in them."""
    begin = World((Rank(),) * ranks)
    seen, left, found = {begin}, [begin], Counter()
    while left:
        world = left.pop()
        check(world)
        not_lost(world, rules)
        found["worlds"] += 1
        found["off"] += bool(world.group.off)
        found["handed back"] += bool(world.decision and world.decision.hand_back)
        found["reclaimed"] += bool(world.decision and world.decision.reclaim)
        for after in moves(world, bounds, rules):
            after = alike(after)
            if after not in seen:
                seen.add(after)
                left.append(after)
    return found


EXPLORED = {
    "2 ranks": (2, Bounds(chunks=2, decisions=4, faults=0), {"handed back"}),
    "2 ranks, faults": (
        2,
        Bounds(chunks=2, decisions=3, faults=2),
        {"off", "handed back", "reclaimed"},
    ),
    "4 ranks, a fault": (
        4,
        Bounds(chunks=1, decisions=3, faults=1),
        {"off", "handed back", "reclaimed"},
    ),
}


@pytest.mark.parametrize(("ranks", "bounds", "also"), EXPLORED.values(), ids=EXPLORED)
def test_in_every_order_of_moves_ranks_agree_and_no_page_is_handed_back_early(ranks, bounds, also):
    found = explore(ranks, bounds)
    assert found["worlds"] > 500
    assert {word for word, count in found.items() if count} == {"worlds"} | also


def hands_back_by_the_first_rank(state, pages, wish):
    return decide(state, [replace(page, drained=pages[0].drained) for page in pages], wish)


def test_a_page_that_is_handed_back_when_one_rank_has_drained_is_noticed():
    with pytest.raises((AssertionError, ValueError)):
        explore(2, EXPLORED["2 ranks"][1], Rules(decide=hands_back_by_the_first_rank))


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_10_000_random_operations_ranks_never_differ_in_what_is_lent(ranks):
    draw, chunks = random.Random(ranks), frozenset(range(24))
    world, lent, off = World((Rank(),) * ranks), 0, 0
    for number in range(10_000):
        if number % 1000 == 999:  # whatever has gone wrong: a group is made again
            world = World((Rank(),) * ranks)
        free, out = chunks - world.group.lent, world.group.lent - world.group.asked_back
        wish = GroupWish(
            lend=frozenset(draw.sample(sorted(free), min(len(free), draw.randrange(4)))),
            revoke=frozenset(draw.sample(sorted(out), min(len(out), draw.randrange(4)))),
        )
        world = decided(world, wish, RULES)
        for n in draw.sample(range(ranks), ranks):
            fails = world.decision.lend and draw.random() < 0.0005
            world = received(world, n, frozenset(list(world.decision.lend)[:1]) if fails else NONE)
            rank = world.ranks[n]
            if draw.random() < 0.5:
                held = rank.lending.usable - rank.lending.asked_back
                world = world.with_rank(n, replace(rank, held=held))
        check(world)
        lent += len(world.group.lent)
        off += bool(world.group.off)
    assert lent > 10_000
    assert 0 < off < 9_000


def test_a_rank_that_cannot_lend_turns_the_group_off_and_its_allocator_stays_like_the_others():
    ranks = [RankLending(), RankLending()]
    group, decision = decide(
        GroupLending(), [RankPage(), RankPage()], GroupWish(lend=frozenset({3, 5}))
    )
    ranks = [applied(ranks[0], decision), applied(ranks[1], decision, frozenset({5}))]
    assert ranks[0].taken == ranks[1].taken == {3, 5}
    assert ranks[1].usable == {3}
    pages = [RankPage(), RankPage(failed=ranks[1].failed)]
    group, decision = decide(group, pages, GroupWish(lend=frozenset({7})))
    assert decision.off == "rank 1: chunk 5 cannot be lent"
    assert (decision.lend, decision.revoke) == (NONE, {3, 5})


def test_nothing_is_lent_until_all_chunks_of_a_dead_worker_are_back():
    group = GroupLending(number=4, lent=frozenset({1}))
    pages = [RankPage(), RankPage()]
    group, decision = decide(group, pages, GroupWish(lend=frozenset({2}), reclaim=7))
    assert (decision.lend, decision.revoke, decision.reclaim, decision.off) == (NONE, {1}, 7, "")
    wish = GroupWish(lend=frozenset({2}), owner=8)
    group, decision = decide(group, [RankPage(frozenset({1})), RankPage()], wish)
    assert (decision.lend, decision.reclaim) == (NONE, 7)
    group, decision = decide(group, [RankPage(frozenset({1}))] * 2, wish)
    assert (decision.lend, decision.hand_back, decision.reclaim) == ({2}, {1}, 0)


def test_a_decision_that_a_rank_has_missed_is_refused():
    with pytest.raises(ValueError, match="decision 2 comes after 0"):
        applied(RankLending(), GroupDecision(2))
    with pytest.raises(ValueError, match="does not fit"):
        applied(RankLending(), GroupDecision(1, hand_back=frozenset({1})))
