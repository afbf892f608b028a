"""How much of a device decode and worker use: CPU times of the processes, or NVML's counters."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_log = logging.getLogger(__name__)

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of the device, 0..1. Decode's alone is what there would be without harvesting."""

    decode: float = 0.0
    finetune: float = 0.0


class Meter(Protocol):
    """Measures between one call and the next."""

    def sample(self, engine_pid: int, worker_pid: int) -> Utilization:
        """Since the last call; a pid of 0 is nobody."""
        ...


def make_meter(driver: str, units: int) -> Meter:
    """For the driver that the engine runs on; of a GPU without NVML nothing is known."""
    if driver != "cuda":
        return CpuMeter(units)
    import pynvml

    try:
        return GpuMeter()
    except pynvml.NVMLError as error:
        _log.warning(
            "the GPU's utilisation is not known: %s (a container needs the driver capability "
            "`utility` for NVML)",
            error,
        )
        return Unmetered()


class Unmetered:
    """A device that nothing can be asked about."""

    def sample(self, engine_pid: int, worker_pid: int) -> Utilization:
        """Nothing."""
        del engine_pid, worker_pid
        return Utilization()


class CpuMeter:
    """CPU time of both processes over the time that the CPU set had."""

    def __init__(self, cores: int) -> None:
        self._cores = max(1, cores)
        self._seen: dict[int, float] = {}
        self._at_s = time.monotonic()

    def sample(self, engine_pid: int, worker_pid: int) -> Utilization:
        """Since the last call."""
        now_s = time.monotonic()
        had_s = (now_s - self._at_s) * self._cores
        self._at_s = now_s
        used = [self._spent(pid) for pid in (engine_pid, worker_pid)]
        self._seen = {pid: s for pid, s in self._seen.items() if pid in (engine_pid, worker_pid)}
        if had_s <= 0:
            return Utilization()
        return Utilization(min(1.0, used[0] / had_s), min(1.0, used[1] / had_s))

    def _spent(self, pid: int) -> float:
        """CPU seconds since the last call; 0 at the first sight of a process."""
        total = cpu_seconds(pid) if pid else None
        if total is None:
            return 0.0
        before = self._seen.get(pid, total)
        self._seen[pid] = total
        return max(0.0, total - before)


def cpu_seconds(pid: int) -> float | None:
    """User and system time of a process with all its threads; None when it is not visible."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The second field is a name in parentheses that may hold spaces; utime and stime are 14 and 15.
    fields = stat[stat.rindex(")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class GpuMeter:
    """NVML: utilisation of the SMs by process, of the whole device where processes are hidden."""

    def __init__(self, index: int = 0) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._since_us = 0

    def sample(self, engine_pid: int, worker_pid: int) -> Utilization:
        """Since the last call."""
        try:
            rows = self._nvml.nvmlDeviceGetProcessUtilization(self._device, self._since_us)
        except self._nvml.NVMLError:
            # No sample in the interval, or a driver that hides processes from containers.
            return Utilization(decode=self._total())
        self._since_us = max((row.timeStamp for row in rows), default=self._since_us)
        by_pid = {row.pid: row.smUtil / 100 for row in rows}
        return Utilization(by_pid.get(engine_pid, 0.0), by_pid.get(worker_pid, 0.0))

    def _total(self) -> float:
        """Of the whole device; 0 where it has no such counter (a MIG slice)."""
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu) / 100
        except self._nvml.NVMLError:
            return 0.0
