"""Track the tasklets that are queued on the device, and when each of them ran."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from windrow_sidecar.compute.device import ComputeDevice, Mark
from windrow_sidecar.finetune.tasklets import Tasklet

# One that runs and one behind it keep a device busy. With more of them, errors of what they were
# estimated to take add up.
MOST_IN_FLIGHT = 2


@dataclass(slots=True)  # frozen, it takes 10 us longer to make while caches hold a layer
class Ran:
    """A tasklet that was queued, with the marks of its begin and end.

    Attributes:
        begun, ended: before and after all of its work.
        units: that it ran on, at last.
        held_ns: how long it was held up in its middle.
        grew: whether it began on fewer units.
        grant: number of the grant that it ran under.
        wait_us: how long decode would wait for it once it is queued, as it was estimated.
        queued_ns: in which the host queued it; 0 where its calls did the work.
        queued_at_ns: when all of it was queued; 0: see `queued_ns`.
        begin_ns, end_ns: in CLOCK_MONOTONIC, as the device saw them, once it has ended; what it was
            held up is left out. Gate, ledger and log ask for them: they are read once.
        overlap_ns: in which the device worked on it, or waited for more, while it was being queued.
            The rest of its time is that of its kernels alone, and what decode has to wait for at
            most where it asks for the device.
    """

    tasklet: Tasklet
    begun: Mark
    ended: Mark
    units: int
    held_ns: int = 0
    grew: bool = False
    grant: int = 0
    estimate_us: int = 0
    wait_us: int = 0
    queued_ns: int = 0
    queued_at_ns: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    overlap_ns: int = 0

    def read_times(self) -> None:
        """Read both marks; waits where one is not reached. Called before `take_ran` returns it."""
        begun_ns, self.end_ns = self.begun.at_ns(), self.ended.at_ns()
        self.begin_ns = begun_ns + self.held_ns
        if self.queued_at_ns:
            self.overlap_ns = max(0, min(self.queued_at_ns, self.end_ns) - begun_ns)

    @property
    def held_up(self) -> bool:
        """True where it was held up in its middle."""
        return self.held_ns > 0


class InFlight:
    """The queued tasklets of one device, oldest first; on the host none outlives its call.

    Args:
        device: that runs it.
        ended: called with each tasklet that has ended, in their order.
        clock: of the host, nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        wait_us: how long the device has to work on everything that has not ended, as estimated.
    """

    def __init__(
        self,
        device: ComputeDevice,
        ended: Callable[[Ran], None] = lambda ran: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._device, self._ended, self._clock = device, ended, clock
        self._queue: deque[Ran] = deque()
        self._ran: list[Ran] = []
        self._begun, self._begun_ns = device.mark(), clock()
        self.wait_us = 0

    def begin(self) -> None:
        """Assign what is queued from now on to the next tasklet."""
        self._begun, self._begun_ns = self._device.mark(), self._clock()

    def end(
        self,
        tasklet: Tasklet,
        units: int,
        *,
        estimate_us: int = 0,
        wait_us: int = 0,
        kernels_us: int = 0,
        held_ns: int = 0,
        grew: bool = False,
        grant: int = 0,
    ) -> None:
        """All of that tasklet is queued (see `Ran`).

        From here on the device works on it for `wait_us` if it has begun, and for `kernels_us` if
        it has not, since another is before it.
        """
        ended = self._device.mark()
        self.settle()
        if self._queue:
            wait_us = max(wait_us, kernels_us)
        ran = Ran(tasklet, self._begun, ended, units, held_ns, grew, grant, estimate_us, wait_us)
        if self._device.queues:
            ran.queued_at_ns = self._clock()
            ran.queued_ns = ran.queued_at_ns - self._begun_ns - held_ns
        self.wait_us += wait_us
        self._queue.append(ran)

    def settle(self) -> None:
        """Note what has ended meanwhile. Never waits."""
        while self._queue and self._queue[0].ended.done():
            self._note_oldest()

    def wait_until_fits(self, wait_us: int, bound_us: int) -> None:
        """Wait until the device needs no longer than the bound for what is in flight and one more.

        With nothing in flight anything fits; beside anything, what is not estimated (0) never does.
        With `MOST_IN_FLIGHT` already, nothing does.
        """
        while self._queue and (
            not wait_us or self.wait_us + wait_us > bound_us or len(self._queue) >= MOST_IN_FLIGHT
        ):
            self._queue[0].ended.wait()
            self._note_oldest()

    def drain(self) -> None:
        """Wait until nothing runs that this thread has queued, as a tasklet or otherwise."""
        self._device.mark().wait()
        self.settle()

    def take_ran(self) -> list[Ran]:
        """Return what has ended since the last time."""
        ran, self._ran = self._ran, []
        return ran

    def _note_oldest(self) -> None:
        ran = self._queue.popleft()
        ran.read_times()
        self.wait_us -= ran.wait_us
        self._ran.append(ran)
        self._ended(ran)
