"""Split this machine's cores into host devices of two cores or more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windrow.errors import UserError

CORES_OF_A_DEVICE = 2
MOST_DEVICES = 2  # of a demo: more pods show nothing more


@dataclass(frozen=True)
class Device:
    """One host device."""

    cores: tuple[int, ...]
    oversubscribed: bool = False  # shares its cores with another one

    @property
    def cpuset(self) -> str:
        """The cores as the node's annotation wants them: `0,1`."""
        return ",".join(map(str, self.cores))


def devices(cores: Sequence[int], pods: int | None = None) -> list[Device]:
    """Return one device for each decode pod.

    Without `pods`: one on two or three cores, two from four on. More pods than fit share cores:
    good for tests of placement, worthless for figures. Raises UserError for fewer than two cores.
    """
    if len(cores) < CORES_OF_A_DEVICE:
        raise UserError(
            f"{len(cores)} core is too few: decode and finetuning want one each",
            field="CPU affinity",
            remedy="Run on a machine (or in a container) with two cores or more.",
        )
    if pods is not None and pods < 1:
        raise UserError(f"{pods} is not above zero", field="--pods", remedy="Write 1 or more.")
    fitting = len(cores) // CORES_OF_A_DEVICE
    wanted = pods if pods is not None else min(MOST_DEVICES, fitting)
    distinct = min(wanted, fitting)
    size = len(cores) // distinct
    sets = [tuple(cores[i * size : (i + 1) * size]) for i in range(distinct)]
    return [Device(sets[i % distinct], oversubscribed=wanted > fitting) for i in range(wanted)]


def bystanders(held: Sequence[Device]) -> list[int]:
    """Return the cores for processes that neither serve nor train: the last one of each device.

    A worker's share of a device grows from its last core, decode's from its first: what runs there
    takes time from finetuning, and none from decode.
    """
    return sorted({device.cores[-1] for device in held})


@contextlib.contextmanager
def on_cpus(cpus: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and the threads and processes that it starts, on some CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def usable_cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
