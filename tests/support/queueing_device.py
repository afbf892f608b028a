"""A device whose work takes simulated time: what is queued on a GPU, without one.

It computes nothing: torch does that on the host at once. What it shows is when the work *would* be
done, so that everything that has to wait for a device can be seen to wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from windrow_sidecar.compute.device import Mark
from windrow_sidecar.compute.host_device import HostDevice


class QueueingDevice(HostDevice):
    """The host's memory, and a queue of work (see `ComputeDevice`).

    Attributes:
        now_ns: the clock of host and device; it moves when somebody waits.
    """

    name = "queueing"
    queues = True

    def __init__(self, now_ns: int = 0) -> None:
        super().__init__(self.clock)
        self.now_ns = now_ns
        self._ends_ns = now_ns

    def clock(self) -> int:
        """Nanoseconds."""
        return self.now_ns

    @property
    def queued_ns(self) -> int:
        """Return the nanoseconds of work that has not ended."""
        return max(0, self._ends_ns - self.now_ns)

    def work(self, us: float) -> None:
        """Queue work that takes so long."""
        self._ends_ns = max(self._ends_ns, self.now_ns) + round(us * 1e3)

    def mark(self) -> Mark:
        """Return the point behind what is queued."""
        return Reached(self, max(self._ends_ns, self.now_ns))


@dataclass(frozen=True, slots=True)
class Reached:
    """A point in that queue (see `Mark`)."""

    device: QueueingDevice
    reached_ns: int

    def done(self) -> bool:
        return self.device.now_ns >= self.reached_ns

    def wait(self) -> None:
        self.device.now_ns = max(self.device.now_ns, self.reached_ns)

    def at_ns(self) -> int:
        self.wait()
        return self.reached_ns
