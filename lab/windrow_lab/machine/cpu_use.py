"""Tell how much of some cores other processes than our own use, and which they are.

Source: proc(5). What a hypervisor takes away is no process's, and neither is time spent waiting for
a disk; what we and our children use is ours, also that of children which have ended meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
# Fields of a line `cpuN`, from the first number on.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_COUNTED = 8  # guest time, behind them, is in user time already
# Fields of /proc/PID/stat behind the name: parent, user and system time, those of reaped children.
_PARENT, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 1, 11, 12, 13, 14
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class _Process:
    name: str
    parent: int
    ticks: int  # of its own
    with_children: int  # with those of children that it has reaped


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Use of some cores since the boot, in clock ticks.

    Attributes:
        busy: in which a process or the kernel ran there.
        total: all of it, with what a hypervisor gave to others.
        stolen: the latter.
        own: that this process and its children used, on any core.
        others: by process ID, the name and what it used, of processes that are not ours.
    """

    busy: int
    total: int
    stolen: int
    own: int
    others: Mapping[int, tuple[str, int]]

    @classmethod
    def read(cls, cores: Collection[int], proc: Path = PROC, pid: int | None = None) -> CpuUse:
        """Read it. `pid`: of the process that is ours; None: this one.

        Where a container numbers its cores otherwise, all cores count.
        """
        every = dict(_of_cores(proc))
        used = [every[core] for core in cores if core in every] or [*every.values()]
        total = sum(sum(fields) for fields in used)
        idle = sum(fields[_IDLE] + fields[_IOWAIT] for fields in used)
        stolen = sum(fields[_STEAL] for fields in used)
        processes = dict(_processes(proc))
        ours = _family(processes, os.getpid() if pid is None else pid)
        return cls(
            busy=total - idle - stolen,
            total=total,
            stolen=stolen,
            own=sum(processes[each].with_children for each in ours),
            others={p: (of.name, of.ticks) for p, of in processes.items() if p not in ours},
        )

    def others_share(self, before: CpuUse) -> float:
        """Return which share of the cores other processes have used since then, 0 to 1."""
        total = self.total - before.total
        used = (self.busy - before.busy) - max(0, self.own - before.own)
        return min(1.0, max(0.0, used / total)) if total > 0 else 0.0

    def busiest(self, before: CpuUse) -> str:
        """Return which others have used most since then, by name and ID; "": they have ended."""
        used = {
            pid: ticks - before.others.get(pid, (name, 0))[1]
            for pid, (name, ticks) in self.others.items()
        }
        most = sorted((pid for pid in used if used[pid] > 0), key=lambda p: (-used[p], p))
        return ", ".join(f"{self.others[pid][0]} ({pid})" for pid in most[:_MOST_NAMED])


def _of_cores(proc: Path) -> Iterator[tuple[int, list[int]]]:
    for line in (proc / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit():
            counted = [int(field) for field in fields[:_COUNTED]]
            yield int(name[3:]), counted + [0] * (_COUNTED - len(counted))


def _processes(proc: Path) -> Iterator[tuple[int, _Process]]:
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            text = (folder / "stat").read_text(errors="replace")
            # A name is in parentheses and may hold any character.
            name, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()
            own = int(fields[_USER]) + int(fields[_SYSTEM])
            children = int(fields[_CHILDREN_USER]) + int(fields[_CHILDREN_SYSTEM])
            yield int(folder.name), _Process(name, int(fields[_PARENT]), own, own + children)


def _family(processes: Mapping[int, _Process], root: int) -> set[int]:
    """Return a process and all that descend from it, of those that live."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    left = [root] if root in processes else []
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children.get(pid, [])
    return found
