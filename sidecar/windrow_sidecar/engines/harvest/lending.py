"""Lend, revoke and reclaim chunks as `qos.lending` plans it."""

from __future__ import annotations

from windrow.metrics import CHUNK_RETURN_BUCKETS_SECONDS
from windrow_sidecar._core import Arena
from windrow_sidecar.engines.harvest.marks import HarvestMarks
from windrow_sidecar.engines.harvest.settings import HarvestSettings
from windrow_sidecar.engines.harvest.stats import BucketCounts
from windrow_sidecar.qos.lending import ChunkCounts, plan_lending
from windrow_sidecar.qos.reserve import AdmissionRate, Demand, reserve_chunks
from windrow_sidecar.qos.terms import HarvestTerms
from windrow_sidecar.qos.view import Offer

# The reserve follows the traffic once a second: sorting 600 windows takes about 40 us.
_RESERVE_EVERY_NS = 1_000_000_000


class LendingCounts:
    """Chunks that moved since the start, and how long the worker took to give them back."""

    def __init__(self) -> None:
        self.lent = self.revoked = self.reclaimed = 0
        self.return_seconds = BucketCounts(CHUNK_RETURN_BUCKETS_SECONDS)


class LendingManager:
    """Moves chunks between decode and the worker. Decode's thread only."""

    def __init__(self, arena: Arena, settings: HarvestSettings, marks: HarvestMarks) -> None:
        self._arena, self._settings, self._marks = arena, settings, marks
        self._admitted = AdmissionRate(settings.admission_window_ns)
        self._owner = 0  # epoch of the job whose worker holds chunks; 0: nobody
        if "reserve" in settings.without:
            arena.set_reserve(0)
        self._reserve = arena.counts()[3]
        self._release_us = float(settings.drain_us)
        self._revoked_ns, self._draining_since_ns = 0, 0
        self._planned_ns, self._sized_ns = 0, 0
        self.target = 0
        self.moved = LendingCounts()
        # Chunks that would have to be FREE before all of what the worker wants could be lent.
        self.lacking = 0

    @property
    def holds_out(self) -> bool:
        """True while a worker may still hold chunks."""
        return self._owner != 0

    def admit(self, now_ns: int, tokens: int) -> None:
        """Count context tokens that joined."""
        self._admitted.add(now_ns, tokens)

    def plan(
        self,
        now_ns: int,
        chunks: ChunkCounts,
        offer: Offer,
        terms: HarvestTerms | None,
        *,
        kv_short: bool,
    ) -> int:
        """Lend or revoke as needed; returns how many chunks the worker may hold now.

        Cheap when nothing presses: then it plans every 20 ms only.
        """
        self._watch_draining(now_ns, chunks)
        pressed = chunks.lent and (kv_short or chunks.reserved + chunks.free < self._reserve)
        if not pressed and now_ns - self._planned_ns < self._settings.lending_every_ns:
            return self.target
        self._planned_ns = now_ns
        if self._owner and not offer.job_epoch and not self._arena.peers():
            # Nobody is attached any more: with the agent that could say so, the worker died too.
            self.reclaim_unless(now_ns, 0)
        harvest = terms is not None and terms.mode == "harvest"
        limit = chunks.total * terms.max_memory_percent // 100 if terms and harvest else 0
        # Chunks of an earlier worker that is not known dead yet: nobody else may have them.
        fenced = self._owner not in (0, offer.job_epoch)
        wanted = 0 if fenced else offer.wanted_chunks
        plan = plan_lending(
            chunks,
            wanted=wanted,
            limit=limit,
            reserve=self._reserve,
            kv_short=kv_short,
            since_revoke_ns=now_ns - self._revoked_ns if self._revoked_ns else 1 << 62,
        )
        ceiling = min(wanted, limit)
        beyond = max(0, ceiling - chunks.lent)
        self.lacking = (
            max(0, beyond + 2 * self._reserve - chunks.free - chunks.reserved) if ceiling else 0
        )
        if plan.revoke:
            self._revoke(now_ns, plan.revoke)
        elif plan.lend:
            self._lend(now_ns, plan.lend, offer.job_epoch)
        self.target = plan.target if not fenced else 0
        return self.target

    def size_reserve(
        self, now_ns: int, terms: HarvestTerms | None, in_flight_bound_us: int
    ) -> None:
        """Fit the reserve to the traffic, once a second. Belongs after a step."""
        if terms is None or now_ns - self._sized_ns < _RESERVE_EVERY_NS:
            return
        if "reserve" in self._settings.without:
            return
        self._sized_ns = now_ns
        geometry = self._arena.geometry
        demand = Demand(
            release_us=in_flight_bound_us + self._release_us,
            objective_us=terms.objective_us,
            max_batch=self._settings.max_batch,
            token_bytes=geometry.chunk_bytes // geometry.slots_per_chunk,
            admitted_q99_tokens=self._admitted.q99(),
        )
        wanted = reserve_chunks(
            demand,
            chunk_bytes=geometry.chunk_bytes,
            total=geometry.chunks,
            formula=self._settings.reserve,
        )
        if wanted != self._reserve:
            self._arena.set_reserve(wanted)
            self._reserve = wanted

    def reclaim_unless(self, now_ns: int, live_epoch: int) -> None:
        """Take back what was lent, unless to the one worker that is known to live."""
        if self._owner in (0, live_epoch):
            return
        taken = self._arena.reclaim(self._owner)
        self.moved.reclaimed += taken
        self._marks.add(now_ns, "reclaim", f"{taken} chunks of epoch {self._owner}")
        self._owner, self.target = 0, 0
        self._draining_since_ns = 0

    def _lend(self, now_ns: int, wanted: int, owner: int) -> None:
        lent = self._arena.lend(wanted, owner=owner)
        if lent:
            self._owner = owner
            self.moved.lent += len(lent)
            self._marks.add(now_ns, "lend", f"{len(lent)} chunks")

    def _revoke(self, now_ns: int, wanted: int) -> None:
        asked = self._arena.revoke(wanted)
        if asked:
            self._revoked_ns = now_ns
            self.moved.revoked += len(asked)
            self._draining_since_ns = self._draining_since_ns or now_ns
            self._marks.add(now_ns, "revoke", f"{len(asked)} chunks")

    def _watch_draining(self, now_ns: int, chunks: ChunkCounts) -> None:
        """Measure how long the worker takes to give back: the reserve has to last so long."""
        if not chunks.draining and self._draining_since_ns:
            took_us = (now_ns - self._draining_since_ns) / 1e3
            self._release_us = max(took_us, 0.9 * self._release_us + 0.1 * took_us)
            self._draining_since_ns = 0
            self.moved.return_seconds.add(took_us / 1e6)
        if not chunks.draining and not chunks.lent:
            self._owner = 0
