"""Track the tasklets that are queued on the device, and when each of them ran."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from windrow_sidecar.compute.device import ComputeDevice, Mark
from windrow_sidecar.finetune.tasklets import Tasklet


@dataclass(slots=True)  # frozen, it takes 10 us longer to make while caches hold a layer
class Ran:
    """A tasklet that was queued, with the marks of its begin and end. Immutable.

    Attributes:
        begun, ended: before and after all of its work.
        units: that it ran on, at last.
        held_ns: how long it was held up in its middle.
        grew: whether it began on fewer units.
        grant: number of the grant that it ran under.
        queued_ns: in which the host queued it; 0 where its calls did the work.
    """

    tasklet: Tasklet
    begun: Mark
    ended: Mark
    units: int
    held_ns: int = 0
    grew: bool = False
    grant: int = 0
    estimate_us: int = 0
    queued_ns: int = 0

    @property
    def begin_ns(self) -> int:
        """Of CLOCK_MONOTONIC, as the device saw it; what it was held up is left out."""
        return self.begun.at_ns() + self.held_ns

    @property
    def end_ns(self) -> int:
        """Of CLOCK_MONOTONIC, as the device saw it."""
        return self.ended.at_ns()

    @property
    def held_up(self) -> bool:
        """Whether it was held up in its middle."""
        return self.held_ns > 0


class InFlight:
    """The queued tasklets of one device, oldest first; on the host none outlives its call.

    Args:
        device: that runs it.
        ended: called with each tasklet that has ended, in their order.
        clock: of the host, nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        estimate_us: of everything that has not ended, as it was estimated.
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
        self.estimate_us = 0

    def begin(self) -> None:
        """What is queued from now on belongs to the next tasklet."""
        self._begun, self._begun_ns = self._device.mark(), self._clock()

    def end(
        self,
        tasklet: Tasklet,
        units: int,
        *,
        estimate_us: int = 0,
        held_ns: int = 0,
        grew: bool = False,
        grant: int = 0,
    ) -> None:
        """All of that tasklet is queued."""
        ended = self._device.mark()
        queued_ns = self._clock() - self._begun_ns - held_ns if self._device.queues else 0
        self.estimate_us += estimate_us
        self._queue.append(
            Ran(tasklet, self._begun, ended, units, held_ns, grew, grant, estimate_us, queued_ns)
        )

    def settle(self) -> None:
        """Note what has ended meanwhile. Never waits."""
        while self._queue and self._queue[0].ended.done():
            self._note_oldest()

    def wait_until_fits(self, estimate_us: int, bound_us: int) -> None:
        """Until what is in flight and another of that estimate take no longer than the bound.

        With nothing in flight anything fits; beside anything, what is not estimated (0) never does.
        """
        while self._queue and (not estimate_us or self.estimate_us + estimate_us > bound_us):
            self._queue[0].ended.wait()
            self._note_oldest()

    def drain(self) -> None:
        """Until nothing runs that this thread has queued, whether as a tasklet or not."""
        self._device.mark().wait()
        self.settle()

    def take_ran(self) -> list[Ran]:
        """Return what has ended since the last time."""
        ran, self._ran = self._ran, []
        return ran

    def _note_oldest(self) -> None:
        ran = self._queue.popleft()
        self.estimate_us -= ran.estimate_us
        self._ran.append(ran)
        self._ended(ran)
