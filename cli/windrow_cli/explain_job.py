"""Explain why a job is where it is, as a story."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from windrow.conditions import LIFECYCLE

if TYPE_CHECKING:
    from windrow.views import EventView, JobView, SlotView

# What a user can do about a state, where something can be done.
_ADVICE: Mapping[str, str] = {
    "NoSlot": "It is placed as soon as a slot can take it. Slots: windrow top.",
    "Queued": "Kueue admits it as its queue allows: kubectl get workloads.",
    "QueueUnavailable": "Install Kueue, give the operator its rights (kueue.enabled), or remove "
    "the label kueue.x-k8s.io/queue-name.",
    "InvalidSpec": "Fix the spec in a new job.",
    "DestinationInUse": "Name another output.destination in a new job, or wait.",
    "PriorityClassNotFound": "Create the PriorityClass; the job then continues.",
    "BackOff": "A worker failed and is retried; its log: windrow logs {name} --worker.",
    "Suspended": "Resume it: set spec.suspend to false (kubectl edit ftj {name}).",
    "Paused": "Decode needs the device. The job continues when decode needs less; if it never "
    "does, give it slots with more headroom.",
    "Silent": "Nothing to do yet: if the sidecar stays silent, the job resumes elsewhere.",
    "BackoffLimitExceeded": "The worker's log: windrow logs {name} --worker. A new job starts "
    "over.",
    "DeadlineExceeded": "Submit it again with a longer activeDeadlineSeconds.",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of why a job is where it is.

    Attributes:
        job: namespace/name.
        state: as `kubectl get ftj` prints it.
        because: reason and message of the condition that the state comes from.
        meaning: what that reason means; empty: the message says it all.
        advice: what to do about it; empty: nothing.
        progress: how far it is, in words.
        slot: what its slot does, in words; empty: it has none.
        story: what has happened, oldest first.
    """

    job: str
    state: str
    because: str
    meaning: str
    advice: str
    progress: str
    slot: str
    story: Sequence[str]


def explain_job(
    job: JobView,
    conditions: Sequence[Mapping[str, Any]],
    events: Sequence[EventView],
    slot: SlotView | None,
    now: datetime,
) -> Explanation:
    """Return the explanation of a job from what the API server knows."""
    meaning = next((row.meaning for row in LIFECYCLE if row.reason == job.reason), "")
    advice = _ADVICE.get(job.reason, _ADVICE.get(job.state, "")).format(name=job.name)
    return Explanation(
        job=f"{job.namespace}/{job.name}",
        state=job.state,
        because=f"{job.reason}: {job.message}" if job.message else job.reason,
        meaning=meaning,
        advice=advice,
        progress=_progress(job),
        slot=_slot(slot),
        story=[*story_of(events, now)] or [*_turns(conditions, now)],
    )


def _progress(job: JobView) -> str:
    if not job.total_steps:
        return "no step yet"
    parts = [f"step {job.steps_done}"]
    if job.loss is not None:
        parts.append(f"loss {job.loss:.3f}")
    if job.tokens_per_second:
        parts.append(f"{job.tokens_per_second:,.0f} tokens/s")
    if job.eta_s and not job.finished:
        parts.append(f"{job.eta_s:.0f} s left")
    if job.checkpoint_step:
        parts.append(f"checkpoint of step {job.checkpoint_step}")
    if job.epoch > 1:
        parts.append(f"placed {job.epoch} times")
    return ", ".join(parts)


def _slot(slot: SlotView | None) -> str:
    if slot is None:
        return ""
    if not slot.reported:
        return f"{slot.name}: its sidecar does not report ({slot.why})"
    objective = f" of {slot.objective_s * 1e3:.1f} ms" if slot.objective_s else ""
    tpot = f"p99 {slot.tpot_p99_s * 1e3:.1f} ms{objective}" if slot.tpot_p99_s else "decode idle"
    shared = f"; its GPU is shared in {slot.sharing}" if slot.sharing else ""
    said = f"{shared}; {slot.breaker}" if slot.breaker else shared
    return (
        f"{slot.name} by policy {slot.policy}: {tpot}, batch {slot.batch}, "
        f"{slot.finetune_units} of {slot.compute_units} units and {slot.chunks.lent} of "
        f"{slot.chunks.total} chunks for the worker{said}"
    )


def story_of(events: Sequence[EventView], now: datetime) -> list[str]:
    """Return events as lines: how long ago, a mark on warnings, reason and message."""
    return [
        f"{_ago(event.at, now)} {'!' if event.warning else ' '} {event.reason}: {event.message}"
        for event in events
    ]


def _turns(conditions: Sequence[Mapping[str, Any]], now: datetime) -> list[str]:
    """Events are kept for an hour; conditions tell of the last turn of each kind."""
    ordered = sorted(conditions, key=lambda one: str(one.get("lastTransitionTime", "")))
    return [
        f"{_ago(one['lastTransitionTime'], now)}   {one['type']} {one['status']}: {one['message']}"
        for one in ordered
    ]


def _ago(at: str, now: datetime) -> str:
    seconds = max(0, int((now - datetime.fromisoformat(at)).total_seconds()))
    if seconds < 60:
        return f"{seconds:>4}s"
    if seconds < 3600:
        return f"{seconds // 60:>4}m"
    return f"{seconds // 3600:>4}h" if seconds < 48 * 3600 else f"{seconds // 86400:>4}d"


def text_of(explanation: Explanation) -> str:
    """Return an explanation for people."""
    lines = [
        f"{explanation.job} is {explanation.state}: {explanation.because or 'as it should be'}"
    ]
    lines += [f"  {line}" for line in (explanation.meaning, explanation.advice) if line]
    lines.append(f"progress  {explanation.progress}")
    if explanation.slot:
        lines.append(f"slot      {explanation.slot}")
    lines.append("story")
    lines += [f"  {line}" for line in explanation.story] or ["  nothing has happened yet"]
    return "\n".join(lines)
