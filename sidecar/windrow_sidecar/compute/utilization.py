"""Measure how much of a device decode and worker use: CPU times, or NVML's counters."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
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
        """Return the utilization since the last call; a pid of 0 is nobody."""
        ...


def make_meter(driver: str, units: int, uuid: str = "") -> Meter:
    """Return a meter for the engine's driver; of a GPU without NVML nothing is known.

    `uuid`: of that GPU, as the engine's driver tells it; "": it does not.
    """
    if driver == "host":
        return CpuMeter(units)
    import pynvml

    try:
        return GpuMeter(gpu_name(driver, uuid))
    except pynvml.NVMLError as error:
        _log.warning(
            "the GPU's utilisation is not known: %s (a container needs the driver capability "
            "`utility` for NVML, and the GPU that decode uses)",
            error,
        )
        return Unmetered()


class Unmetered:
    """A device that nothing can be asked about."""

    def sample(self, engine_pid: int, worker_pid: int) -> Utilization:
        """Return no figures."""
        del engine_pid, worker_pid
        return Utilization()


class CpuMeter:
    """CPU time of both processes over the time that the CPU set had."""

    def __init__(self, cores: int) -> None:
        self._cores = max(1, cores)
        self._seen: dict[int, float] = {}
        self._at_s = time.monotonic()

    def sample(self, engine_pid: int, worker_pid: int) -> Utilization:
        """Return the utilization since the last call."""
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
    """NVML: utilisation of one GPU's SMs, the worker's apart from all else there.

    Whatever else runs on the GPU counts as decode: an engine is several processes, and under MPS
    work may be the daemon's server's. Where the driver names processes by numbers of another PID
    namespace, all of the GPU's use does.

    Args:
        name: of the GPU (see `gpu_name`).

    Attributes:
        name: of its kind, as NVML tells it.

    Raises:
        pynvml.NVMLError: there is no NVML, or no such GPU.
    """

    def __init__(self, name: str | int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._device = self._find(name)
        self.name = str(pynvml.nvmlDeviceGetName(self._device))
        self._since_us = 0
        self._said: set[str] = set()

    def sample(self, engine_pid: int, worker_pid: int) -> Utilization:
        """Return the utilization since the last call."""
        del engine_pid
        try:
            rows = self._nvml.nvmlDeviceGetProcessUtilization(self._device, self._since_us)
        except self._nvml.NVMLError_NotFound:
            return Utilization()  # no process has run since
        except self._nvml.NVMLError as error:
            self._say(f"what each process uses is not known ({error}): all of it counts as decode")
            return Utilization(decode=self._total())
        self._since_us = max((row.timeStamp for row in rows), default=self._since_us)
        newest = {row.pid: row.smUtil / 100 for row in sorted(rows, key=lambda row: row.timeStamp)}
        ours = {pid for pid in newest if _is_of_group(pid, worker_pid)}
        if worker_pid and not ours and not any(map(_is_visible, newest)):
            self._say(
                "NVML names processes of another PID namespace: all of the use counts as decode "
                "(hostPID, or one namespace for the pod, would tell the worker apart)"
            )
        finetune = sum(newest[pid] for pid in ours)
        decode = sum(used for pid, used in newest.items() if pid not in ours)
        return Utilization(min(1.0, decode), min(1.0, finetune))

    def processes(self) -> list[int]:
        """Process ids of those that compute there, as NVML numbers them.

        Raises:
            pynvml.NVMLError: it does not tell.
        """
        return [one.pid for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)]

    def _find(self, name: str | int) -> Any:  # noqa: ANN401 - a handle of pynvml's
        if isinstance(name, int):
            return self._nvml.nvmlDeviceGetHandleByIndex(name)
        if name.startswith(("GPU-", "MIG-")):
            return self._of_uuid(name)
        # From the driver, which does not say whether it is of a GPU or of a slice.
        try:
            return self._of_uuid(f"GPU-{_dashed(name)}")
        except self._nvml.NVMLError_NotFound:
            return self._of_uuid(f"MIG-{_dashed(name)}")

    def _of_uuid(self, uuid: str) -> Any:  # noqa: ANN401 - a handle of pynvml's
        """Return the device of a UUID; like CUDA, take an unambiguous beginning of one."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                device = self._nvml.nvmlDeviceGetHandleByIndex(index)
                if self._nvml.nvmlDeviceGetUUID(device).startswith(uuid):
                    return device
            raise self._nvml.NVMLError_NotFound from error

    def _total(self) -> float:
        """Return the use of the whole device; 0 where it has no such counter (a MIG slice)."""
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu) / 100
        except self._nvml.NVMLError as error:
            self._say(f"how much of it is used is not known ({error})")
            return 0.0

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("the GPU's utilisation: %s", what)


def gpu_name(driver: str, uuid: str, environ: Mapping[str, str] = os.environ) -> str | int:
    """Return how NVML finds the GPU of a driver: a UUID, or a number where nothing names it.

    Args:
        driver: "cuda", "cuda:N".
        uuid: as the engine's driver reports it, 32 hexadecimal digits; "" where it has not.
        environ: of a process that sees the same GPUs.
    """
    if uuid:
        return uuid
    ordinal = int(driver.partition(":")[2] or 0)
    visible = [one.strip() for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if ordinal < len(visible) and visible[ordinal]:
        chosen = visible[ordinal]
        return int(chosen) if chosen.isdigit() else chosen
    # What the container was given: NVML sees no more, in an order of its own.
    given = environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if given.startswith(("GPU-", "MIG-")) and "," not in given:
        return given
    return ordinal


def visible_device(uuid: str, device: str) -> str:
    """Return how CUDA_VISIBLE_DEVICES names a GPU or a slice of one.

    Args:
        uuid: as the driver tells it, 32 hexadecimal digits.
        device: its name; a slice's holds its profile ("NVIDIA H100 80GB HBM3 MIG 1g.10gb"). As
            labels have it, with hyphens for blanks, it will do as well.
    """
    kind = "MIG" if is_slice(device) else "GPU"
    return f"{kind}-{_dashed(uuid)}"


def is_slice(device: str) -> bool:
    """Return whether a device of that name is a MIG slice, of which CUDA shows a process one."""
    return "MIG" in re.split(r"[\s-]", device)


def _dashed(uuid: str) -> str:
    ends = (8, 12, 16, 20, 32)
    return "-".join(uuid[begin:end] for begin, end in zip((0, *ends), ends, strict=False))


def _is_of_group(pid: int, leader: int) -> bool:
    """Return whether a process is the worker, which leads a group, or one that it has started."""
    try:
        return bool(leader) and os.getpgid(pid) == leader
    except ProcessLookupError:
        return False


def _is_visible(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
