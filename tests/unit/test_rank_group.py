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
    WorkerTicket,
    applied,
    decide,
    late_ranks,
    raised,
    slowest_step_us,
    tightened,
)


@dataclass(frozen=True)
class Rank:
    """A rank of decode, and its worker: chunks it holds, tasklets it has finished, one it runs."""

    lending: RankLending = RankLending()  # noqa: RUF009 - frozen
    held: frozenset[int] = NONE
    done: int = 0
    runs: bool = False
    lives: bool = True

    @property
    def page(self) -> RankPage:
        own = self.lending
        return RankPage(own.drained(self.held), own.own_epoch, self.lives, own.failed)


@dataclass(frozen=True)
class World:
    """State of all ranks; `read` are the grants that worker rank 0 has read for its next ticket."""

    ranks: tuple[Rank, ...]
    group: GroupLending = GroupLending()  # noqa: RUF009 - frozen
    decision: GroupDecision | None = None
    ticket: WorkerTicket = WorkerTicket()  # noqa: RUF009 - frozen
    read: tuple[int, ...] = ()
    withdrawn: bool = False  # every rank has applied that the worker pauses
    raised_since_withdrawn: int = 0
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
    tasklets: int
    faults: int


@dataclass(frozen=True)
class Rules:
    """The functions that decide; a test leaves a rule out to see that it is missed."""

    decide: object = staticmethod(decide)
    raised: object = staticmethod(raised)


RULES = Rules()


def wishes(world, bounds):
    """Yield every share with nothing, one chunk to lend, or one to ask back."""
    chunks = frozenset(range(bounds.chunks))
    free, lent = chunks - world.group.lent, world.group.lent - world.group.asked_back
    for units in (0, 1) if bounds.tasklets else (0,):
        yield GroupWish(units)
        for chunk in free:
            yield GroupWish(units, lend=frozenset({chunk}))
        for chunk in lent:
            yield GroupWish(units, revoke=frozenset({chunk}))


def decided(world, wish, rules):
    """Rank 0 decides; what it decided is on its way to all ranks."""
    group, decision = rules.decide(world.group, [rank.page for rank in world.ranks], wish)
    return replace(world, group=group, decision=decision)


def received(world, n, not_lent=NONE):
    """Rank n applies what was decided."""
    rank = world.ranks[n]
    after = world.with_rank(
        n,
        replace(rank, lending=applied(rank.lending, world.decision, not_lent)),
        faults=world.faults + bool(not_lent),
    )
    if not after.iteration_is_over:
        return after
    if world.decision.units:
        return replace(after, withdrawn=False, raised_since_withdrawn=0)
    return replace(after, withdrawn=True)


def read_on(world, rules):
    """Worker rank 0 reads the next page; behind the last one it publishes the ticket."""
    if len(world.read) < len(world.ranks):
        return replace(world, read=(*world.read, world.ranks[len(world.read)].lending.grants))
    done = [rank.done for rank in world.ranks]
    ticket = rules.raised(world.ticket, world.read, done, decode_is_busy=True)
    more = world.raised_since_withdrawn + (world.withdrawn and ticket != world.ticket)
    return replace(world, ticket=ticket, read=(), raised_since_withdrawn=more)


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
        if world.faults < bounds.faults and rank.lending.grants:
            late = replace(rank, lending=tightened(rank.lending))
            yield world.with_rank(n, late, faults=world.faults + 1)
        if world.faults < bounds.faults and rank.lives:
            # A worker that has died holds nothing: decode takes it back by its epoch.
            dead = replace(rank, lives=False, held=NONE, runs=False)
            yield world.with_rank(n, dead, faults=world.faults + 1)
        if not rank.lives:
            continue
        settled = rank.lending.usable - rank.lending.asked_back
        if not rank.runs and settled != rank.held:
            yield world.with_rank(n, replace(rank, held=settled))
        if not rank.runs and rank.done < world.ticket.up_to:
            yield world.with_rank(n, replace(rank, runs=True))
        # A tasklet has collectives in it: it ends where every rank has come to it.
        if rank.runs and all(o.runs or o.done > rank.done for o in world.ranks):
            yield world.with_rank(n, replace(rank, runs=False, done=rank.done + 1))
    if world.decision is not None and world.ticket.up_to < bounds.tasklets:
        yield read_on(world, rules)


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
            assert (own.units, own.epoch) == (first.units, first.epoch)
        assert first.taken == world.group.lent
    # Started by all or by none: one tasklet is under way, and the ticket lets each rank run it.
    begun = [rank.done + rank.runs for rank in world.ranks]
    assert max(begun) - min(rank.done for rank in world.ranks) <= 1
    assert max(begun) <= world.ticket.up_to
    assert world.raised_since_withdrawn <= 1
    if world.group.off:
        assert world.group.lent == world.group.asked_back
        assert world.decision.units == 0


def not_lost(world, rules):
    """Hold a grant that is on every page to leading to a tasklet, and a quiet group to drain."""
    if not world.iteration_is_over or world.faults:
        return
    done = [rank.done for rank in world.ranks]
    if all(r.lending.grants for r in world.ranks) and min(done) == world.ticket.up_to:
        granted = [rank.lending.grants for rank in world.ranks]
        assert rules.raised(world.ticket, granted, done, decode_is_busy=True).up_to == max(done) + 1
    asked = world.group.asked_back
    if asked and not any(rank.runs for rank in world.ranks):
        quiet = replace(
            world,
            ranks=tuple(
                replace(r, held=r.lending.usable - r.lending.asked_back) for r in world.ranks
            ),
        )
        assert decided(quiet, GroupWish(), rules).decision.hand_back == asked


def alike(world):
    """Return the same world with the ranks but the first in a fixed order: they are alike."""
    if world.read:  # which ones have been read tells them apart
        return world
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
        found["tasklets"] += all(rank.done for rank in world.ranks)
        found["raised once more"] += world.raised_since_withdrawn
        for after in moves(world, bounds, rules):
            after = alike(after)
            if after not in seen:
                seen.add(after)
                left.append(after)
    return found


# With 4 ranks what is lent and which tasklets run are explored one by one: they meet in no rule.
EXPLORED = {
    "2 ranks": (2, Bounds(chunks=1, decisions=3, tasklets=1, faults=0), {"handed back"}),
    "2 ranks, a fault": (2, Bounds(chunks=1, decisions=2, tasklets=1, faults=1), {"off"}),
    "4 ranks, lending": (
        4,
        Bounds(chunks=1, decisions=3, tasklets=0, faults=1),
        {"off", "handed back"},
    ),
    "4 ranks, tasklets": (4, Bounds(chunks=0, decisions=2, tasklets=2, faults=0), set()),
}


@pytest.mark.parametrize(("ranks", "bounds", "also"), EXPLORED.values(), ids=EXPLORED)
def test_in_every_order_of_moves_ranks_agree_and_no_page_is_handed_back_early(ranks, bounds, also):
    found = explore(ranks, bounds)
    assert found["worlds"] > 500
    with_tasklets = {"tasklets", "raised once more"} if bounds.tasklets else set()
    assert {word for word, count in found.items() if count} == {"worlds"} | with_tasklets | also


def hands_back_by_the_first_rank(state, pages, wish):
    return decide(state, [replace(page, drained=pages[0].drained) for page in pages], wish)


def asks_the_first_rank_alone(ticket, granted, done, *, decode_is_busy):
    alone = (granted[0],) * len(granted)
    return raised(ticket, alone, done, decode_is_busy=decode_is_busy)


def waits_for_nobody(ticket, granted, done, *, decode_is_busy):
    return raised(ticket, granted, [ticket.up_to] * len(done), decode_is_busy=decode_is_busy)


def test_a_page_that_is_handed_back_when_one_rank_has_drained_is_noticed():
    with pytest.raises((AssertionError, ValueError)):
        explore(2, EXPLORED["2 ranks"][1], Rules(decide=hands_back_by_the_first_rank))


def test_a_ticket_that_waits_for_no_rank_is_noticed():
    with pytest.raises(AssertionError):
        explore(4, EXPLORED["4 ranks, tasklets"][1], Rules(raised=waits_for_nobody))


def test_a_ticket_by_one_ranks_grant_is_noticed():
    """Rank 1 has tightened alone, and would be given a tasklet."""
    ranks = (RankLending(units=1, epoch=1), tightened(RankLending(units=1, epoch=1)))
    granted = [rank.grants for rank in ranks]
    assert granted == [1, 0]
    before = WorkerTicket()
    assert raised(before, granted, [0, 0], decode_is_busy=True) == before
    assert asks_the_first_rank_alone(before, granted, [0, 0], decode_is_busy=True) != before


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_10_000_random_operations_ranks_never_differ_in_what_is_lent(ranks):
    draw, chunks = random.Random(ranks), frozenset(range(24))
    world, lent, off = World((Rank(),) * ranks), 0, 0
    for number in range(10_000):
        if number % 1000 == 999:  # whatever has gone wrong: a group is made again
            world = World((Rank(),) * ranks)
        free, out = chunks - world.group.lent, world.group.lent - world.group.asked_back
        wish = GroupWish(
            draw.choice((0, 8, 16)),
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
        GroupLending(), [RankPage(), RankPage()], GroupWish(1, lend=frozenset({3, 5}))
    )
    ranks = [applied(ranks[0], decision), applied(ranks[1], decision, frozenset({5}))]
    assert ranks[0].taken == ranks[1].taken == {3, 5}
    assert ranks[1].usable == {3}
    pages = [RankPage(), RankPage(failed=ranks[1].failed)]
    group, decision = decide(group, pages, GroupWish(1, lend=frozenset({7})))
    assert decision.off == "rank 1: chunk 5 cannot be lent"
    assert (decision.units, decision.lend, decision.revoke) == (0, NONE, {3, 5})
    assert decision.epoch > 1


def test_a_rank_that_has_tightened_alone_is_loosened_by_the_next_decision_only():
    rank = applied(RankLending(), GroupDecision(1, units=8, epoch=1))
    rank = tightened(rank)
    assert rank.grants == 0
    group = GroupLending(number=1)
    _, decision = decide(group, [RankPage(), RankPage(own_epoch=rank.own_epoch)], GroupWish(8))
    assert applied(rank, decision).grants == 8


def test_while_a_worker_is_missing_nothing_is_lent_and_what_is_lent_is_asked_back():
    group = GroupLending(number=4, lent=frozenset({1}))
    pages = [RankPage(), RankPage(worker_lives=False)]
    _, decision = decide(group, pages, GroupWish(8, lend=frozenset({2})))
    assert (decision.units, decision.lend, decision.revoke, decision.off) == (0, NONE, {1}, "")


def test_a_decision_that_a_rank_has_missed_is_refused():
    with pytest.raises(ValueError, match="decision 2 comes after 0"):
        applied(RankLending(), GroupDecision(2, units=0, epoch=1))
    with pytest.raises(ValueError, match="does not fit"):
        applied(RankLending(), GroupDecision(1, units=0, epoch=1, hand_back=frozenset({1})))


def test_an_idle_decode_lets_a_few_tasklets_be_queued_and_the_slowest_grant_counts():
    ticket = WorkerTicket(3, 8)
    ahead = raised(ticket, [16, 12], [3, 2], decode_is_busy=False)
    assert ahead == WorkerTicket(4, 12)
    assert raised(ahead, [16, 12], [0, 0], decode_is_busy=False) == ahead
    assert raised(ticket, [16, 12], [3, 2], decode_is_busy=True) == ticket


def test_late_ranks_are_those_that_hold_the_others_up():
    at = {"raised_us": 100.0, "bound_us": 50.0}
    ticket = WorkerTicket(3, 8)
    assert late_ranks(ticket, [3, 2, 2], now_us=150.0, **at) == ()
    assert late_ranks(ticket, [3, 2, 2], now_us=151.0, **at) == (1, 2)
    assert late_ranks(ticket, [3, 3, 3], now_us=999.0, **at) == ()


def test_a_groups_step_takes_as_long_as_its_slowest_ranks():
    assert slowest_step_us([RankPage(step_us=9.0), RankPage(step_us=11.5)]) == 11.5
