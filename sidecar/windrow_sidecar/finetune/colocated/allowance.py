"""Account for what decode's newest grant still allows, as pure functions of time.

Nothing here reads the page or a clock: `grants.GrantGate` does, and passes on what it read.
"""

from __future__ import annotations

from dataclasses import dataclass

from windrow_sidecar.qos.view import Action, Grant

# Decode beats every step, and every 50 ms at most when it is idle.
DECODE_STALE_NS = 1_000_000_000


@dataclass(slots=True)
class Used:
    """Used part of the current grant; tasklets in flight count by their estimates."""

    tasklets: int = 0
    us: float = 0.0


@dataclass(slots=True)
class PageReading:
    """Grant as it was seen in the middle of a tasklet, which runs under the one before.

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


def units_of(grant: Grant, least_units: int) -> int:
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
    grant; None: the same. `least_units`: see `units_of`.
    """
    if decode_silent_ns > DECODE_STALE_NS:
        return False
    if units_of(grant, least_units) < 1:
        return False
    if grant.n_tasklets and used.tasklets >= grant.n_tasklets:
        return False
    if grant.gap_until_ns and now_ns + max(1, estimate_us) * 1000 > grant.gap_until_ns:
        return False
    part_us = estimate_us if part_us is None else part_us
    return not (grant.budget_us and used.us + part_us > grant.budget_us)


class Allowance:
    """The newest grant, what has been used of it, and when what runs under it has to end.

    Args:
        least_units: of the smallest share that the worker can take.
        in_parts: whether tasklets run in parts, each within the microseconds of a grant. A device
            that queues them runs them whole.

    Attributes:
        grant: the newest one that was taken.
        seq: its number on the page; -1: none has been taken.
        used: part of it.
        reading: the grant as it was seen last in the middle of a tasklet.
    """

    def __init__(self, *, least_units: int, in_parts: bool) -> None:
        self.grant, self.seq = Grant(), -1
        self.used, self.reading = Used(), PageReading()
        self._least_units, self._in_parts = least_units, in_parts
        self._spent_seq = -1  # number of the grant whose microseconds are all used
        self._part_ns = 0  # when the part began that runs
        self._ends_ns = 0  # when that part has used its microseconds; 0: it has no such bound

    def take(self, seq: int, grant: Grant) -> None:
        """Replace the grant; nothing of the new one is used but what a tasklet ran into it."""
        self.seq, self.grant, self.used = seq, grant, Used()
        if self._in_parts and seq == self.reading.seq:
            self.used.us = self.reading.ran_us

    def read_on(self, seq: int, grant: Grant, *, now_ns: int, estimated: bool) -> int:
        """Note the grant that is on the page in the middle of a tasklet; return its units.

        `estimated`: whether there is an estimate of the tasklet; one that has none runs whole, so
        that it has one afterwards.
        """
        units = units_of(grant, self._least_units)
        self.reading = PageReading(seq, units, grant.gap_until_ns, now_ns)
        if seq != self.seq:
            self._ends_ns = self._end_of(grant, grant.budget_us, now_ns, estimated)
        return units

    def allows(
        self,
        estimate_us: int,
        *,
        decode_silent_ns: int,
        now_ns: int,
        part_us: int | None = None,
        ahead_us: int = 0,
    ) -> bool:
        """Return whether a tasklet of that estimate may begin (see `may_launch`).

        `ahead_us`: of what is queued and runs before it.
        """
        if not (self.grant.gap_until_ns and estimate_us):
            ahead_us = 0  # only a gap has an end on the clock that those before it bring nearer
        return may_launch(
            self.grant,
            self.used,
            ahead_us + estimate_us,
            decode_silent_ns=decode_silent_ns,
            now_ns=now_ns,
            least_units=self._least_units,
            part_us=part_us,
        )

    def allows_more(self, *, decode_silent_ns: int, now_ns: int) -> bool:
        """Return whether what waits in its middle may run on under the newest grant.

        What the grant's other tasklets used does not count: the grant was made for this one too.
        """
        return self.seq != self._spent_seq and may_launch(
            self.grant,
            Used(),
            0,
            decode_silent_ns=decode_silent_ns,
            now_ns=now_ns,
            least_units=self._least_units,
        )

    def begin_part(self, *, left_us: float, now_ns: int, estimated: bool) -> None:
        """Note that a tasklet, or a part of one, begins with so much left of its grant."""
        self._part_ns = now_ns
        self._ends_ns = self._end_of(self.grant, left_us, now_ns, estimated)

    @property
    def has_end(self) -> bool:
        """True where what runs has to end at some time: that of a gap, or of its microseconds."""
        return self.reading.gap_until_ns != 0 or self._ends_ns != 0

    def is_over(self, now_ns: int) -> bool:
        """Return whether that time has come. A grant whose microseconds are used stays so."""
        if self._ends_ns and now_ns > self._ends_ns:
            self._spent_seq = self.reading.seq
            return True
        return bool(self.reading.gap_until_ns) and now_ns > self.reading.gap_until_ns

    def charge(self, estimate_us: int) -> None:
        """Count a tasklet that was launched, by its estimate."""
        self.used.tasklets += 1
        self.used.us += estimate_us

    def correct(self, seq: int, by_us: float) -> None:
        """Count what a tasklet took beside its estimate, where the grant that it had is current."""
        if seq == self.seq:
            self.used.us += by_us

    def charge_part(self, *, before_us: float, now_ns: int) -> None:
        """Count the last part of a tasklet in the place of its estimate.

        `before_us`: used of the grant before the tasklet was counted.
        """
        self.used.us = before_us + (now_ns - self._part_ns) / 1e3
        self.reading.ran_us = (now_ns - self.reading.seen_ns) / 1e3

    def _end_of(self, grant: Grant, left_us: float, now_ns: int, estimated: bool) -> int:
        if not (self._in_parts and grant.budget_us and estimated):
            return 0
        return now_ns + round(left_us * 1000)
