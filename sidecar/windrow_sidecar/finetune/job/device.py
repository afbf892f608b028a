"""What a running job asks of its device; and the simplest answer, a device of its own."""

from __future__ import annotations

import time
from typing import Protocol

from windrow_sidecar.compute.device import ComputeDevice
from windrow_sidecar.compute.host_device import HostDevice, available_bytes
from windrow_sidecar.finetune.engine.sizing import Estimates
from windrow_sidecar.finetune.engine.stream import TaskletStream
from windrow_sidecar.finetune.job.in_flight import InFlight, Ran
from windrow_sidecar.finetune.offload.job_state import Home, Swap
from windrow_sidecar.finetune.recompute.activation_budget import ActivationBudget
from windrow_sidecar.finetune.tasklets import Tasklet

# A pause by command is for people: they do not notice a twentieth of a second.
_LOOK_AGAIN_S = 0.05


class Gate(Protocol):
    """Who says when a tasklet may run (see `grants.GrantGate`)."""

    def launch(self, tasklet: Tasklet) -> bool:
        """Whether it may run now; if so, `landed` is called afterwards."""

    def landed(self, tasklet: Tasklet) -> None:
        """All of it is queued on the device."""

    def take_ran(self) -> list[Ran]:
        """Return the tasklets that have ended since the last time."""

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Nothing runs once this is back; `tasklet` would be next."""

    def wait(self) -> None:
        """Until it is worth asking again, a fifth of a second at most."""

    def decode_gone(self) -> bool:
        """Whether the decode process has ended."""


class Memory(Protocol):
    """Where boundary activations live (see `memory.LentMemory`)."""

    def settle(self) -> None:
        """Follow what was lent and what is asked back; the group on its way may be moved."""

    def starving(self, tasklet: Tasklet) -> bool:
        """Whether there is no room for that tasklet."""

    def set_aside(self) -> None:
        """Leave device memory to others: the job's state goes to the host. Twice is once."""

    def bring_back(self) -> bool:
        """Undo `set_aside`, before anything of the job runs. Returns whether it had to."""

    def release(self) -> None:
        """Drop the micro-batch on its way and give everything back."""


def replan_if_short(stream: TaskletStream, activation_budget: ActivationBudget) -> None:
    """Form a group anew that has not begun and does not fit (any more)."""
    tokens = stream.tokens_to_begin
    if tokens and not activation_budget.fits(tokens):
        stream.replan()


class OpenGate:
    """Everything may run at once, as far ahead as the computation lets its caller.

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
        """Only a pause by command comes here."""
        time.sleep(_LOOK_AGAIN_S)

    def _ended(self, ran: Ran) -> None:
        if self._estimates is not None:
            self._estimates.learn(ran.tasklet, ran.units, (ran.end_ns - ran.begin_ns) / 1e3)

    def decode_gone(self) -> bool:
        """There is none."""
        return False


class OwnMemory:
    """Torch's own: nobody lends it, so a group that does not fit ends the job.

    Args:
        stream: of the job.
        home: where it trains (default: where its adapter is).
        keeping: what its groups take; None: they are not asked about.
    """

    def __init__(
        self,
        stream: TaskletStream,
        home: Home | None = None,
        activation_budget: ActivationBudget | None = None,
    ) -> None:
        self._stream, self._swap = stream, Swap(stream, available_bytes, home)
        self._activation_budget = activation_budget

    def settle(self) -> None:
        """Form the next group anew where less is free than when it was formed."""
        if self._activation_budget is not None:
            replan_if_short(self._stream, self._activation_budget)

    def starving(self, tasklet: Tasklet) -> bool:
        """Never.

        Raises:
            MemoryError: the group that is about to begin, made as small as may be, does not fit.
        """
        del tasklet
        if self._activation_budget is not None and (tokens := self._stream.tokens_to_begin):
            self._activation_budget.check(tokens)
        return False

    def set_aside(self) -> None:
        """Move the job's state to the host."""
        self._swap.out()

    def bring_back(self) -> bool:
        """Move it back."""
        return self._swap.back()

    def release(self) -> None:
        """Drop the group on its way; torch frees it."""
        self._stream.drop()
