"""Decide which jobs give their slot to one of higher priority: a pure function.

A job preempts only where it would otherwise wait, and only jobs of lower priority; of those that it
could replace the least important one goes, and of several the one that has done least since its
last checkpoint. What it gives up is asked for a checkpoint first, so that no step is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from windrow_operator.model import Job, JobPlacement, Slot
from windrow_operator.planning import NoPlacement, place, refusal
from windrow_operator.slot_table import SlotTable


def victims(
    jobs: Iterable[Job],
    slots: Mapping[str, Slot],
    runs: Mapping[str, JobPlacement],
    waiting: Iterable[Job],
) -> dict[str, str]:
    """Return the UIDs of the jobs that are to give way, each with the key of the job it is for.

    Args:
        jobs: that have a slot.
        slots: by key.
        runs: the newest placements by job UID.
        waiting: the jobs that wait for a slot, those first that should be placed first.
    """
    placed = list(jobs)
    table = slots if isinstance(slots, SlotTable) else SlotTable(slots.values())
    chosen: dict[str, str] = {}
    for job in waiting:
        if not job.may_preempt or not isinstance(place(job, table), NoPlacement):
            continue
        if any(job.key == by for by in (other.preempted_by for other in placed)):
            continue  # a slot is on its way to it
        candidates = [
            other
            for other in placed
            if other.uid not in chosen and not other.preempted_by and _gives_way(other, job, slots)
        ]
        if candidates:
            victim = min(candidates, key=lambda other: (other.priority, _undone(other, runs)))
            chosen[victim.uid] = job.key
    return chosen


def _gives_way(victim: Job, job: Job, slots: Mapping[str, Slot]) -> bool:
    slot = slots.get(victim.slot)
    if slot is None or victim.priority >= job.priority or victim.deleted_at is not None:
        return False
    if victim.namespace != job.namespace and not _reaches_across(slot):
        return False
    without = tuple(holder for holder in slot.holders if holder.uid != victim.uid)
    return not refusal(job, replace(slot, holders=without))


def _reaches_across(slot: Slot) -> bool:
    """Return whether a job may take the slot of one of another namespace."""
    spec = slot.terms.policy.spec if slot.terms else None
    return spec is not None and spec.access.preempt_across_namespaces


def _undone(job: Job, runs: Mapping[str, JobPlacement]) -> int:
    """Return how many steps a job has done since its last checkpoint."""
    run = runs.get(job.uid)
    return run.progress.step - run.progress.checkpoint_step if run else 0
