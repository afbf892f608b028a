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
from windrow_sidecar.finetune.engine.sizing import Estimates
from windrow_sidecar.finetune.job.in_flight import InFlight, Ran
from windrow_sidecar.finetune.tasklets import Tasklet
from windrow_sidecar.qos.levels import offered_levels
from windrow_sidecar.qos.view import UNKNOWN_US, Action, Grant, Offer, Phase

# Decode beats every step, and every 50 ms at most when it is idle.
DECODE_STALE_NS = 1_000_000_000
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
class Used:
    """Used part of the current grant; tasklets in flight count by their estimates."""

    tasklets: int = 0
    us: float = 0.0


@dataclass(slots=True)
class PageReading:
    """A grant as it was seen in the middle of a tasklet, which runs under the one before.

    Attributes:
        seq: its number on the page; 0: none has been seen.
        units: that the worker may run on under it; 0: it may not run.
        gap_until_ns: end of its gap; 0: it has none.
        seen_ns: when it was seen.
        ran_us: how long the tasklet ran on after that; its microseconds are charged with it.
    """

    seq: int = 0
    units: int = 0
    gap_until_ns: int = 0
    seen_ns: int = 0
    ran_us: float = 0.0


def _units_of(grant: Grant, least_units: int) -> int:
    """Return how many units the worker may run on under a grant; 0: it may not run.

    `least_units`: of the smallest share that it can take. One that shares a GPU in time only takes
    the whole of it, and a part that is granted beside a step is none for it.
    """
    may_run = grant.action == Action.GO and grant.finetune_units >= least_units
    return grant.finetune_units if may_run else 0


def may_launch(
    grant: Grant,
    used: Used,
    estimate_us: int,
    *,
    decode_silent_ns: int,
    now_ns: int = 0,
    least_units: int = 1,
    part_us: int | None = None,
) -> bool:
    """Decide whether a tasklet of that estimate, begun now, may run under the grant.

    `estimate_us`: of as much of it as must fit into a gap; `part_us`: into the microseconds of the
    grant; None: the same. `least_units`: see `_units_of`.
    """
    if decode_silent_ns > DECODE_STALE_NS:
        return False
    if _units_of(grant, least_units) < 1:
        return False
    if grant.n_tasklets and used.tasklets >= grant.n_tasklets:
        return False
    if grant.gap_until_ns and now_ns + max(1, estimate_us) * 1000 > grant.gap_until_ns:
        return False
    part_us = estimate_us if part_us is None else part_us
    return not (grant.budget_us and used.us + part_us > grant.budget_us)


class GrantGate:
    """The worker's side of the shared page.

    Args:
        page: of the slot.
        partition: moves this process to the units it is granted.
        estimates: shown in offers.
        facts: what else offers say, asked at each.
        decode_lives: whether the decode process is there, asked once it has been silent for long.
        device: that runs tasklets. One that does not queue them runs layers in parts.
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
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._page, self._partition, self._estimates = page, partition, estimates
        self._levels = offered_levels(partition.levels())
        self._least_units = partition.levels()[0]
        self._facts, self._decode_lives, self._clock = facts, decode_lives, clock
        self._seq = -1
        self._grant = Grant()
        self._used = Used()
        self._launched = 0
        self._active = 0  # units of what was launched last
        runs_on = device or HostDevice(clock)
        self._in_flight, self._in_parts = InFlight(runs_on, self._ended, clock), not runs_on.queues
        self._part_ns = 0  # when the part began that runs
        # When what runs could be stopped last, and the longest time between two such points.
        self._point_ns = self._stretch_ns = 0
        self._spent_seq = -1  # grant of which all microseconds are used
        self._held_ns = self._launched_us = self._launched_wait_us = 0
        self._grew = False  # what runs has more units than it began with
        self._running: Tasklet | None = None
        self._unheeded = False
        self._reading = PageReading()
        self._ends_ns = 0  # when the microseconds of the glance are used; 0: it has no such bound

    def latest(self) -> Grant:
        """Read the page; return the newest grant."""
        self._read()
        return self._grant

    @property
    def grant(self) -> Grant:
        """The newest grant that was read."""
        return self._grant

    @property
    def units(self) -> int:
        """Compute units of the newest grant."""
        return self._grant.finetune_units

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
        claimed = self._claim(tasklet)
        while claimed and self._read():
            claimed = self._claim(tasklet)
        self._held_ns, self._grew = 0, False
        self._running = tasklet if claimed else None
        if claimed:
            self._in_flight.begin()
            if self._in_parts:
                self._stretch_ns = 0
                self._begin_part(self._grant.budget_us - self._used.us)
        return claimed

    def revoked(self) -> bool:
        """Return whether the running tasklet may not go on as it does; False where none runs.

        Its grant is not replaced: of what a new one allows it takes the units, where those are more
        and the device can change them under it; the rest begins with the next launch.
        """
        if self._running is None:
            return False
        if self._in_parts:  # what is queued already cannot be stopped: nobody asks for stretches
            self._pass_point()
        glance = self._reading
        if self._page.grant_stands(glance.seq, DECODE_STALE_NS):
            has_end = glance.gap_until_ns or self._ends_ns
            return glance.units < self._active or (has_end != 0 and self._time_is_over())
        seq = self._page.grant_seq
        grant = Grant._make(self._page.read_grant())
        units = _units_of(grant, self._least_units)
        self._reading = PageReading(seq, units, grant.gap_until_ns, self._clock())
        if seq != self._seq:
            self._ends_ns = self._end_of(grant, grant.budget_us)
        silent_ns = self._page.heartbeat_age_ns(_DECODE)
        if self._time_is_over() or units < self._active or silent_ns > DECODE_STALE_NS:
            return True
        self._grow(self._running, units)
        return False

    def _grow(self, tasklet: Tasklet, granted: int) -> None:
        """Take more units in the middle of a tasklet, where they are of use.

        Decode that idles may be at work again before the next launch.
        """
        units = self._estimates.useful_units(tasklet, granted)
        if self._in_parts and units > self._active:
            self._partition.activate(units)
            self._active, self._grew = units, True

    def _pass_point(self) -> None:
        now_ns = self._clock()
        self._stretch_ns = max(self._stretch_ns, now_ns - self._point_ns)
        self._point_ns = now_ns

    def _time_is_over(self) -> bool:
        """Return whether the gap has ended, or the microseconds of the grant are used."""
        gap_until_ns = self._reading.gap_until_ns
        if not (gap_until_ns or self._ends_ns):
            return False
        now_ns = self._clock()
        if self._ends_ns and now_ns > self._ends_ns:
            self._spent_seq = self._reading.seq
            return True
        return bool(gap_until_ns) and now_ns > gap_until_ns

    def _begin_part(self, left_us: float) -> None:
        """Note that a tasklet, or a part of one, begins with so much left of its grant."""
        self._part_ns = self._point_ns = self._clock()
        self._ends_ns = self._end_of(self._grant, left_us)

    def _end_of(self, grant: Grant, left_us: float) -> int:
        # What has no estimate yet is run whole, so that it has one afterwards.
        if not (self._in_parts and grant.budget_us and self._launched_us):
            return 0
        return self._clock() + round(left_us * 1000)

    def hold(self, give_up: Callable[[], bool]) -> bool:
        """Say in the middle of a tasklet that nothing runs, and wait until it may go on.

        Returns:
            False: it has waited for `PATIENCE_NS`, decode is gone, or `give_up` says so.
        """
        tasklet = self._running
        assert tasklet is not None
        self.quiet(tasklet)
        began_ns = self._clock()  # what was queued of it has run until here
        while not self._rejoin(tasklet):
            waited_ns = self._clock() - began_ns
            if waited_ns > PATIENCE_NS or give_up() or self.decode_gone():
                self._running = None
                return False
            self.quiet(tasklet)
            self.wait()
        self._held_ns += self._clock() - began_ns
        return True

    def _may_go_on(self, grant: Grant) -> bool:
        """Return whether what runs may run on: its used part counts where that cut it short."""
        return self._seq != self._spent_seq and self._allows(grant, Used(), 0)

    def _rejoin(self, tasklet: Tasklet) -> bool:
        """Take the units that are granted now, no more than before, and say that it runs again."""
        while self._may_go_on(self._grant):
            units = min(self._active, self.units)
            if units != self._active:
                self._partition.activate(units)
                self._active = units
            self._launched_us = self._estimates.estimate_us(tasklet, units)
            self._launched_wait_us = self._wait_us(tasklet, units)
            self._publish(tasklet, in_flight_us=max(1, self._launched_us))
            if not self._read():
                self._begin_part(self._grant.budget_us)
                return True
        return False

    def _claim(self, tasklet: Tasklet) -> bool:
        """Move to as many of the granted units as are of use, and say what is about to run."""
        units = self._estimates.useful_units(tasklet, self.units)
        estimate = self._estimates.estimate_us(tasklet, units)
        bound_us = self._grant.in_flight_bound_us or DEFAULT_BOUND_US
        gap_us = part_us = estimate
        if self._in_parts:
            # What was cut for the grant fits a gap whole; what was not would wait for ever. So
            # would an optimizer step, which has no points: it may pass the end by its own length.
            gap_us, part_us = min(estimate, bound_us), min(estimate, LEAST_PART_US)
        if not self._allows(self._grant, self._used, gap_us, part_us):
            return False
        wait_us = self._wait_us(tasklet, units)
        self._in_flight.wait_until_fits(wait_us, bound_us)
        self._partition.activate(units)
        self._active, self._launched_us, self._launched_wait_us = units, estimate, wait_us
        self._publish(tasklet, in_flight_us=max(1, self._in_flight.wait_us + wait_us))
        return True

    def _wait_us(self, tasklet: Tasklet, units: int) -> int:
        """Return how long decode would wait for it: where calls only queue it, for its kernels."""
        if self._in_parts:
            return self._estimates.estimate_us(tasklet, units)
        return self._estimates.wait_us(tasklet, units)

    def landed(self, tasklet: Tasklet) -> None:
        """All of a tasklet is queued; `take_ran` returns it when it has ended."""
        self._used.tasklets += 1
        used_us = self._used.us
        self._used.us += self._launched_us
        self._launched += 1
        self._running = None
        self._in_flight.end(
            tasklet,
            self._active,
            estimate_us=self._launched_us,
            wait_us=self._launched_wait_us,
            kernels_us=self._estimates.kernels_us(tasklet, self._active),
            held_ns=self._held_ns,
            grew=self._grew,
            grant=self._seq,
        )
        self._in_flight.settle()
        if self._in_parts:  # its grant has paid for the last part only
            self._pass_point()
            if not self._grew:
                self._estimates.learn_stretch(tasklet, self._active, self._stretch_ns / 1e3)
            now_ns = self._clock()
            self._used.us = used_us + (now_ns - self._part_ns) / 1e3
            self._reading.ran_us = (now_ns - self._reading.seen_ns) / 1e3

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
        if ran.grant == self._seq:
            self._used.us += elapsed_us - ran.estimate_us

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Say that nothing runs, and which pause has been seen. `tasklet`: the next one.

        Waits first for what is in flight, its bound at most.
        """
        self._in_flight.drain()
        # A grant that comes in here was not seen by whoever is about to wait: do not sleep over it.
        self._unheeded = self._read() and self._may_go_on(self._grant)
        self._publish(tasklet, in_flight_us=0)

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Sleep until the next grant or the timeout."""
        if self._unheeded:
            timeout_s, self._unheeded = 0.0, False
        self._page.wait_grant(self._seq, timeout_s=timeout_s)
        self._page.beat(_WORKER)

    def _read(self) -> bool:
        seq = self._page.grant_seq
        if seq == self._seq:
            return False
        self._seq = seq
        self._grant = Grant._make(self._page.read_grant())
        self._used = Used()
        if self._in_parts and seq == self._reading.seq:  # a tasklet has run into it
            self._used.us = self._reading.ran_us
        return True

    def _allows(
        self, grant: Grant, used: Used, estimate_us: int, part_us: int | None = None
    ) -> bool:
        silent_ns = self._page.heartbeat_age_ns(_DECODE)
        # What is queued already comes before it.
        ahead_us = self._in_flight.wait_us if grant.gap_until_ns and estimate_us else 0
        return may_launch(
            grant,
            used,
            ahead_us + estimate_us,
            decode_silent_ns=silent_ns,
            now_ns=self._clock(),
            least_units=self._least_units,
            part_us=part_us,
        )

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
                self._grant.pause_epoch,
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
