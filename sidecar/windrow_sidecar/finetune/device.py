"""What a running job asks of its device; and the simplest answer, a device of its own."""

from __future__ import annotations

import time
from typing import Protocol

from windrow_sidecar.finetune.tasklets import Tasklet

# A pause by command is for people: they do not notice a twentieth of a second.
_LOOK_AGAIN_S = 0.05


class Gate(Protocol):
    """Who says when a tasklet may run (see `grants.GrantGate`)."""

    @property
    def active_units(self) -> int:
        """Compute units that the last launch took."""

    def launch(self, tasklet: Tasklet) -> bool:
        """Whether it may run now; if so, `landed` is called afterwards."""

    def landed(self, tasklet: Tasklet) -> tuple[int, int]:
        """It has run: when it began and ended, nanoseconds of CLOCK_MONOTONIC."""

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Nothing runs; `tasklet` would be next."""

    def wait(self) -> None:
        """Until it is worth asking again, a fifth of a second at most."""

    def decode_gone(self) -> bool:
        """Whether the decode process has ended."""


class Memory(Protocol):
    """Where boundary activations live (see `memory.LentMemory`)."""

    def settle(self) -> None:
        """Follow what was lent and what is asked back; may drop the micro-batch on its way."""

    def starving(self, tasklet: Tasklet) -> bool:
        """Whether there is no room for that tasklet."""

    def release(self) -> None:
        """Drop the micro-batch on its way and give everything back."""


class OpenGate:
    """Everything may run at once."""

    def __init__(self, units: int) -> None:
        self._units, self._begun_ns = units, 0

    @property
    def active_units(self) -> int:
        """Compute units that the last launch took."""
        return self._units

    def launch(self, tasklet: Tasklet) -> bool:
        """Yes."""
        del tasklet
        self._begun_ns = time.monotonic_ns()
        return True

    def landed(self, tasklet: Tasklet) -> tuple[int, int]:
        """When it began and ended, nanoseconds."""
        del tasklet
        return self._begun_ns, time.monotonic_ns()

    def quiet(self, tasklet: Tasklet | None) -> None:
        """Nobody listens."""

    def wait(self) -> None:
        """Only a pause by command comes here."""
        time.sleep(_LOOK_AGAIN_S)

    def decode_gone(self) -> bool:
        """There is none."""
        return False


class OwnMemory:
    """Torch's own: always there."""

    def settle(self) -> None:
        """Nothing changes."""

    def starving(self, tasklet: Tasklet) -> bool:
        """Never."""
        del tasklet
        return False

    def release(self) -> None:
        """Torch does."""
