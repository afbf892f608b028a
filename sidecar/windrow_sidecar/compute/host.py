"""Partition the host by CPU affinity of every thread and the number of OpenMP threads.

The core moves the threads (`csrc/include/windrow/host_partition.h`). Two OpenMP threads on one core
wait for each other (96 ms for what takes one thread 8.8), hence the order: to shrink, first fewer
threads, then fewer cores; to grow, first more cores, then more threads, which start with the mask
of the thread that makes them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from windrow.errors import UserError
from windrow_sidecar import _core
from windrow_sidecar.cgroup import CgroupLimits, read_limits
from windrow_sidecar.compute.partition import NotMoved, Side, UnknownLevel

# A host device is two cores at least: one for decode, one for the worker.
FEWEST_CPUS = 2


def load_openmp() -> None:
    """Load torch's OpenMP, but not torch: call it while this process may use all of its cores.

    GNU's libgomp counts the cores as it is loaded. In a process that has been narrowed to one by
    then no team of two ever spins, whatever `windrow.openmp` asks for, and waking its threads in
    each parallel region takes all that a second core gains. Another library than GNU's counts for
    itself.
    """
    torch = importlib.util.find_spec("torch")
    for folder in (torch and torch.submodule_search_locations) or ():
        for library in Path(folder, "lib").glob("libgomp*.so*"):
            ctypes.CDLL(str(library))


def _set_torch_threads(n: int) -> None:
    import torch

    torch.set_num_threads(n)


class HostPartition:
    """A CPU set as a device (see `Partition`).

    Threads in the background (gRPC's, and those named with `background`) stay on the last core, out
    of decode's way; threads that were excluded are never moved.

    Args:
        side: whose share it is.
        cpus: the device's cores, ascending; decode's come first. The same in both processes.
        set_threads: takes the number of threads that compute may use; torch's by default.
        driver: the host's, or a fake.

    Raises:
        UserError: fewer than two cores, or cores that the machine does not have.
    """

    def __init__(
        self,
        side: Side,
        cpus: Iterable[int],
        *,
        set_threads: Callable[[int], None] = _set_torch_threads,
        driver: _core.Driver | str = "host",
    ) -> None:
        self.side: Side = side
        self.cpus: tuple[int, ...] = tuple(sorted(set(cpus)))
        _require_two(len(self.cpus), "cpus")
        _require_allowed(self.cpus)
        self._set_threads = set_threads
        host = _core.driver(driver) if isinstance(driver, str) else driver
        self._shares = host.partition(self.cpus)
        self._active: int | None = None

    @classmethod
    def from_affinity(
        cls,
        side: Side,
        *,
        set_threads: Callable[[int], None] = _set_torch_threads,
        limits: CgroupLimits | None = None,
    ) -> HostPartition:
        """The cores of this process's affinity mask, as many as its CPU quota pays for.

        Call it before anything narrows the mask. Under a quota of 2.5 cores the first two are
        taken: a set that is larger than the quota would be throttled in the middle of steps.

        Raises:
            UserError: fewer than two cores are left.
        """
        quota = (limits if limits is not None else read_limits()).cpus
        cpus = sorted(os.sched_getaffinity(0))
        if quota is not None and quota < len(cpus):
            _require_two(int(quota), "CPU quota of the control group")
            cpus = cpus[: int(quota)]
        return cls(side, cpus, set_threads=set_threads)

    @property
    def total_units(self) -> int:
        """Cores of the device."""
        return len(self.cpus)

    def levels(self) -> tuple[int, ...]:
        """Every number of cores."""
        return tuple(range(1, self.total_units + 1))

    def activate(self, level: int) -> None:
        """Move this process to decode's first or the worker's last `level` cores.

        Compute uses as many threads. About 0.1 us when nothing changes, else some 10 us a thread.

        Raises:
            UnknownLevel: more cores than there are, or none (a paused worker stays where it is).
            NotMoved: the system refused; every thread is where it was.
        """
        if not 1 <= level <= self.total_units:
            raise UnknownLevel(self.side, level, self.levels(), "cores")
        if level == self._active:
            return
        shrinks = self._active is None or level < self._active
        if shrinks:
            self._set_threads(level)
        try:
            self._shares.enter(self.side, level)
        except _core.Error as error:
            if shrinks:
                self._set_threads(self._active or self.total_units)
            raise NotMoved(self.side, error) from error
        if not shrinks:
            self._set_threads(level)
        self._active = level

    def release(self) -> None:
        """Give this process all cores of the device again, background threads too.

        Raises:
            NotMoved: the system refused; every thread is where it was.
        """
        try:
            self._shares.leave()
        except _core.Error as error:
            raise NotMoved(self.side, error) from error
        self._set_threads(self.total_units)
        self._active = self.total_units

    def exclude(self, *thread_ids: int) -> None:
        """Exclude threads (native ids) from all later moves."""
        for thread_id in thread_ids:
            self._shares.exclude(thread_id)

    def background(self, *thread_ids: int) -> None:
        """Keep these threads (native ids) on the last core from now on."""
        for thread_id in thread_ids:
            self._shares.keep_in_background(thread_id)

    @contextmanager
    def background_threads(self) -> Iterator[None]:
        """Make every thread that starts inside a background thread.

        For libraries that start threads of their own. Other code must not start threads meanwhile.
        """
        before = _thread_ids()
        yield
        self.background(*(_thread_ids() - before))


def _require_two(n: int, what: str) -> None:
    if n < FEWEST_CPUS:
        raise UserError(
            f"{n} core(s) cannot be shared between decode and a finetune worker",
            field=what,
            remedy="Give the decode process at least two cores (taskset, cpuset, CPU limit).",
            reason="TooFewCores",
        )


def _require_allowed(cpus: tuple[int, ...]) -> None:
    known = os.cpu_count() or 0
    beyond = [cpu for cpu in cpus if not 0 <= cpu < max(known, 1)]
    if beyond:
        raise UserError(
            f"cores {beyond} do not exist on this machine, which has {known}",
            field="cpus",
            remedy="Name cores of the affinity mask that decode started with.",
            reason="UnknownCores",
        )


def _thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}
