"""Disturbance of a run by its machine: its speed moved, or other processes used its cores."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from windrow.eventlog import TaskletEvent
from windrow_lab.figures.summary import throughput
from windrow_lab.machine.pace import SLOWER, MachinePace

SAMPLE_S = 0.5
# As much as the speed may move: figures are shares of one core and more.
BUSY_SHARE = 0.1
# The first steps of a worker: its tasklets are still being sized.
_STARTS = 0.2
_FEWEST_STEPS = 6


@dataclass(frozen=True, slots=True)
class MachineSample:
    """State of the machine at a moment at which nothing of the run computes.

    Attributes:
        at_s: seconds of a monotonic clock.
        pass_us: microseconds of a fixed piece of work on one core (`machine.pace`).
        busy_share: share of the cores that other processes use, 0 to 1.
        stolen_s: seconds of these cores, since the boot, that a hypervisor gave to others.
    """

    at_s: float
    pass_us: float
    busy_share: float
    stolen_s: float

    @classmethod
    def take(cls, cores: Collection[int]) -> MachineSample:
        """Look at these cores for `SAMPLE_S`, and time the piece of work."""
        used = _of(cores, psutil.cpu_times_percent(interval=SAMPLE_S, percpu=True))
        idle = [each.idle + getattr(each, "iowait", 0.0) for each in used]
        times = _of(cores, psutil.cpu_times(percpu=True))
        return cls(
            time.monotonic(),
            MachinePace(cores).now_us(),
            min(1.0, max(0.0, 1 - sum(idle) / len(idle) / 100)),
            sum(getattr(each, "steal", 0.0) for each in times),
        )


def disturbances(
    before: MachineSample,
    after: MachineSample,
    dedicated: Sequence[TaskletEvent],
    *,
    cores: int,
    oversubscribed: bool = False,
    ranks: int = 1,
) -> list[str]:
    """Return why the figures of a run mean nothing, a sentence each; empty: nothing was seen.

    Args:
        before: the machine before the run has started anything.
        after: the machine once all of the run has ended.
        dedicated: tasklets of the reference run, the job alone on the device, in order.
        cores: of the run.
        oversubscribed: its pods share the cores of fewer devices.
        ranks: of each engine; several share the cores of one device.
    """
    reasons = []
    if oversubscribed:
        reasons.append("Its pods shared the cores of fewer devices.")
    if ranks > 1:
        reasons.append(f"The {ranks} ranks of an engine, and of its worker, shared their cores.")
    for moment, sample in (("Before", before), ("After", after)):
        if sample.busy_share > BUSY_SHARE:
            reasons.append(
                f"{moment} the run, other processes used {sample.busy_share:.0%} of its cores."
            )
    stolen = (after.stolen_s - before.stolen_s) / max(cores * (after.at_s - before.at_s), 1e-9)
    if stolen > BUSY_SHARE:
        reasons.append(f"The hypervisor gave {stolen:.0%} of its cores to other machines.")
    if (moved := _moved(before.pass_us, after.pass_us)) > SLOWER:
        reasons.append(f"A fixed piece of work took {moved:.2f} times as long at one end of it.")
    if (moved := _moved(*_rates(dedicated))) > SLOWER:
        reasons.append(
            f"The reference run (the job alone) was {moved:.2f} times as fast in one of its halves."
        )
    return reasons


def _of(cores: Collection[int], every: list[Any]) -> list[Any]:
    """Return the entries of these cores; all, where a container numbers its cores otherwise."""
    return [every[core] for core in cores if core < len(every)] or every


def _rates(tasklets: Sequence[TaskletEvent]) -> tuple[float, float]:
    """Return tokens a second in the two halves of a trainer's steps; zeros of too few."""
    done = [tasklet for tasklet in tasklets if tasklet.phase == "opt"]
    done = done[int(_STARTS * len(done)) :]
    if len(done) < _FEWEST_STEPS:
        return 0.0, 0.0
    middle = len(done) // 2
    first, second = throughput(done[: middle + 1]), throughput(done[middle:])
    return first.tokens_per_second, second.tokens_per_second


def _moved(one: float, other: float) -> float:
    """Return the larger of two figures in terms of the smaller; 1 where one is not known."""
    return max(one, other) / min(one, other) if min(one, other) > 0 else 1.0
