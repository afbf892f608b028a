"""The ways of sharing that are measured, as hooks of the decode loop.

`windrow` is the product's own hook (`engines.harvest`). The two here are what it is held against,
over the same page and the same worker: one fixed share (a point of the profile), and in turn.
"""

from __future__ import annotations

import time
from collections import deque

from windrow_sidecar._core import Arena
from windrow_sidecar.engines.hook import NullHook, StepInput
from windrow_sidecar.qos.levels import PartitionLevel
from windrow_sidecar.qos.view import Action, Grant, Offer

_WORKER_STOPS_WITHIN_S = 10.0
_REGRANT_NS = 50_000_000


class Granting(NullHook):
    """Grants over the page, lends what the worker wants; base of the arms.

    Args:
        arena: made by this process.
        units: of the device.
        kept_chunks: that decode needs for its load: never lent.
    """

    def __init__(self, arena: Arena, units: int, kept_chunks: int = 0) -> None:
        self._arena, self._page, self._units = arena, arena.page, units
        self._most_lent = max(0, arena.geometry.chunks - kept_chunks)
        self._granted = Grant(pause_epoch=arena.page.pause_epoch)
        self._published_ns = 0

    def close(self) -> None:
        """Pause the worker, wait until it is quiet and has given its chunks back.

        Raises:
            TimeoutError: it does not.
        """
        self.pause()
        self._arena.revoke(self._arena.geometry.chunks)
        deadline = time.monotonic() + _WORKER_STOPS_WITHIN_S
        while self._lent() or not self.is_quiet():
            if time.monotonic() > deadline:
                offer = self.offer()
                raise TimeoutError(
                    f"the worker has not stopped after a pause of {_WORKER_STOPS_WITHIN_S:g} s: it "
                    f"has seen pause {offer.pause_epoch_seen} of {self._granted.pause_epoch}, runs "
                    f"{offer.in_flight_us} us and holds {self._lent()} chunks"
                )
            self._page.beat(0)
            time.sleep(0.001)

    def offer(self) -> Offer:
        """The worker's newest."""
        return Offer._make(self._page.read_offer())

    def grant(self, decision: Grant) -> None:
        """Publish it, unless nothing has changed for a while."""
        now_ns = time.monotonic_ns()
        if decision == self._granted and now_ns - self._published_ns < _REGRANT_NS:
            return
        self._granted, self._published_ns = decision, now_ns
        self._page.publish_grant(decision)

    def pause(self) -> None:
        """No tasklet may begin any more."""
        epoch = self._granted.pause_epoch + 1
        self.grant(Grant(Action.PAUSE, decode_units=self._units, pause_epoch=epoch))

    def is_quiet(self) -> bool:
        """Return whether it has seen the last pause and runs nothing."""
        offer = self.offer()
        return offer.pause_epoch_seen >= self._granted.pause_epoch and not offer.in_flight_us

    def lend(self) -> None:
        """Lend what it wants and does not have, of what decode does not need."""
        offer = self.offer()
        missing = min(offer.wanted_chunks, self._most_lent) - self._lent()
        if offer.job_epoch and missing > 0:
            self._arena.lend(missing, owner=offer.job_epoch)

    def _lent(self) -> int:
        _, _, lent, _, draining = self._arena.counts()
        return lent + draining


class FixedShare(Granting):
    """The worker always has one share, whatever decode feels of it."""

    def __init__(
        self, arena: Arena, units: int, kept_chunks: int, split: PartitionLevel, bound_us: int
    ) -> None:
        super().__init__(arena, units, kept_chunks)
        self._go = Grant(
            Action.GO,
            split.finetune_units,
            split.decode_units,
            pause_epoch=self._granted.pause_epoch,
            in_flight_bound_us=bound_us,
        )

    def before_step(self, facts: StepInput) -> Grant:
        """Grant it again."""
        self.share()
        return self._go

    def share(self) -> None:
        """The same where decode takes no step."""
        self.lend()
        self.grant(self._go)


class Gaps(Granting):
    """Policy in turns: the worker has the whole device until a step must begin for the objective.

    The only hook that waits: decode pauses meanwhile, which is what sharing in time means.
    """

    def __init__(self, arena: Arena, units: int, kept_chunks: int, objective_us: int) -> None:
        super().__init__(arena, units, kept_chunks)
        self._objective_us = objective_us
        self._steps_us: deque[float] = deque(maxlen=64)
        self._waited_us = 0.0

    def before_step(self, facts: StepInput) -> Grant:
        """Let the worker run for what the step leaves of the objective, then wait for its end."""
        began_ns = time.monotonic_ns()
        self.lend()
        used_us = (began_ns - facts.start_ns) / 1e3
        spare_us = self._objective_us - self._step_us() - used_us
        if self._steps_us and spare_us > 0:
            self._let_run(int(spare_us))
        self._waited_us = (time.monotonic_ns() - began_ns) / 1e3
        return Grant(decode_units=self._units)

    def after_step(self, end_ns: int, latency_us: int) -> None:
        """Learn how long a step takes alone."""
        del end_ns
        self._steps_us.append(latency_us - self._waited_us)

    def _step_us(self) -> float:
        """A slow step: one in twenty of the last takes longer."""
        steps = sorted(self._steps_us)
        return steps[int(0.95 * (len(steps) - 1))] if steps else 0.0

    def _let_run(self, spare_us: int) -> None:
        deadline_ns = time.monotonic_ns() + spare_us * 1000
        # Tasklets of a quarter of the gap: what does not fit any more is lost.
        self.grant(
            self._granted._replace(
                action=Action.GO,
                finetune_units=self._units,
                decode_units=self._units,
                budget_us=spare_us,
                in_flight_bound_us=max(1, spare_us // 4),
            )
        )
        seen = self._page.offer_seq
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:
            seen = self._page.wait_offer(seen, timeout_s=left_ns / 1e9)
        self.pause()
        while not self.is_quiet():
            seen = self._page.wait_offer(seen, timeout_s=0.1)
