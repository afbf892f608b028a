"""Decode's side of an arena for a worker's tests: lends what is wanted, and grants for ever."""

from __future__ import annotations

import threading

from windrow_sidecar._core import Arena
from windrow_sidecar.qos.view import Action, Grant, Offer

_GO = Grant(Action.GO, 2, in_flight_bound_us=20_000)


class LendingDecode(threading.Thread):
    """Lends up to `limit` chunks to whatever job offers work.

    Attributes:
        limit: may be changed at any time; what is above it is asked back.
        most_wanted: chunks that were wanted at some time.
        most_resident: layers that were in memory at some time.
    """

    def __init__(self, arena: Arena, limit: int) -> None:
        super().__init__(daemon=True)
        self.arena, self.limit, self.over = arena, limit, threading.Event()
        self.most_wanted = self.most_resident = 0

    def run(self) -> None:
        """Lend until `over` is set."""
        page, last = self.arena.page, None
        while not self.over.wait(0.01):
            page.beat(0)
            offer = Offer._make(page.read_offer())
            self.most_wanted = max(self.most_wanted, offer.wanted_chunks)
            self.most_resident = max(self.most_resident, offer.resident_layers)
            target = min(offer.wanted_chunks, self.limit)
            lent = self.arena.counts()[2]
            if offer.job_epoch and target > lent:
                self.arena.lend(target - lent, owner=offer.job_epoch)
            elif target < lent:
                self.arena.revoke(lent - target)
            if last != offer.job_epoch:
                last = offer.job_epoch
                page.publish_grant(_GO)

    def __enter__(self) -> LendingDecode:
        """Begin."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self.over.set()
        self.join()
