"""How many chunks the worker may hold: what KV needs at once stays in reserve, KV always wins."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

# Q99 over so many windows: at 50 ms each, the last half minute of traffic.
_WINDOWS = 600
# Growing again needs so much more than the reserve, else a request's chunks would go to and fro.
GROW_REST_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Chunks:
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
    """What to do now. `target` is what the worker is told that it may hold."""

    target: int
    lend: int = 0
    revoke: int = 0


def reserve_chunks(
    *,
    release_us: float,
    objective_us: int,
    max_batch: int,
    admitted_q99_tokens: int,
    slots_per_chunk: int,
    total: int,
) -> int:
    """Chunks that must be free at once while the worker needs `release_us` to give some back.

    One decode step adds a token to each request: Harli's (T / S) * max_batch. In a disaggregated
    pod whole prompts arrive as well: the 99th percentile of what was admitted within T. At least
    one chunk, at most a quarter of the arena (beyond that, lending would be pointless).
    """
    growth = release_us / objective_us * max_batch if objective_us else 0.0
    chunks = math.ceil((growth + admitted_q99_tokens) / slots_per_chunk)
    return max(1, min(chunks, total // 4))


def plan_lending(
    chunks: Chunks,
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


class AdmissionRate:
    """Context tokens that arrive within windows of a fixed length; the 99th percentile of them."""

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._sums: deque[int] = deque(maxlen=_WINDOWS)
        self._begin_ns, self._sum = 0, 0

    def add(self, now_ns: int, tokens: int) -> None:
        """Count what was admitted at that time; times never fall."""
        if now_ns - self._begin_ns >= self._window_ns:
            if self._begin_ns:
                self._sums.append(self._sum)
                # Windows without a step are windows without an arrival.
                empty = (now_ns - self._begin_ns) // self._window_ns - 1
                self._sums.extend([0] * min(empty, _WINDOWS))
            self._begin_ns, self._sum = now_ns, 0
        self._sum += tokens

    def q99(self) -> int:
        """Tokens; of few windows, the largest."""
        ordered = sorted((*self._sums, self._sum))
        return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
