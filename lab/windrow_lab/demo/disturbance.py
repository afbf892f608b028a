"""Disturbance of a run by its machine: its speed moved, or other processes used its cores."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from windrow.eventlog import TaskletEvent
from windrow_lab.figures.summary import throughput
from windrow_lab.machine.cpu_use import PROC, CpuUse
from windrow_lab.machine.pace import SLOWER, MachinePace

SAMPLE_S = 0.5
LOOKS = 5  # where the first one finds the cores busy
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
        busiest: which other processes used most, where they used much; "": nobody can be named.
    """

    at_s: float
    pass_us: float
    busy_share: float
    stolen_s: float
    busiest: str = ""

    @classmethod
    def take(
        cls,
        cores: Collection[int],
        *,
        proc: Path = PROC,
        wait: Callable[[float], None] = time.sleep,
    ) -> MachineSample:
        """Look at these cores for `SAMPLE_S`, and time the piece of work.

        A moment may be busy because something is just ending: the build before a demo, or what
        its disk is still to write. So a busy moment is looked at again, and the median counts.

        Args:
            cores: that the run computes on.
            proc: where the kernel tells of processes.
            wait: lets so many seconds pass.
        """
        shares: list[float] = []
        busiest = ""
        before = CpuUse.read(cores, proc)
        while len(shares) < (LOOKS if shares and shares[0] > BUSY_SHARE else 1):
            wait(SAMPLE_S)
            now = CpuUse.read(cores, proc)
            shares.append(now.others_share(before))
            if shares[-1] > BUSY_SHARE:
                busiest = now.busiest(before) or busiest
            before = now
        share = median(shares)
        return cls(
            time.monotonic(),
            MachinePace(cores).now_us(),
            share,
            before.stolen / os.sysconf("SC_CLK_TCK"),
            busiest if share > BUSY_SHARE else "",
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
            who = f", mostly {sample.busiest}" if sample.busiest else ""
            share = f"{sample.busy_share:.0%} of its cores{who}"
            reasons.append(f"{moment} the run, other processes used {share}.")
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
