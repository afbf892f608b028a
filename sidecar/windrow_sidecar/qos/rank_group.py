"""Decide for the ranks of one slot: what is lent and granted on all, and which tasklets run.

Rank 0 of decode decides from the pages of all ranks, and its decision travels in the engine's own
broadcast, so that every rank applies it in the same iteration. Rank 0 of the worker publishes a
ticket, the number of tasklets that may be started, which all ranks of the worker follow. Nothing
here waits: decode goes on whatever a worker does (docs/design/0025). Pure functions. The built-in
engine lends by them (`engines.harvest.group_chunks`); its worker's ranks follow a message for each
tasklet, not yet the ticket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

NONE: frozenset[int] = frozenset()
# Tasklets that may be started ahead of the last rank while decode has nothing to do.
AHEAD_OF_IDLE_DECODE = 4


@dataclass(frozen=True, slots=True)
class RankPage:
    """Facts of one rank that rank 0 of decode reads from its page before a step.

    Attributes:
        drained: chunks that were asked back and that the rank's worker uses no more.
        own_epoch: the pause epoch up to which the rank has tightened alone.
        worker_lives: whether the rank has a worker whose heart beats.
        failed: why the rank could not apply something; "": it could.
        step_us: how long its last step took.
    """

    drained: frozenset[int] = NONE
    own_epoch: int = 0
    worker_lives: bool = True
    failed: str = ""
    step_us: float = 0.0


@dataclass(frozen=True, slots=True)
class GroupWish:
    """Share and chunks that decode's policy wants for the group, from the slowest rank's step.

    Attributes:
        units: of each device for the worker; 0: it pauses.
        lend: chunks that are free.
        owner: the job epoch that they are lent to.
        revoke: chunks that are wanted back.
        reclaim: the job epoch of a worker that is dead, which gives nothing back; 0: none.
    """

    units: int = 0
    lend: frozenset[int] = NONE
    owner: int = 0
    revoke: frozenset[int] = NONE
    reclaim: int = 0


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """An entry of the engine's broadcast: what every rank does in this iteration.

    Attributes:
        number: of the decision, from 1; each is applied once, in order.
        units: of each device for the worker; 0: it pauses.
        epoch: the pause epoch; a rank's worker needs one that is at least the rank's own.
        lend: chunks that each rank takes from its allocator and lends.
        owner: the job epoch that they are lent to.
        revoke: chunks that each rank asks its worker for.
        hand_back: chunks that have drained on all ranks: each allocator gets them.
        reclaim: the job epoch of a dead worker: each rank takes back what its own process had, once
            that has gone; 0: none.
        off: why harvesting is off for the group; "": it is on.
    """

    number: int
    units: int
    epoch: int
    lend: frozenset[int] = NONE
    owner: int = 0
    revoke: frozenset[int] = NONE
    hand_back: frozenset[int] = NONE
    reclaim: int = 0
    off: str = ""

    @property
    def moves(self) -> bool:
        """True where a chunk moves, or may."""
        return bool(self.lend or self.revoke or self.hand_back or self.reclaim)


@dataclass(frozen=True, slots=True)
class GroupLending:
    """State of the group that rank 0 of decode keeps between steps.

    Attributes:
        number: of the last decision.
        epoch: the pause epoch.
        lent: chunks that no allocator has.
        asked_back: those of them that have been revoked and not been handed back.
        dead: those of them that a dead worker had.
        dead_owner: its job epoch.
        off: why harvesting is off; it stays off until the group is made again.
    """

    number: int = 0
    epoch: int = 1
    lent: frozenset[int] = NONE
    asked_back: frozenset[int] = NONE
    dead: frozenset[int] = NONE
    dead_owner: int = 0
    off: str = ""


def slowest_step_us(pages: Sequence[RankPage]) -> float:
    """Return the time of the group's last step: the slowest rank's."""
    return max(page.step_us for page in pages)


def decide(
    state: GroupLending, pages: Sequence[RankPage], wish: GroupWish
) -> tuple[GroupLending, GroupDecision]:
    """Return the group's next state and what its ranks have to do.

    A rank that could not apply something turns harvesting off on all. While a worker is missing
    nothing is lent or granted, and what is lent is asked back. Nor is anything lent until all of a
    dead worker's chunks are back.

    Args:
        state: after the last decision.
        pages: of all ranks, in their order.
        wish: of decode's policy.
    """
    failures = [f"rank {n}: {page.failed}" for n, page in enumerate(pages) if page.failed]
    off = state.off or (failures[0] if failures else "")
    works = not off and all(page.worker_lives for page in pages)
    # Of a chunk that one rank's worker still uses no rank's allocator may have the pages.
    hand_back = state.asked_back.intersection(*(page.drained for page in pages))
    lent = state.lent - hand_back
    dead = (state.lent if wish.reclaim else state.dead) - hand_back
    dead_owner = (wish.reclaim or state.dead_owner) if dead else 0
    lend = wish.lend - state.lent if works and not dead else NONE
    asked_before = state.asked_back - hand_back
    revoke = (((wish.revoke | dead) & lent) if works else lent) - asked_before
    # A rank that has tightened alone is heard: the grant that loosens it is newer than its pause.
    epoch = max(state.epoch, *(page.own_epoch for page in pages))
    if off and not state.off:
        epoch += 1
    number = state.number + 1
    decision = GroupDecision(
        number,
        wish.units if works else 0,
        epoch,
        lend,
        wish.owner if lend else 0,
        revoke,
        hand_back,
        dead_owner,
        off,
    )
    after = GroupLending(number, epoch, lent | lend, asked_before | revoke, dead, dead_owner, off)
    return after, decision


@dataclass(frozen=True, slots=True)
class RankLending:
    """Account that a rank keeps of its own chunks and grant.

    Attributes:
        number: of the decision that it applied last.
        units, epoch: of the grant on its page.
        own_epoch: the pause epoch up to which it has tightened alone.
        taken: chunks that its allocator does not have: the same on every rank.
        usable: those of them that its worker may use; one that could not be lent is not among them.
        asked_back: those of `taken` that have been revoked.
        failed: why it could not apply something.
    """

    number: int = 0
    units: int = 0
    epoch: int = 0
    own_epoch: int = 0
    taken: frozenset[int] = NONE
    usable: frozenset[int] = NONE
    asked_back: frozenset[int] = NONE
    failed: str = ""

    @property
    def grants(self) -> int:
        """Units that its worker may use now; 0: none, or it has tightened alone."""
        return self.units if self.epoch >= self.own_epoch else 0

    def drained(self, held: frozenset[int]) -> frozenset[int]:
        """Return chunks asked back that its worker, which holds `held`, uses no more."""
        return self.asked_back - held


def applied(
    rank: RankLending, decision: GroupDecision, not_lent: frozenset[int] = NONE
) -> RankLending:
    """Return a rank's account after a decision.

    Args:
        rank: before it.
        decision: the next one.
        not_lent: chunks of `decision.lend` of which a driver call failed. The allocator gives them
            away all the same, or the ranks' allocators would differ from here on.

    Raises:
        ValueError: a decision is missing, or does not fit: the ranks' accounts differ.
    """
    if decision.number != rank.number + 1:
        raise ValueError(f"decision {decision.number} comes after {rank.number}")
    if decision.lend & rank.taken or not decision.hand_back <= rank.asked_back:
        raise ValueError(f"decision {decision.number} does not fit what rank lends")
    failed = rank.failed
    if not_lent and not failed:
        failed = f"chunk {min(not_lent)} cannot be lent"
    return replace(
        rank,
        number=decision.number,
        units=decision.units,
        epoch=decision.epoch,
        taken=(rank.taken | decision.lend) - decision.hand_back,
        usable=(rank.usable | (decision.lend - not_lent)) - decision.hand_back,
        asked_back=(rank.asked_back | decision.revoke) - decision.hand_back,
        failed=failed,
    )


def tightened(rank: RankLending) -> RankLending:
    """Return a rank that has paused its own worker: its step was late. Only rank 0 loosens it."""
    return replace(rank, own_epoch=max(rank.own_epoch, rank.epoch + 1))


@dataclass(frozen=True, slots=True)
class WorkerTicket:
    """Number of tasklets that the worker's ranks may start; rank 0 of the worker publishes it.

    Attributes:
        up_to: tasklets with a lower number may be started, on every rank.
        units: of each device that the last of them may use: the same on every rank.
    """

    up_to: int = 0
    units: int = 0


def raised(
    ticket: WorkerTicket, granted: Sequence[int], done: Sequence[int], *, decode_is_busy: bool
) -> WorkerTicket:
    """Return the next ticket: one tasklet more, or the same.

    Beside a busy decode one tasklet at a time is under way, so a grant that is withdrawn after
    its ticket was raised is followed by that tasklet and no other.

    Args:
        ticket: published last.
        granted: units on the page of each rank, as read one after the other.
        done: tasklets that each rank has finished.
        decode_is_busy: whether it has requests.
    """
    most = 1 if decode_is_busy else AHEAD_OF_IDLE_DECODE
    if not min(granted) or ticket.up_to - min(done) >= most:
        return ticket
    return WorkerTicket(ticket.up_to + 1, min(granted))


def late_ranks(
    ticket: WorkerTicket, done: Sequence[int], *, raised_us: float, now_us: float, bound_us: float
) -> tuple[int, ...]:
    """Return the ranks that have not finished what was allowed within the bound: they are late.

    Args:
        ticket: published last.
        done: tasklets that each rank has finished.
        raised_us: when it was published.
        now_us: on the same clock.
        bound_us: how long its tasklet may take; the group's work ends beyond it.
    """
    if now_us - raised_us <= bound_us:
        return ()
    behind = min(done)
    if behind >= ticket.up_to:
        return ()
    return tuple(rank for rank, count in enumerate(done) if count == behind)
