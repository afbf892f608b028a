"""Plan how many chunks to lend or revoke; the reserve of KV comes first."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Growing again needs so much more than the reserve, else a request's chunks would go to and fro.
GROW_REST_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """Counts by state, in the order in which the arena gives them."""

    free: int
    kv: int
    lent: int
    reserved: int
    draining: int

    @property
    def total(self) -> int:
        """All chunks of the arena."""
        return self.free + self.kv + self.lent + self.reserved + self.draining


@dataclass(frozen=True, slots=True)
class LendingPlan:
    """Plan of what to lend and take back now. `target` is what the worker may hold."""

    target: int
    lend: int = 0
    revoke: int = 0


def plan_lending(
    chunks: ChunkCounts,
    *,
    wanted: int,
    limit: int,
    reserve: int,
    kv_short: bool,
    since_revoke_ns: int,
) -> LendingPlan:
    """Decide how many chunks to lend or to ask back.

    Asks back: what is over `limit` or `wanted`; what the reserve lacks; and a quarter of all lent
    chunks at a time while a request finds no room (`kv_short`), for a prompt may need more than the
    reserve holds. Lends: only what is free beyond a whole second reserve, and not right after a
    revocation. What is already draining counts as asked for.
    """
    ceiling = max(0, min(wanted, limit))
    short = max(0, reserve - chunks.reserved - chunks.free - chunks.draining)
    if kv_short and not chunks.draining:
        short = max(short, math.ceil(chunks.lent / 4))
    revoke = min(chunks.lent, max(short, chunks.lent - ceiling))
    if revoke:
        return LendingPlan(chunks.lent - revoke, revoke=revoke)
    spare = chunks.free - max(0, reserve - chunks.reserved) - reserve
    if spare <= 0 or kv_short or since_revoke_ns < GROW_REST_NS:
        return LendingPlan(chunks.lent)
    lend = min(spare, ceiling - chunks.lent)
    return LendingPlan(chunks.lent + lend, lend=lend)
