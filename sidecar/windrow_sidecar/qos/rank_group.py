"""Decide for the ranks of one slot which chunks are lent, asked back and handed back on all.

Rank 0 of decode decides from the tables of all ranks, and its decision travels in the engine's own
broadcast, so that every rank applies it in the same iteration. Nothing here waits: decode goes on
whatever a worker does (docs/design/0025). Pure functions; both engines lend by them
(`engines.harvest.group_chunks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RankPage:
    """Facts of one rank that rank 0 of decode reads before it decides.

    Attributes:
        drained: chunks that were asked back and that the rank's worker uses no more.
        failed: why the rank could not apply something; "": it could.
    """

    drained: frozenset[int] = NONE
    failed: str = ""


@dataclass(frozen=True, slots=True)
class GroupWish:
    """Chunks that decode's policy wants moved on all ranks.

    Attributes:
        lend: chunks that are free.
        owner: the job epoch that they are lent to.
        revoke: chunks that are wanted back.
        reclaim: the job epoch of a worker that is dead, which gives nothing back; 0: none.
    """

    lend: frozenset[int] = NONE
    owner: int = 0
    revoke: frozenset[int] = NONE
    reclaim: int = 0


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """An entry of the engine's broadcast: what every rank does in this iteration.

    Attributes:
        number: of the decision, from 1; each is applied once, in order.
        lend: chunks that each rank takes from its allocator and lends.
        owner: the job epoch that they are lent to.
        revoke: chunks that each rank asks its worker for.
        hand_back: chunks that have drained on all ranks: each allocator gets them.
        reclaim: the job epoch of a dead worker: each rank takes back what its own process had, once
            that has gone; 0: none.
        off: why harvesting is off for the group; "": it is on.
    """

    number: int
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
        lent: chunks that no allocator has.
        asked_back: those of them that have been revoked and not been handed back.
        dead: those of them that a dead worker had.
        dead_owner: its job epoch.
        off: why harvesting is off; it stays off until the group is made again.
    """

    number: int = 0
    lent: frozenset[int] = NONE
    asked_back: frozenset[int] = NONE
    dead: frozenset[int] = NONE
    dead_owner: int = 0
    off: str = ""


def decide(
    state: GroupLending, pages: Sequence[RankPage], wish: GroupWish
) -> tuple[GroupLending, GroupDecision]:
    """Return the group's next state and what its ranks have to do.

    A rank that could not apply something turns harvesting off on all: nothing is lent any more, and
    what is lent is asked back. Nor is anything lent until all of a dead worker's chunks are back.

    Args:
        state: after the last decision.
        pages: of all ranks, in their order.
        wish: of decode's policy.
    """
    failures = [f"rank {n}: {page.failed}" for n, page in enumerate(pages) if page.failed]
    off = state.off or (failures[0] if failures else "")
    # Of a chunk that one rank's worker still uses no rank's allocator may have the pages.
    hand_back = state.asked_back.intersection(*(page.drained for page in pages))
    lent = state.lent - hand_back
    dead = (state.lent if wish.reclaim else state.dead) - hand_back
    dead_owner = (wish.reclaim or state.dead_owner) if dead else 0
    lend = wish.lend - state.lent if not off and not dead else NONE
    asked_before = state.asked_back - hand_back
    revoke = (((wish.revoke | dead) & lent) if not off else lent) - asked_before
    number = state.number + 1
    decision = GroupDecision(
        number,
        lend,
        wish.owner if lend else 0,
        revoke,
        hand_back,
        dead_owner,
        off,
    )
    after = GroupLending(number, lent | lend, asked_before | revoke, dead, dead_owner, off)
    return after, decision


@dataclass(frozen=True, slots=True)
class RankLending:
    """Account that a rank keeps of its own chunks.

    Attributes:
        number: of the decision that it applied last.
        taken: chunks that its allocator does not have: the same on every rank.
        usable: those of them that its worker may use; one that could not be lent is not among them.
        asked_back: those of `taken` that have been revoked.
        failed: why it could not apply something.
    """

    number: int = 0
    taken: frozenset[int] = NONE
    usable: frozenset[int] = NONE
    asked_back: frozenset[int] = NONE
    failed: str = ""

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
        taken=(rank.taken | decision.lend) - decision.hand_back,
        usable=(rank.usable | (decision.lend - not_lent)) - decision.hand_back,
        asked_back=(rank.asked_back | decision.revoke) - decision.hand_back,
        failed=failed,
    )
