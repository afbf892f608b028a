"""Lend the chunks of an engine over ranks: rank 0 decides, and every rank does the same.

`HarvestStep` asks this in place of an arena. What it wants becomes one decision for each pass of
the engine (`qos.rank_group.decide`), which travels in rank 0's message to the others. A chunk comes
back to the allocators when every rank's worker has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from windrow_sidecar.engines.rank_chunks import RankChunks, borrowed
from windrow_sidecar.qos.rank_group import (
    NONE,
    GroupDecision,
    GroupLending,
    GroupWish,
    RankPage,
    decide,
)

# Kept free for KV's next chunk until there is traffic to size it by.
FIRST_RESERVE = 1


class GroupChunks:
    """The chunks that a group of ranks lends, as its rank 0 sees them. Decode's thread only.

    Args:
        own: of rank 0.
        others: each returns the states of another rank's chunks now (see `Arena.states`).
    """

    def __init__(self, own: RankChunks, others: Sequence[Callable[[], bytes]]) -> None:
        self._own, self._others = own, others
        self._applied = [0] * len(others)
        self._failed = [""] * len(others)
        self._group, self._wish = GroupLending(), GroupWish()
        self._reserve = FIRST_RESERVE
        self._owner = 0

    # What the step asks of an arena.

    def counts(self) -> tuple[int, int, int, int, int]:
        """Chunks FREE, KV, LENT, RESERVED and DRAINING, by what the ranks have agreed on."""
        home, kv, lent, _, draining = self._own.counts()
        reserved = min(home, self._reserve)
        return home - reserved, kv, lent, reserved, draining

    def set_reserve(self, chunks: int) -> int:
        """Keep so many chunks free for KV; returns how many are."""
        self._reserve = chunks
        return self.counts()[3]

    def lend(self, chunks: int, *, owner: int) -> list[int]:
        """Want so many chunks lent, from the highest; returns which will be.

        None while a rank has not applied the last decision, or a dead worker's chunks are out.
        """
        if self.waits or self._group.dead:
            return []
        most = min(chunks, self.counts()[0])
        lent = self._own.home[len(self._own.home) - most :]
        self._wish, self._owner = replace(self._wish, lend=frozenset(lent), owner=owner), owner
        return lent

    def revoke(self, chunks: int) -> list[int]:
        """Want so many chunks back, from the lowest; returns which will be asked for."""
        out = self._group.lent - self._group.asked_back - self._wish.revoke
        revoked = sorted(out)[:chunks]
        self._wish = replace(self._wish, revoke=self._wish.revoke | frozenset(revoked))
        return revoked

    def reclaim(self, owner: int) -> int:
        """Want all chunks back from a worker that is dead; returns how many there are."""
        self._wish = replace(self._wish, reclaim=owner)
        return len(self._group.lent)

    def peers(self) -> list[int]:
        """Process ids of those attached to rank 0's arena."""
        return self._own.peers()

    # What the engine does with it.

    @property
    def waits(self) -> bool:
        """True while a rank has not said that it applied the last decision."""
        return any(number != self._group.number for number in self._applied)

    @property
    def off(self) -> str:
        """Reason why harvesting is off on all ranks; "": it is on."""
        return self._group.off

    @property
    def lent(self) -> frozenset[int]:
        """Chunks that no rank's allocator has."""
        return self._group.lent

    def heard(self, rank: int, *, applied: int, failed: str) -> None:
        """Note what a rank says: its last decision, and why it could not apply one ("": it did)."""
        self._applied[rank - 1] = max(applied, self._applied[rank - 1])
        self._failed[rank - 1] = self._failed[rank - 1] or failed

    def decide(self, *, harvests: bool) -> GroupDecision | None:
        """Return what all ranks do in this pass, applied here already; None: nothing.

        `harvests`: whether the engine's hook still decides; else all comes back.
        """
        if self.waits:  # what the last one lends is not in that rank's table yet
            return None
        if not harvests and self._group.lent:
            self.revoke(len(self._group.lent))
            if not self._group.dead and not self.peers():
                self.reclaim(self._owner)
        pages = self._pages()
        wish = replace(self._wish, revoke=self._wish.revoke | self._left(pages))
        after, decision = decide(self._group, pages, wish)
        if not decision.moves and after.off == self._group.off:
            return None
        self._group, self._wish = after, GroupWish()
        self._own.apply(decision)
        return decision

    def _pages(self) -> list[RankPage]:
        lent = self._group.lent
        held = self._own.borrowed() if lent else NONE
        pages = [RankPage(drained=lent - held, failed=self._own.failed)]
        for read, failed in zip(self._others, self._failed, strict=True):
            pages.append(RankPage(lent - borrowed(read()) if lent else NONE, failed=failed))
        return pages

    def _left(self, pages: Sequence[RankPage]) -> frozenset[int]:
        """Return the chunks that a rank's worker has left before it was asked to."""
        return frozenset().union(*(page.drained for page in pages)) - self._group.asked_back
