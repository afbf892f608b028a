"""Size the reserve: chunks kept free for KV until lent ones are back.

Two formulas: `harli`, that of the Harli paper, counts the tokens that running requests grow by;
`traffic` counts the prompts as well that arrive meanwhile, for in a disaggregated pod they arrive
whole. On the Azure conversation trace, with 50 ms to let go and a batch of 128 at 50 ms a token of
Llama-3-8B, the first gives 17 MB and the second 7 chunks of 128 MiB.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

ReserveFormula = Literal["traffic", "harli"]

# Q99 over so many windows: at 50 ms each, the last half minute of traffic.
_WINDOWS = 600


@dataclass(frozen=True, slots=True)
class Demand:
    """Memory that KV may ask for before lent memory is back.

    Attributes:
        release_us: T, from asking until a chunk is free: the in-flight bound and the drain.
        objective_us: S, the objective for the time per output token; 0: none, growth is left out.
        max_batch: requests that decode runs at once, each of which grows by a token in a step.
        token_bytes: K and V of one token in all layers.
        admitted_q99_tokens: 99th percentile of the context tokens that are admitted within T.
    """

    release_us: float
    objective_us: int
    max_batch: int
    token_bytes: int
    admitted_q99_tokens: int = 0


def harli_bytes(demand: Demand) -> float:
    """(T / S) * max_batch * token_bytes: a step adds a token to each request."""
    if not demand.objective_us:
        return 0.0
    return demand.release_us / demand.objective_us * demand.max_batch * demand.token_bytes


def traffic_bytes(demand: Demand) -> float:
    """Harli's, and the prompts that are admitted within T."""
    return harli_bytes(demand) + demand.token_bytes * demand.admitted_q99_tokens


FORMULAS = {"traffic": traffic_bytes, "harli": harli_bytes}


def reserve_chunks(
    demand: Demand, *, chunk_bytes: int, total: int, formula: ReserveFormula = "traffic"
) -> int:
    """Return how many of `total` chunks to keep free.

    At least one, for KV's next chunk must never wait; at most a quarter of the arena, beyond which
    lending would be pointless.
    """
    chunks = math.ceil(FORMULAS[formula](demand) / chunk_bytes)
    return max(1, min(chunks, total // 4))


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
