"""Decide whether the worker may run under decode's newest grant, and publish its offers.

The worker asks before every launch and never holds on to an answer: what it has in flight, running
and queued, stays within the bound of the grant (on the host: one tasklet). Silence of decode means
pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from windrow_sidecar._core import Page
from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.compute.partition import Partition
from windrow_sidecar.finetune.colocated.allowance import (
    DECODE_STALE_NS,
    Allowance,
    Used,
    may_launch,
)
from windrow_sidecar.finetune.engine.sizing import Estimates
from windrow_sidecar.finetune.job.in_flight import InFlight, Ran
from windrow_sidecar.finetune.model.decoder_stack import DecoderStack
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.qos.levels import offered_levels
from windrow_sidecar.qos.view import UNKNOWN_US, Grant, Offer, Phase

# Decode that is merely slow (a long prefill) is heard again within this.
ASK_AFTER_SILENCE_NS = 2_000_000_000
# While waiting: often enough that decode, which takes a second of silence for death, sees us beat.
WAIT_S = 0.2
# How long a tasklet waits in its middle before it is given up, so that commands are heard.
PATIENCE_NS = 2_000_000_000
_DECODE, _WORKER = 0, 1
# A tasklet is run in parts where a grant is shorter than it; less than this is left unused, since
# caches are cold at the start of a part.
LEAST_PART_US = 1_000
# Until decode says otherwise: a quarter of an objective of 20 ms.
DEFAULT_BOUND_US = 5_000


class OfferFacts(NamedTuple):
    """Facts that the worker adds to each offer besides the tasklet."""

    job_epoch: int
    wanted_chunks: int = 0
    held_chunks: int = 0
    tokens_done: int = 0
    starving: bool = False
    bytes_per_token: int = 0  # that a layer holds from its forward to its backward
    window_bytes_per_token: int = 0  # besides, where it runs on windows of tokens
    resident_layers: int = 0  # whose weights are in memory


def memory_delta_bytes(tasklet: Tasklet, bytes_per_token: int, of_windows: int = 0) -> int:
    """Return how many bytes more the worker holds after a tasklet than before.

    `of_windows`: bytes a token besides, of a tasklet on a part of its rows.
    """
    if tasklet.micro is None or tasklet.micro.evaluation:
        return 0
    a_token = bytes_per_token + (of_windows if of_windows and tasklet.is_window else 0)
    n_bytes = tasklet.tokens * tasklet.parts * a_token
    if tasklet.phase is Phase.FORWARD:
        return n_bytes
    return -n_bytes if tasklet.phase is Phase.BACKWARD else 0


@dataclass(slots=True)
class _Running:
    """Tasklet that was launched and has not landed.

    Attributes:
        tasklet: that runs.
        units: that it runs on.
        estimate_us: of all of it, or of what is left since it waited; 0: there is none yet.
        wait_us: how long decode would wait for it.
        held_ns: how long it has waited in its middle.
        grew: whether it has more units than it began with.
        point_ns: when it could be stopped last.
        stretch_ns: the longest time between two such points.
    """

    tasklet: Tasklet
    units: int
    estimate_us: int
    wait_us: int
    held_ns: int = 0
    grew: bool = False
    point_ns: int = 0
    stretch_ns: int = 0

    def pass_point(self, now_ns: int) -> None:
        """Note a point at which it could be stopped."""
        self.stretch_ns = max(self.stretch_ns, now_ns - self.point_ns)
        self.point_ns = now_ns


class GrantGate:
    """The worker's side of the shared page.

    Args:
        page: of the slot.
        partition: moves this process to the units it is granted.
        estimates: shown in offers.
        facts: what else offers say, asked at each.
        decode_lives: whether the decode process is there, asked once it has been silent for long.
        device: that runs tasklets. One that does not queue them runs layers in parts.
        whole: tasklets run to their end all the same.
        clock: nanoseconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        page: Page,
        partition: Partition,
        estimates: Estimates,
        facts: Callable[[], OfferFacts],
        *,
        decode_lives: Callable[[], bool],
        device: ComputeDevice | None = None,
        whole: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._page, self._partition, self._estimates = page, partition, estimates
        self._levels = offered_levels(partition.levels())
        self._facts, self._decode_lives, self._clock = facts, decode_lives, clock
        runs_on = device or HostDevice(clock)
        self._in_flight = InFlight(runs_on, self._ended, clock)
        self._in_parts = not (runs_on.queues or whole)
        self._allowance = Allowance(least_units=partition.levels()[0], in_parts=self._in_parts)
        self._running: _Running | None = None
        self._launched = 0
        self._active = 0  # units of what was launched last
        self._came_unseen = False  # a grant that allows work came between the look and the wait

    def opened(self, stack: DecoderStack) -> None:
        """A job's layers are there. Of no account where decode is another process."""

    def latest(self) -> Grant:
        """Read the page; return the newest grant."""
        self._read()
        return self.grant

    @property
    def grant(self) -> Grant:
        """The newest grant that was read."""
        return self._allowance.grant

    @property
    def units(self) -> int:
        """Compute units of the newest grant."""
        return self.grant.finetune_units

    @property
    def active_units(self) -> int:
        """Compute units that the last launch took: of those granted, as many as were of use."""
        return self._active

    def decode_gone(self) -> bool:
        """Return whether decode has been silent for long and its process is gone."""
        silent_ns = self._page.heartbeat_age_ns(_DECODE)
        return silent_ns > ASK_AFTER_SILENCE_NS and not self._decode_lives()

    def launch(self, tasklet: Tasklet) -> bool:
        """Claim the right to run `tasklet` now; True: run it, then call `landed`.

        The offer that says "in flight" is out before the grant is looked at for the last time: a
        decode that revokes meanwhile sees either that offer or one that has seen its pause.
        """
        self._in_flight.settle()
        self._read()
        running = self._claim(tasklet)
        while running is not None and self._read():
            running = self._claim(tasklet)
        self._running = running
        if running is None:
            return False
        self._in_flight.begin()
        if self._in_parts:
            self._begin_part(running, self.grant.budget_us - self._allowance.used.us)
        return True

    def revoked(self) -> bool:
        """Return whether the running tasklet may not go on as it does; False where none runs.

        Its grant is not replaced: of what a new one allows it takes the units, where those are more
        and the device can change them under it; the rest begins with the next launch.
        """
        running = self._running
        if running is None:
            return False
        if self._in_parts:  # what is queued already cannot be stopped: nobody asks for stretches
            running.pass_point(self._clock())
        allowance = self._allowance
        reading = allowance.reading
        if self._page.grant_stands(reading.seq, DECODE_STALE_NS):
            if reading.units < running.units:
                return True
            return allowance.has_end and allowance.is_over(self._clock())
        seq = self._page.grant_seq
        grant = Grant._make(self._page.read_grant())
        units = allowance.read_on(
            seq, grant, now_ns=self._clock(), estimated=running.estimate_us != 0
        )
        silent_ns = self._page.heartbeat_age_ns(_DECODE)
        if allowance.is_over(self._clock()) or units < running.units or silent_ns > DECODE_STALE_NS:
            return True
        self._grow(running, units)
        return False

    def _grow(self, running: _Running, granted: int) -> None:
        """Take more units in the middle of a tasklet, where they are of use.

        Decode that idles may be at work again before the next launch.
        """
        units = self._estimates.useful_units(running.tasklet, granted)
        if self._in_parts and units > running.units:
            self._activate(running, units)
            running.grew = True

    def _activate(self, running: _Running, units: int) -> None:
        self._partition.activate(units)
        self._active = running.units = units

    def _begin_part(self, running: _Running, left_us: float) -> None:
        """Note that a tasklet, or a part of one, begins with so much left of its grant."""
        running.point_ns = self._clock()
        self._allowance.begin_part(
            left_us=left_us, now_ns=running.point_ns, estimated=running.estimate_us != 0
        )

    def hold(self, give_up: Callable[[], bool]) -> bool:
        """Say in the middle of a tasklet that nothing runs, and wait until it may go on.

        Returns:
            False: it has waited for `PATIENCE_NS`, decode is gone, or `give_up` says so.
        """
        running = self._running
        assert running is not None
        self.quiet(running.tasklet)
        began_ns = self._clock()  # what was queued of it has run until here
        while not self._rejoin(running):
            waited_ns = self._clock() - began_ns
            if waited_ns > PATIENCE_NS or give_up() or self.decode_gone():
                self._running = None
                return False
            self.quiet(running.tasklet)
            self.wait()
        running.held_ns += self._clock() - began_ns
        return True

    def _may_go_on(self) -> bool:
        """Return whether what runs may run on under the newest grant."""
        return self._allowance.allows_more(
            decode_silent_ns=self._page.heartbeat_age_ns(_DECODE), now_ns=self._clock()
        )

    def _rejoin(self, running: _Running) -> bool:
        """Take the units that are granted now, no more than before, and say that it runs again."""
        while self._may_go_on():
            units = min(running.units, self.units)
            if units != running.units:
                self._activate(running, units)
            running.estimate_us = self._estimates.estimate_us(running.tasklet, units)
            running.wait_us = self._wait_us(running.tasklet, units)
            self._publish(running.tasklet, in_flight_us=max(1, running.estimate_us))
            if not self._read():
                self._begin_part(running, self.grant.budget_us)
                return True
        return False

    def _claim(self, tasklet: Tasklet) -> _Running | None:
        """Move to as many of the granted units as are of use, and say what is about to run."""
        units = self._estimates.useful_units(tasklet, self.units)
        estimate = self._estimates.estimate_us(tasklet, units)
        bound_us = self.grant.in_flight_bound_us or DEFAULT_BOUND_US
        gap_us = part_us = estimate
        if self._in_parts:
            # What was cut for the grant fits a gap whole; what was not would wait for ever. So
            # would an optimizer step, which has no points: it may pass the end by its own length.
            gap_us, part_us = min(estimate, bound_us), min(estimate, LEAST_PART_US)
        if not self._allowance.allows(
            gap_us,
            decode_silent_ns=self._page.heartbeat_age_ns(_DECODE),
            now_ns=self._clock(),
            part_us=part_us,
            ahead_us=self._in_flight.wait_us,
        ):
            return None
        wait_us = self._wait_us(tasklet, units)
        self._in_flight.wait_until_fits(wait_us, bound_us)
        running = _Running(tasklet, units, estimate, wait_us)
        self._activate(running, units)
        self._publish(tasklet, in_flight_us=max(1, self._in_flight.wait_us + wait_us))
        return running

    def _wait_us(self, tasklet: Tasklet, units: int) -> int:
        """Return how long decode would wait for it: where calls only queue it, for its kernels."""
        if self._in_parts:
            return self._estimates.estimate_us(tasklet, units)
        return self._estimates.wait_us(tasklet, units)

    def landed(self, tasklet: Tasklet) -> None:
        """All of a tasklet is queued; `take_ran` returns it when it has ended.

        `tasklet`: the one that was launched; what is learned of it goes by this one.
        """
        running, self._running = self._running, None
        assert running is not None
        before_us = self._allowance.used.us
        self._allowance.charge(running.estimate_us)
        self._launched += 1
        self._in_flight.end(
            tasklet,
            running.units,
            estimate_us=running.estimate_us,
            wait_us=running.wait_us,
            kernels_us=self._estimates.kernels_us(tasklet, running.units),
            held_ns=running.held_ns,
            grew=running.grew,
            grant=self._allowance.seq,
        )
        self._in_flight.settle()
        if self._in_parts:  # its grant has paid for the last part only
            running.pass_point(self._clock())
            if not running.grew:
                self._estimates.learn_stretch(tasklet, running.units, running.stretch_ns / 1e3)
            self._allowance.charge_part(before_us=before_us, now_ns=self._clock())

    def take_ran(self) -> list[Ran]:
        """Return the tasklets that have ended since the last time."""
        return self._in_flight.take_ran()

    def _ended(self, ran: Ran) -> None:
        """Learn how long it took; of its grant it has used that, not what had been estimated."""
        elapsed_us = (ran.end_ns - ran.begin_ns) / 1e3
        if not (ran.held_up or ran.grew):
            self._estimates.learn(
                ran.tasklet, ran.units, elapsed_us, overlap_us=ran.overlap_ns / 1e3
            )
        self._allowance.correct(ran.grant, elapsed_us - ran.estimate_us)

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Say that nothing runs, and which pause has been seen. `tasklet`: the next one.

        Waits first for what is in flight, its bound at most.
        """
        self._in_flight.drain()
        # The caller is about to wait, and must not when a grant comes in here that it has not seen.
        self._came_unseen = self._read() and self._may_go_on()
        self._publish(tasklet, in_flight_us=0)

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Sleep until the next grant or the timeout."""
        if self._came_unseen:
            timeout_s, self._came_unseen = 0.0, False
        self._page.wait_grant(self._allowance.seq, timeout_s=timeout_s)
        self._beat()

    def _beat(self) -> None:
        self._page.beat(_WORKER)

    def _read(self) -> bool:
        seq = self._page.grant_seq
        if seq == self._allowance.seq:
            return False
        self._allowance.take(seq, Grant._make(self._page.read_grant()))
        return True

    def _publish(self, tasklet: Tasklet | None, *, in_flight_us: int) -> None:
        now = self._facts()
        phase, layer, layer_end, tokens = Phase.NONE, 0, 0, 0
        estimates_us, delta_bytes = UNKNOWN_US, 0
        if tasklet is not None:
            phase, tokens = tasklet.phase, tasklet.tokens
            layer, layer_end = tasklet.layer, tasklet.layer_end
            estimates_us = self._estimates.by_level(tasklet, self._levels)
            delta_bytes = memory_delta_bytes(
                tasklet, now.bytes_per_token, now.window_bytes_per_token
            )
        # In the order of `Offer`: with keywords it takes three times as long, before each tasklet.
        self._page.publish_offer(
            Offer(
                now.job_epoch,
                self._launched,
                phase,
                layer,
                layer_end,
                tokens,
                estimates_us,
                delta_bytes,
                now.resident_layers,
                int(now.starving),
                in_flight_us,
                self.grant.pause_epoch,
                now.wanted_chunks,
                now.held_chunks,
                now.tokens_done,
            )
        )


class GrantPace:
    """Permission for the worker's work beside its tasklets (reading rows).

    On its core such work takes as much from decode as a tasklet does, so it stops when no tasklet
    may run. Reads the page only, so any thread may ask.
    """

    def __init__(self, page: Page) -> None:
        self._page, self._seq = page, -1

    def granted(self) -> bool:
        """Return whether the newest grant is of any compute, and decode is there."""
        self._seq = self._page.grant_seq
        grant = Grant._make(self._page.read_grant())
        silent_ns = self._page.heartbeat_age_ns(_DECODE)
        now_ns = time.monotonic_ns()
        return may_launch(grant, Used(), 0, decode_silent_ns=silent_ns, now_ns=now_ns)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is another grant."""
        self._page.wait_grant(self._seq, timeout_s=timeout_s)
