"""The arena and the page as the step hook knows them, in simulated time.

They stand at the seam where production has shared memory: the step calls them as it calls those of
`windrow_sidecar._core`, with the same rules of who may have which chunk. Chunks have no bytes here,
so those of a state are counted, not named; nobody reads a view, and nobody falls silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windrow.errors import InvariantBroken
from windrow_sidecar.qos.view import Grant, Offer


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Geometry of an arena, as far as the hook asks for it."""

    chunks: int
    chunk_bytes: int
    slots_per_chunk: int
    layers: int = 1


class SimulatedPage:
    """Offer and grant. `offer` is asked when decode reads it, `granted` called with each grant."""

    pause_epoch = 0
    grant_seq = 0

    def __init__(self, offer: Callable[[], Offer], granted: Callable[[Grant], None]) -> None:
        self._offer, self._granted = offer, granted

    def publish_grant(self, grant: Grant) -> None:
        """Hand it to the worker."""
        self.grant_seq += 1
        self._granted(grant)

    def read_offer(self) -> Offer:
        """Ask the worker."""
        return self._offer()


class SimulatedArena:
    """Chunks by state. The owner's calls are decode's, `give_back` is the worker's."""

    def __init__(self, geometry: ArenaGeometry, page: SimulatedPage, *, reserved: int) -> None:
        self.geometry, self.page = geometry, page
        self._free, self._kv, self._lent, self._draining = geometry.chunks, 0, 0, 0
        self._reserved = self._reserve_wanted = 0
        self._owner = 0
        self.set_reserve(reserved)

    def counts(self) -> tuple[int, int, int, int, int]:
        """FREE, KV, LENT, RESERVED, DRAINING."""
        return self._free, self._kv, self._lent, self._reserved, self._draining

    def take_kv(self) -> int:
        """A chunk for KV: a free one, else one of the reserve; -1 when there is none."""
        if self._free:
            self._free -= 1
        elif self._reserved:
            self._reserved -= 1
        else:
            return -1
        self._kv += 1
        return self._kv

    def return_kv(self, chunk: int = 0) -> None:
        """A chunk that KV does not need any more; the reserve is filled first."""
        del chunk
        self._kv -= 1
        self._come_back(1)

    def set_reserve(self, chunks: int) -> int:
        """Ask for a reserve of that size; a surplus becomes free."""
        self._reserve_wanted = chunks
        moved = min(self._free, chunks - self._reserved)
        self._free -= moved
        self._reserved += moved
        return self._reserved

    def lend(self, chunks: int, *, owner: int) -> list[int]:
        """Lend up to that many free chunks; a short reserve is filled first."""
        self.set_reserve(max(self._reserve_wanted, self._reserved))
        lent = min(chunks, self._free)
        self._free -= lent
        self._lent += lent
        if lent:
            self._owner = owner
        return [0] * lent

    def revoke(self, chunks: int) -> list[int]:
        """Drain up to that many lent chunks; the worker gives them back."""
        asked = min(chunks, self._lent)
        self._lent -= asked
        self._draining += asked
        return [0] * asked

    def reclaim(self, owner: int) -> int:
        """All of a gone borrower's chunks."""
        del owner
        taken = self._lent + self._draining
        self._lent = self._draining = 0
        self._come_back(taken)
        return taken

    def give_back_draining(self) -> int:
        """The worker has let go of what was asked back."""
        given, self._draining = self._draining, 0
        self._come_back(given)
        return given

    def peers(self) -> list[int]:
        """Process ids of those attached: one, always."""
        return [1]

    def check(self, kv_tokens: int) -> None:
        """Verify that every chunk is in one state and that KV has room for its tokens.

        Raises:
            InvariantBroken: it does not add up.
        """
        counts = self.counts()
        room = self._kv * self.geometry.slots_per_chunk
        if min(counts) < 0 or sum(counts) != self.geometry.chunks or kv_tokens > room:
            raise InvariantBroken(f"chunks {counts} of {self.geometry}, {kv_tokens} tokens of KV")

    def _come_back(self, chunks: int) -> None:
        filled = max(0, min(chunks, self._reserve_wanted - self._reserved))
        self._reserved += filled
        self._free += chunks - filled
