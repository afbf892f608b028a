"""Chunks of one rank's arena as all ranks of its engine have agreed on them.

Every rank has a page allocator of its own and has to compute the same from it, so which chunks it
may take must never depend on when this rank's worker gives one back. What counts here is therefore
the account of what rank 0 has decided (`qos.rank_group`); the arena's table follows it.
"""

from __future__ import annotations

import logging
from bisect import insort
from dataclasses import replace

from windrow_sidecar._core import DRAINING, FREE, KV, LENT, Arena, Geometry, OwnershipError
from windrow_sidecar.qos.rank_group import GroupDecision, RankLending, applied

_log = logging.getLogger(__name__)


def borrowed(states: bytes) -> frozenset[int]:
    """Return the chunks that a worker has, by the states of all (see `Arena.states`)."""
    return frozenset(c for c, state in enumerate(states) if state in (LENT, DRAINING))


class RankChunks:
    """The chunks of a rank: `ChunkSource` of its page allocator, moved as rank 0 has decided.

    One thread, which is decode's. No call raises for what the table of owners says: where it
    differs from the account, the account counts, `failed` says why, and rank 0 ends harvesting.

    Args:
        arena: of this rank, without a reserve: rank 0 keeps that in its account.

    Attributes:
        lending: the rank's account of what is lent.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._home = list(range(arena.geometry.chunks))  # neither KV's nor the worker's, ascending
        self._kv: set[int] = set()
        self._states = bytearray([FREE] * arena.geometry.chunks)
        self._users: dict[int, set[int]] = {}  # processes that were attached, by epoch
        self.lending = RankLending()

    @property
    def failed(self) -> str:
        """Reason why this rank could not apply what was decided; "": it could."""
        return self.lending.failed

    @property
    def geometry(self) -> Geometry:
        """Sizes of the arena."""
        return self._arena.geometry

    def states(self) -> bytes:
        """Return one byte a chunk, as `Arena.states` has them, by the account."""
        return bytes(self._states)

    @property
    def home(self) -> list[int]:
        """Chunks that neither KV nor a worker has, ascending."""
        return self._home

    def take_kv(self) -> int:
        """Return the lowest chunk that KV may have, which is KV's from now on; -1: none."""
        if not self._home:
            return -1
        chunk = self._home.pop(0)
        self._kv.add(chunk)
        self._states[chunk] = KV
        try:
            self._arena.take_kv_chunk(chunk)
        except OwnershipError as error:
            self._fail(str(error))
        return chunk

    def return_kv(self, chunk: int) -> None:
        """Take back a chunk that has no KV any more."""
        self._kv.discard(chunk)
        self._states[chunk] = FREE
        insort(self._home, chunk)
        try:
            self._arena.return_kv(chunk)
        except OwnershipError as error:
            self._fail(str(error))

    def counts(self) -> tuple[int, int, int, int, int]:
        """Chunks FREE, KV, LENT, RESERVED (none here) and DRAINING, by the account."""
        draining = len(self.lending.asked_back)
        lent = len(self.lending.taken) - draining
        return len(self._home), len(self._kv), lent, 0, draining

    def peers(self) -> list[int]:
        """Process ids of those attached to this rank's arena."""
        return self._arena.peers()

    def borrowed(self) -> frozenset[int]:
        """Return the chunks that the worker has, by the table."""
        return borrowed(self._arena.states())

    def apply(self, decision: GroupDecision) -> None:
        """Do what rank 0 has decided.

        Raises:
            ValueError: a decision is missing, or does not fit what this rank lends.
        """
        not_lent = set()
        if decision.lend:
            self._users.setdefault(decision.owner, set()).update(self._arena.peers())
        for chunk in sorted(decision.lend):
            self._home.remove(chunk)
            try:
                self._arena.lend_chunk(chunk, owner=decision.owner)
            except (OwnershipError, ValueError) as error:
                _log.error("chunk %d cannot be lent: %s", chunk, error)
                not_lent.add(chunk)
        for chunk in sorted(decision.revoke):
            self._arena.revoke_chunk(chunk)
        if decision.reclaim:
            self._reclaim(decision.reclaim)
        self.lending = applied(self.lending, decision, frozenset(not_lent))
        for chunk in decision.hand_back:
            insort(self._home, chunk)
        moved = (decision.lend, LENT), (decision.revoke, DRAINING), (decision.hand_back, FREE)
        for chunks, state in moved:
            for chunk in chunks:
                self._states[chunk] = state

    def _reclaim(self, owner: int) -> None:
        """Take back what a dead worker had, once its process of this rank has gone.

        Its first rank may be dead for a moment before the others are.
        """
        users, peers = self._users.setdefault(owner, set()), set(self._arena.peers())
        if not users:
            users |= peers
        if not users & peers:
            self._arena.reclaim(owner)
            del self._users[owner]

    def _fail(self, why: str) -> None:
        _log.error("the table of chunks differs from what the ranks have agreed on: %s", why)
        if not self.lending.failed:
            self.lending = replace(self.lending, failed=why)
