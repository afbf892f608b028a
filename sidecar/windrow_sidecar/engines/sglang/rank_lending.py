"""Lend the KV of an SGLang engine over ranks: the same chunks on all, in the same iteration.

SGLang's page allocator runs on each rank, and how many pages it has decides which requests run. So
rank 0 decides what moves; its `ChunkMoves` travel in SGLang's own broadcast (`ranks.RankOrder`),
and every rank applies them where that broadcast ends: between the same two allocations. Ranks
answer on the pages of their arenas, which rank 0 reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from windrow.errors import InvariantBroken
from windrow_sidecar._core import Inspection, Page
from windrow_sidecar.engines.harvest.group_chunks import GroupChunks
from windrow_sidecar.engines.rank_chunks import RankChunks
from windrow_sidecar.engines.rank_pages import APPLIED, QUIET
from windrow_sidecar.qos.rank_group import GroupDecision


class ChunkMoves(NamedTuple):
    """Chunks that every rank moves at the end of a broadcast, in the order of the fields.

    Attributes:
        decision: chunks that are lent, asked back and handed back; None: none is.
        quiet: number of the last set of empty chunks to which no rank writes any more: those up to
            it may be lent.
        keep_pages: free pages to have at hand.
        set_free: so many empty chunks are to be taken out of use, keeping those pages.
    """

    decision: GroupDecision | None = None
    quiet: int = 0
    keep_pages: int = 0
    set_free: int = 0


class LendingRank:
    """One rank's chunks under SGLang's allocator. The scheduler's thread.

    Args:
        chunks: of this rank's arena, as all ranks have agreed on them.
        allocator: SGLang's, over those chunks (see `allocator.allocator_class`).
        page: of this rank's arena; its counters are zero.

    Attributes:
        none_was_empty: whether no chunk was, when empty ones were last wanted.
    """

    def __init__(self, chunks: RankChunks, allocator: Any, page: Page) -> None:  # noqa: ANN401
        self.chunks, self.allocator, self._page = chunks, allocator, page
        self._told = {APPLIED: 0, QUIET: 0}
        self._complained = False
        self.none_was_empty = False

    def apply(self, moves: ChunkMoves) -> None:
        """Do what rank 0 has decided, as every rank does now.

        Raises:
            ValueError: a decision is missing, or does not fit what this rank lends.
        """
        decision, allocator = moves.decision, self.allocator
        if decision is not None and decision.number > self.chunks.lending.number:
            self.chunks.apply(decision)  # rank 0 did so when it decided
        allocator.give(moves.quiet)
        allocator.chunks.refresh()
        allocator.hold(moves.keep_pages)
        if moves.set_free:
            freed = allocator.set_free(moves.set_free, keep_pages=moves.keep_pages)
            self.none_was_empty = not freed

    def tell(self, now_ns: int) -> None:
        """Leave on this rank's page what rank 0 has to know; a few loads where it is no news.

        Raises:
            InvariantBroken: once, where this rank could not apply what was decided.
        """
        facts = {APPLIED: self.chunks.lending.number, QUIET: self.allocator.quiet(now_ns)}
        for counter, value in facts.items():
            if value != self._told[counter]:
                self._page.add(counter, value - self._told[counter])
                self._told[counter] = value
        if self.chunks.failed and not self._complained:
            self._complained = True
            raise InvariantBroken(self.chunks.failed)


class LeadingRank:
    """Rank 0's view of the chunks of all ranks, and what it decides on them.

    Args:
        own: rank 0's chunks.
        others: the arenas of the other ranks, from rank 1 on.

    Attributes:
        group: what the step hook asks in place of an arena.
    """

    def __init__(self, own: LendingRank, others: Sequence[Inspection]) -> None:
        self._own, self._others = own, others
        self.group = GroupChunks(own.chunks, [other.states for other in others])

    def found_none_empty(self) -> bool:
        """Return, once, whether no chunk was empty when such chunks were last wanted."""
        found, self._own.none_was_empty = self._own.none_was_empty, False
        return found

    def moves(
        self, now_ns: int, *, harvests: bool, keep_pages: int, set_free: int
    ) -> ChunkMoves | None:
        """Return what all ranks move with the next broadcast; None: nothing.

        The decision in it is applied on rank 0 already.

        Args:
            now_ns: on CLOCK_MONOTONIC.
            harvests: whether the step hook still decides; else all comes back.
            keep_pages: free pages that are not lent.
            set_free: empty chunks that are wanted out of use.
        """
        for rank, other in enumerate(self._others, 1):
            # Its failure comes by another way (`SchedulerRanks.failure`).
            self.group.heard(rank, applied=other.counter(APPLIED), failed="")
        allocator = self._own.allocator
        decision = self.group.decide(harvests=harvests)
        quiet = min(allocator.quiet(now_ns), *(other.counter(QUIET) for other in self._others))
        if decision or set_free or allocator.gives(quiet) or allocator.lacks(keep_pages):
            return ChunkMoves(decision, quiet, keep_pages, set_free)
        return None
