"""Decide which decode pods get a sidecar attached now: a pure function of pods, slots and jobs.

A pod whose policy observes gets one as soon as its decode container is ready: its figures are the
purpose. A pod whose policy harvests gets one when a job waits that could go there; until then it
runs nothing of ours. A slot is known only once a sidecar tells of it, so for each waiting job one
pod after the other is tried until the job is placed, those that serve the job's own model first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from windrow_operator.model import EffectivePolicy, Job, Pod, Slot
from windrow_operator.planning import admission_refusal, same_model

# A sidecar that has not attached by then does not count as coming any more.
COMES_WITHIN: Final = timedelta(seconds=120)
# After the first end the next container comes at once, then ever later.
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=5), timedelta(minutes=5)
# Ephemeral containers are never removed from a pod, and each one makes the object larger.
MOST_PER_POD: Final = 32


@dataclass(frozen=True, slots=True)
class PodView:
    """A decode pod, as this decision sees it.

    Attributes:
        terms: of its policy now; None: no policy selects it.
        slots: that its sidecar reported and that are attached.
        held: a job is on one of its slots, by the job's status.
        asked_at: when a sidecar was last added, by this operator.
        retry_at: not before then, since adding one was refused.
    """

    pod: Pod
    terms: EffectivePolicy | None
    slots: tuple[Slot, ...] = ()
    held: bool = False
    asked_at: datetime | None = None
    retry_at: datetime | None = None


def wanted(
    views: Iterable[PodView], waiting: Iterable[Job], now: datetime
) -> tuple[list[Pod], datetime | None]:
    """Return the pods that get a sidecar now, and when to look again at the latest."""
    start: list[Pod] = []
    candidates: list[PodView] = []
    coming = 0
    look_again: list[datetime] = []
    for view in views:
        if not _takes_one(view):
            continue
        if view.pod.sidecar.alive:
            coming += _is_coming(view, now)
            continue
        due = _due(view)
        if due is not None and due > now:
            look_again.append(due)
        elif view.held or (view.terms and view.terms.mode == "observe"):
            start.append(view.pod)
        else:
            candidates.append(view)
    for job in waiting:
        if coming:
            coming -= 1  # the one that comes may be this job's
            continue
        found = _best(job, candidates)
        if found is not None:
            candidates.remove(found)
            start.append(found.pod)
    return start, min(look_again, default=None)


def _takes_one(view: PodView) -> bool:
    pod, terms = view.pod, view.terms
    spec = terms.policy.spec if terms else None
    return (
        pod.sidecar.prepared
        and not pod.sidecar.native
        and pod.sidecar.decode_ready
        and not pod.ending
        and pod.sidecar.attached < MOST_PER_POD
        and not view.slots
        and spec is not None
        and spec.sidecar.form == "attach"
        and terms is not None
        and terms.mode != "off"
    )


def _is_coming(view: PodView, now: datetime) -> bool:
    return view.asked_at is not None and now - view.asked_at < COMES_WITHIN


def _due(view: PodView) -> datetime | None:
    """Return before when no sidecar is added; None: there is no such moment."""
    state = view.pod.sidecar
    moments = [view.retry_at] if view.retry_at else []
    if state.ended_at is not None and state.attached > 1:
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (state.attached - 2))
        moments.append(state.ended_at + pause)
    return max(moments, default=None)


def _best(job: Job, candidates: Iterable[PodView]) -> PodView | None:
    open_to_it = [
        view for view in candidates if not admission_refusal(job, Slot("", terms=view.terms))
    ]
    return min(
        open_to_it,
        key=lambda view: (
            not same_model(job, view.pod.model),
            view.pod.sidecar.attached,
            view.pod.key,
        ),
        default=None,
    )
