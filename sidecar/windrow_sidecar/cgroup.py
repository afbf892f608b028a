"""Read the limits of this process's control groups, v2 or v1, and what they have cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T", int, float)

_OWN_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_UNLIMITED_V1 = 1 << 60  # v1 writes "no limit" as a page-rounded 2^63


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limit of this process's groups and all above them; None: not limited."""

    cpus: float | None
    memory_bytes: int | None


def read_limits(proc_file: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> CgroupLimits:
    """Read the limits that hold for this process.

    A file that is not there limits nothing: in a container only part of the hierarchy is mounted.
    """
    cpus: list[float] = []
    memory: list[int] = []
    for controllers, folder in groups(proc_file, mount):
        if controllers == "":
            _add(cpus, _cpu_v2(folder / "cpu.max"))
            _add(memory, _bytes(folder / "memory.max"))
        if "cpu" in controllers.split(","):
            _add(cpus, _cpu_v1(folder))
        if "memory" in controllers.split(","):
            _add(memory, _bytes(folder / "memory.limit_in_bytes"))
    return CgroupLimits(min(cpus, default=None), min(memory, default=None))


@dataclass(frozen=True, slots=True)
class Throttled:
    """Count how often and how long CPU quotas have kept this process's groups from running."""

    periods: int = 0
    seconds: float = 0.0


def read_throttled(proc_file: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> Throttled:
    """Read what was throttled since the groups were made, as far as it can be seen from here.

    In a container that is its own group's quota. What the quota of the whole pod costs, which the
    time of an attached sidecar counts against, Linux 6.6 and newer tell as well: in v2, as time.
    """
    seen = {
        folder
        for controllers, folder in groups(proc_file, mount)
        if controllers == "" or "cpu" in controllers.split(",")
    }
    stats = [_stat(folder / "cpu.stat") for folder in seen]
    by_itself = sum(
        stat.get("throttled_usec", 0) / 1e6 + stat.get("throttled_time", 0) / 1e9 for stat in stats
    )
    # The deepest group's, for it holds what all above it have cost.
    within = max(
        (_stat(folder / "cpu.stat.local").get("throttled_usec", 0) / 1e6 for folder in seen),
        default=0.0,
    )
    periods = sum(stat.get("nr_throttled", 0) for stat in stats)
    return Throttled(periods, max(by_itself, within))


def _stat(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_read(file) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def groups(proc_file: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> Iterator[tuple[str, Path]]:
    """Yield controllers ("" is v2) and folder of this process's groups, each before those above it.

    A folder need not be there.
    """
    try:
        lines = proc_file.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = mount / controllers if controllers else mount
        inner = Path(path.lstrip("/"))
        # The path is the host's, the mount may be the container's own: look at the root as well.
        for part in (inner, *inner.parents):
            yield controllers, root / part


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None


def _cpu_v2(file: Path) -> float | None:
    text = _read(file)
    if text is None:
        return None
    quota, period = text.split()
    return None if quota == "max" else int(quota) / int(period)


def _cpu_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota is None or period is None or int(quota) < 0:
        return None
    return int(quota) / int(period)


def _bytes(file: Path) -> int | None:
    text = _read(file)
    if text is None or text == "max" or int(text) > _UNLIMITED_V1:
        return None
    return int(text)


def _add(values: list[_T], value: _T | None) -> None:
    if value is not None:
        values.append(value)
