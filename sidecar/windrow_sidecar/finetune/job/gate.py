"""Decides when a tasklet may run: the protocol, and the gate of a device of its own."""

from __future__ import annotations

import time
from typing import Protocol

from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice
from windrow_sidecar.finetune.engine.sizing import Estimates
from windrow_sidecar.finetune.job.in_flight import InFlight, Ran
from windrow_sidecar.finetune.tasklets import Tasklet

# A pause by command is for people: they do not notice a twentieth of a second.
_LOOK_AGAIN_S = 0.05


class Gate(Protocol):
    """Decides when a tasklet may run (see `grants.GrantGate`)."""

    def launch(self, tasklet: Tasklet) -> bool:
        """Return whether it may run now; if so, `landed` is called afterwards."""

    def landed(self, tasklet: Tasklet) -> None:
        """All of it is queued on the device."""

    def take_ran(self) -> list[Ran]:
        """Return the tasklets that have ended since the last time."""

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Wait until nothing runs; `tasklet` would be next."""

    def wait(self) -> None:
        """Wait until it is worth asking again, a fifth of a second at most."""

    def decode_gone(self) -> bool:
        """Return whether the decode process has ended."""


class OpenGate:
    """A gate that lets every tasklet run.

    Args:
        units: in use.
        device: that runs tasklets (default: the host).
        estimates: learn what tasklets take.
    """

    def __init__(
        self,
        units: int,
        device: ComputeDevice | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        self._units, self._estimates = units, estimates
        self._in_flight = InFlight(device or HostDevice(), self._ended)

    def launch(self, tasklet: Tasklet) -> bool:
        """Yes."""
        del tasklet
        self._in_flight.begin()
        return True

    def landed(self, tasklet: Tasklet) -> None:
        """All of it is queued."""
        self._in_flight.end(tasklet, self._units)
        self._in_flight.settle()

    def take_ran(self) -> list[Ran]:
        """Return the tasklets that have ended since the last time."""
        return self._in_flight.take_ran()

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Wait for what is queued."""
        del tasklet
        self._in_flight.drain()

    def wait(self) -> None:
        """Wait; only a pause by command comes here."""
        time.sleep(_LOOK_AGAIN_S)

    def _ended(self, ran: Ran) -> None:
        if self._estimates is not None:
            self._estimates.learn(ran.tasklet, ran.units, (ran.end_ns - ran.begin_ns) / 1e3)

    def decode_gone(self) -> bool:
        """Return False: there is no decode process."""
        return False
