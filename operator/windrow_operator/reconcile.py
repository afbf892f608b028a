"""Decide what to do about one FinetuneJob: a pure function of it and of the slots.

Level-based: it looks at the job's status (the truth, kept by the API server), at what the sidecar
last said about the placement, and at the clock, and returns the next step. Called again in any
state, after a restart or a lost message, it returns the step that is due in that state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from windrow.conditions import ConditionType as T
from windrow.conditions import Reason, get_condition, is_finished, is_true
from windrow_operator import status
from windrow_operator.model import (
    ALIVE,
    STALE_AFTER,
    Job,
    JobPlacement,
    RunState,
    Slot,
    UnreadableSecret,
    name_in,
)
from windrow_operator.planning import NoPlacement, admission_refusal, place, served_models
from windrow_operator.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts of the operator's decisions."""

    # A stream that is dead without a word is ended after 3 to 10 s (see `attach`), so that a slot
    # is lost within 30 s and not before 20. By then a sidecar has dialled again (after ten seconds
    # at the latest), and the worker of one that hangs has written a checkpoint and ended (14 s).
    gone_grace: timedelta = timedelta(seconds=12)  # stream dropped, pod gone
    lost_grace: timedelta = timedelta(seconds=17)  # stream dropped, pod still there
    return_grace: timedelta = timedelta(seconds=60)  # not back yet since this replica leads
    start_timeout: timedelta = timedelta(seconds=180)  # assigned, no sign of the worker
    stop_timeout: timedelta = timedelta(seconds=60)  # asked to stop, not stopped
    stop_repeat: timedelta = timedelta(seconds=10)  # asked again while nothing happens
    rejected_pause: timedelta = timedelta(seconds=2)  # doubled with every one in a row
    rejected_cap: timedelta = timedelta(minutes=1)
    # A job may take its sidecar or its worker down without a word so many times in a row.
    most_losses: int = 3
    backoff_base: timedelta = timedelta(seconds=2)  # doubled with every failure
    backoff_cap: timedelta = timedelta(minutes=5)
    secret_pause: timedelta = timedelta(seconds=30)  # a Secret that could not be read


@dataclass(frozen=True, slots=True)
class Command:
    """One word to the sidecar of the job's slot: ASSIGN, STOP or ABORT."""

    action: str
    slot: str
    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """Event that people look for in `kubectl describe`."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class Actions:
    """The next step. Carried out in this order: finalizer, status, commands, events, deletion."""

    finalizer: bool | None = None  # True: add ours, False: remove it
    status: Mapping[str, Any] | None = None  # the whole status; None: as it is
    commands: tuple[Command, ...] = ()
    events: tuple[Event, ...] = field(default=())
    delete: bool = False
    # The placement ended without getting further, or: it got further. None: neither.
    slot_failed: bool | None = None
    wake_at: datetime | None = None  # the latest moment at which to look again


NOTHING = Actions()
# A job's checkpoints belong to its UID, so a new one does not meet those of the old.
_NEW_JOB = "Fix it in a new job: one that has failed does not run again."


def reconcile(
    job: Job, run: JobPlacement | None, slots: Mapping[str, Slot], now: datetime, timeouts: Timeouts
) -> Actions:
    """Return the next step for `job`.

    Args:
        job: the job as the API server holds it.
        run: what the sidecar said about the placement of `job.epoch`; None: nothing.
        slots: all slots by key.
        now: an aware datetime.
        timeouts: how long to wait for what.
    """
    if not job.is_ours:
        return NOTHING
    if is_finished(job.status.get("conditions")):
        return _after_the_end(job, now)
    if job.deleted_at is not None:
        return _deleting(job, run, slots.get(job.slot), now, timeouts)
    if _deadline(job) is not None and now >= _deadline(job):  # type: ignore[operator]
        return _give_up(job, run, Reason.DEADLINE_EXCEEDED, _deadline_words(job), now, abort=True)
    run = _with_served_models(job, run, slots)
    step = _placed(job, run, slots, now, timeouts) if job.slot else _unplaced(job, slots, now)
    step = _with_admission(job, step, now)
    return _wake_by(_held(job, step), _deadline(job))


def _with_admission(job: Job, step: Actions, now: datetime) -> Actions:
    """Have the status say whether Kueue admits the job."""
    before = job.status if step.status is None else step.status
    after = status.with_admission(job, before, now)
    return step if after == dict(before) else replace(step, status=after)


def _held(job: Job, step: Actions) -> Actions:
    """Put our finalizer back that somebody took from a job with a slot, and say so."""
    if not job.slot or job.has_finalizer or step.finalizer is not None:
        return step
    message = (
        "The finalizer windrow.dev/cleanup was removed while the job has a slot, and is put back: "
        "without it a deletion does not wait for the worker"
    )
    event = Event("FinalizerRestored", message, warning=True)
    return replace(step, finalizer=True, events=(event, *step.events))


# --- the two ends of a job ------------------------------------------------------------------------


def _after_the_end(job: Job, now: datetime) -> Actions:
    finalizer = False if job.has_finalizer else None
    ttl = job.spec.ttl_seconds_after_finished if job.spec else None
    ended = _time(job.status.get("completionTime"))
    if ttl is None or ended is None or job.deleted_at is not None:
        return Actions(finalizer=finalizer)
    due = ended + timedelta(seconds=ttl)
    if now < due:
        return Actions(finalizer=finalizer, wake_at=due)
    return Actions(finalizer=finalizer, delete=True)


def _deleting(
    job: Job, run: JobPlacement | None, slot: Slot | None, now: datetime, timeouts: Timeouts
) -> Actions:
    """Stop the worker with a checkpoint, wait for it within bounds, then let the job go."""
    if not job.has_finalizer:
        return NOTHING
    bound = (job.deleted_at or now) + timeouts.stop_timeout
    if not job.slot or slot is None or slot.pod_gone:
        return Actions(finalizer=False)
    if run.state not in ALIVE if run else slot.attached:
        return Actions(finalizer=False)
    if now >= bound:
        return Actions(
            finalizer=False, commands=(Command("ABORT", job.slot, job.epoch, Reason.DELETED),)
        )
    if run is None:
        # The sidecar has not attached yet (the operator restarted): it may be running the job.
        return Actions(wake_at=bound)
    return _wake_by(_stop(job, run, Reason.DELETED, now, timeouts), bound)


def _give_up(
    job: Job, run: JobPlacement | None, reason: str, message: str, now: datetime, *, abort: bool
) -> Actions:
    commands = (Command("ABORT", job.slot, job.epoch, reason),) if abort and job.slot else ()
    return Actions(
        status=status.failed(job, run, reason, message, now),
        commands=commands,
        events=(Event(reason, message, warning=True),),
    )


# --- without a slot -------------------------------------------------------------------------------


def _unplaced(job: Job, slots: Mapping[str, Slot], now: datetime) -> Actions:
    refusal = _refusal(job)
    if refusal is not None:
        reason, message = refusal
        return _write_status(
            job, status.refused(job, reason, message, now), reason, message, warning=True
        )
    assert job.spec is not None
    if job.spec.suspend:
        after = status.suspended(job, None, now)
        return _write_status(job, after, Reason.SUSPENDED, "Suspended as spec.suspend asks")
    if job.is_queued:
        return _queued(job, now)
    retry_at = _time(job.status.get("retryAt"))
    if retry_at is not None and now < retry_at:
        return Actions(wake_at=retry_at)
    if job.unreadable is not None and now < job.unreadable.until:
        return without_secret(job, job.unreadable, now)
    choice = place(job, slots if isinstance(slots, SlotTable) else slots.values())
    if isinstance(choice, NoPlacement):
        after = status.waiting(job, Reason.NO_SLOT, choice.message, now)
        return _write_status(job, after, Reason.NO_SLOT, choice.message)
    return Actions(
        finalizer=None if job.has_finalizer else True,
        status=status.placed(job, choice.slot.key, choice.message, now),
        commands=(Command("ASSIGN", choice.slot.key, job.epoch + 1),),
        events=(Event(Reason.PLACED, choice.message),),
    )


def _queued(job: Job, now: datetime) -> Actions:
    """Leave a job waiting that Kueue has not admitted."""
    reason = job.admission.reason if job.admission else Reason.QUEUED
    message = job.admission.message if job.admission else f"Waits for LocalQueue {job.queue}"
    if reason == Reason.QUEUE_EVICTED:
        reason = Reason.QUEUED
    after = status.waiting(job, reason, message, now)
    return _write_status(job, after, reason, message, warning=reason == Reason.QUEUE_UNAVAILABLE)


def without_secret(job: Job, unreadable: UnreadableSecret, now: datetime) -> Actions:
    """Leave a job waiting whose Secret could not be read; it is read again after a while."""
    after = status.waiting(job, Reason.SECRET_UNREADABLE, unreadable.message, now)
    step = _write_status(job, after, Reason.SECRET_UNREADABLE, unreadable.message, warning=True)
    return replace(step, wake_at=unreadable.until)


def _refusal(job: Job) -> tuple[Reason, str] | None:
    if job.spec is None:
        return Reason.INVALID_SPEC, job.error
    if job.priority_class_missing:
        return (
            Reason.PRIORITY_CLASS_NOT_FOUND,
            f"spec.priorityClassName: there is no PriorityClass {job.priority_class_missing!r}. "
            "Create it, or name one that there is.",
        )
    if job.destination_owner:
        return (
            Reason.DESTINATION_IN_USE,
            f"spec.output.destination: {job.spec.output.destination!r} belongs to "
            f"{job.destination_owner}. Choose another directory, or wait until that job has ended.",
        )
    return None


# --- with a slot ----------------------------------------------------------------------------------


def _placed(
    job: Job, run: JobPlacement | None, slots: Mapping[str, Slot], now: datetime, timeouts: Timeouts
) -> Actions:
    slot = slots.get(job.slot)
    if run is not None and run.state not in ALIVE:
        gone = slot is not None and slot.pod_gone
        return _ended(job, run, now, timeouts, pod_gone=gone)
    if slot is None or not slot.attached:
        return _silent(job, run, slot, now, timeouts)
    if run is None:
        # It is attached and does not run the job: the assignment never reached it, or the worker
        # ended while no operator listened.
        return _lost(job, None, f"{name_in(job.slot)} does not run the job", now, timeouts)
    reason = _stop_reason(job, slot)
    if reason:
        return _stop(job, run, reason, now, timeouts)
    if run.state is RunState.ASSIGNED:
        return _starting(job, run, now, timeouts)
    if slot.silent:
        return _unheard(job, run.seen_at or run.since, now)
    after = status.running(job, run, now)
    warnings = _warnings(job, after)
    condition = get_condition(job.status.get("conditions"), T.RUNNING)
    if condition is None or condition["status"] == "False":
        reason = Reason.RESUMED if run.resumed else Reason.STARTED
        step = (job.status.get("checkpoint") or {}).get("step")
        begins = f", after step {step}" if run.resumed and step else ""
        event = Event(reason, f"{reason} on {name_in(job.slot)}{begins}")
        return Actions(status=after, events=(event, *warnings))
    return Actions(status=_changed(job, after), events=warnings)


def _warnings(job: Job, after: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return what is to be said of checkpoints, tracking and destination, where that is news."""
    held, events = job.status.get("conditions"), []
    for type_ in (T.CHECKPOINTED, T.TRACKED):
        said = get_condition(after.get("conditions"), type_)
        if said is not None and said != get_condition(held, type_):
            events.append(Event(said["reason"], said["message"], warning=said["status"] == "False"))
    placed, before = get_condition(after.get("conditions"), T.PLACED), get_condition(held, T.PLACED)
    if placed and placed["reason"] == Reason.DESTINATION_IN_USE and placed != before:
        events.append(Event(placed["reason"], placed["message"], warning=True))
    return tuple(events)


def _ended(
    job: Job, run: JobPlacement, now: datetime, timeouts: Timeouts, *, pod_gone: bool = False
) -> Actions:
    """Return the actions after a placement's end: its effect on the job, and pending reports."""
    step = _after(job, run, now, timeouts, pod_gone=pod_gone)
    if run.state in (RunState.SUCCEEDED, RunState.STOPPED) and run.got_further:
        step = replace(step, slot_failed=False)
    warnings = _warnings(job, step.status) if step.status is not None else ()
    return replace(step, events=(*warnings, *step.events))


def _after(
    job: Job, run: JobPlacement, now: datetime, timeouts: Timeouts, *, pod_gone: bool
) -> Actions:
    assert run.state not in ALIVE
    if run.state is RunState.SUCCEEDED:
        after = status.succeeded(job, run, now)
        return Actions(
            status=after,
            events=(Event(Reason.COMPLETED, f"Adapter in {after['adapter']['path']}"),),
        )
    if run.state is RunState.FAILED:
        return _failed(job, run, now, timeouts)
    if run.state is RunState.REJECTED:
        before = int(job.status.get("rejections") or 0)
        retry_at = now + min(timeouts.rejected_pause * 2**before, timeouts.rejected_cap)
        after = status.retried(job, run, retry_at, now, counts=False)
        return Actions(status=after, wake_at=retry_at, events=(_failure_event(run, "Rejected"),))
    if run.state is RunState.LOST:
        message = run.detail or f"The worker on {name_in(job.slot)} is gone"
        return _lost(job, run, message, now, timeouts, innocent=pod_gone)
    if job.spec is not None and job.spec.suspend:
        return Actions(
            status=status.suspended(job, run, now),
            events=(Event(Reason.SUSPENDED, _stopped(run)),),
            wake_at=now,
        )
    why = f"{run.stop_reason}; " if run.stop_reason else ""
    name = name_in(job.slot)
    message = ("" if name in why else f"{name}: ") + f"{why}{run.detail or _stopped_short(run)}"
    reason = Reason.SLOT_LOST
    if run.stop_asked_at and not pod_gone:
        reason = Reason.DECODE_BUSY if job.moves else Reason.POLICY_CHANGED
        reason = Reason.PREEMPTED if job.preempted_by else reason
        reason = Reason.QUEUE_EVICTED if job.lost_admission else reason
    return Actions(
        status=status.unplaced(job, run, reason, message, now),
        events=(Event(reason, message),),
        wake_at=now,
    )


def _stopped_short(run: JobPlacement) -> str:
    if not run.progress.checkpoint_path:
        return "stopped before the first checkpoint"
    return f"stopped with a checkpoint of step {run.progress.checkpoint_step}"


def _stopped(run: JobPlacement) -> str:
    if not run.progress.checkpoint_path:
        return "Stopped before the first checkpoint"
    return f"Stopped at step {run.progress.checkpoint_step}, in {run.progress.checkpoint_path}"


def _failed(job: Job, run: JobPlacement, now: datetime, timeouts: Timeouts) -> Actions:
    if run.user_error:
        message = f"{run.detail.rstrip('.')}. {_NEW_JOB}"
        return _give_up(job, run, run.reason or Reason.INVALID_SPEC, message, now, abort=False)
    attempts = int(job.status.get("attempts") or 0) + 1
    limit = job.spec.backoff_limit if job.spec else 0
    if attempts > limit:
        message = f"{attempts} workers failed, the last by {run.reason}: {run.detail}"
        counted = replace(job, status={**job.status, "attempts": attempts})
        step = _give_up(counted, run, Reason.BACKOFF_LIMIT_EXCEEDED, message, now, abort=False)
        return replace(step, slot_failed=not run.got_further)
    retry_at = now + min(timeouts.backoff_base * 2 ** (attempts - 1), timeouts.backoff_cap)
    return Actions(
        status=status.retried(job, run, retry_at, now, counts=True),
        events=(_failure_event(run, Reason.WORKER_ERROR),),
        wake_at=retry_at,
        slot_failed=not run.got_further,
    )


def _with_served_models(
    job: Job, run: JobPlacement | None, slots: Mapping[str, Slot]
) -> JobPlacement | None:
    """Name what decode serves where a worker has not found the job's model: it needs no Hub."""
    if run is None or run.state is not RunState.FAILED or run.reason != Reason.MODEL_NOT_FOUND:
        return run
    table = slots if isinstance(slots, SlotTable) else SlotTable(slots.values())
    models = served_models(job, table)
    if not models:
        return run
    remedy = f"Slots serve {', '.join(models)}: a job that names one of them shares its weights."
    detail = f"{run.detail.rstrip('.')}. {remedy}"
    return replace(run, detail=detail, remedy=f"{run.remedy} {remedy}".strip())


def _failure_event(run: JobPlacement, default: str) -> Event:
    return Event(run.reason or default, run.detail or "no detail", warning=True)


def _silent(
    job: Job, run: JobPlacement | None, slot: Slot | None, now: datetime, timeouts: Timeouts
) -> Actions:
    """The sidecar is not attached: wait for it, longer while its pod is there."""
    if slot is None or slot.lost_at is None:
        return _lost(job, run, f"{name_in(job.slot)} is gone", now, timeouts, innocent=True)
    if slot.pod_gone:
        grace = timeouts.gone_grace
    else:
        grace = timeouts.return_grace if slot.awaited else timeouts.lost_grace
    due = slot.lost_at + grace
    if now < due:
        heard_at = (run.seen_at if run else None) or slot.lost_at
        return _wake_by(_unheard(job, heard_at, now), due)
    what = "its pod is gone" if slot.pod_gone else "its sidecar did not come back"
    message = f"{name_in(job.slot)} is lost: {what}"
    return _lost(job, run, message, now, timeouts, innocent=slot.pod_gone)


def _unheard(job: Job, heard_at: datetime, now: datetime) -> Actions:
    """Drop the figures of a worker that nothing is heard of."""
    running = get_condition(job.status.get("conditions"), T.RUNNING)
    if running is None or running["status"] == "False":
        return NOTHING  # it has sent no figures yet
    if now - heard_at < STALE_AFTER:
        return Actions(wake_at=heard_at + STALE_AFTER)
    return Actions(status=_changed(job, status.silent(job, heard_at, now)))


def _lost(
    job: Job,
    run: JobPlacement | None,
    message: str,
    now: datetime,
    timeouts: Timeouts,
    *,
    innocent: bool = False,
) -> Actions:
    """Forget the placement. The next one has a higher epoch, which fences whatever still runs.

    Where the pod is there and the job wrote no checkpoint since it was placed, the job itself may
    have taken sidecar or worker down: it backs off, and fails before it has walked the cluster.
    """
    event = Event(Reason.SLOT_LOST, message, warning=True)
    if innocent or run is None or run.got_further:
        after = status.lost(job, run, message, now, losses=0, retry_at=None)
        return Actions(status=after, events=(event,), wake_at=now)
    losses = int(job.status.get("losses") or 0) + 1
    if losses >= timeouts.most_losses:
        why = (
            f"{losses} placements in a row were lost without a new checkpoint, the last: {message}"
        )
        step = _give_up(job, run, Reason.BACKOFF_LIMIT_EXCEEDED, why, now, abort=True)
        return replace(step, slot_failed=True)
    retry_at = now + min(timeouts.backoff_base * 2 ** (losses - 1), timeouts.backoff_cap)
    after = status.lost(job, run, message, now, losses=losses, retry_at=retry_at)
    return Actions(status=after, events=(event,), wake_at=retry_at, slot_failed=True)


def _stop_reason(job: Job, slot: Slot) -> str:
    if job.spec is not None and job.spec.suspend:
        return "Suspended"
    # Drained or deleted: what the job has done since its last checkpoint need not be lost.
    if slot.pod_gone:
        return "the pod is ending"
    if job.lost_admission and job.admission is not None:
        return f"LocalQueue {job.queue} does not admit it any more: {job.admission.message}"
    if job.preempted_by:
        mine = job.preempted_by.partition("/")[0] == job.namespace
        who = f"job {job.preempted_by}" if mine else "a job of another namespace"
        return f"{who} of higher priority takes the slot"
    refusal = admission_refusal(job, slot)
    return f"{name_in(job.slot)} {refusal}" if refusal else job.moves


def _stop(job: Job, run: JobPlacement, reason: str, now: datetime, timeouts: Timeouts) -> Actions:
    """Ask for a checkpoint and the end; ask again now and then; do not wait for ever."""
    asked = run.stop_asked_at or now
    if now >= asked + timeouts.stop_timeout:
        detail = "the worker did not stop in time"
        stopped = replace(run, state=RunState.STOPPED, stop_reason=reason, detail=detail)
        step = _ended(job, stopped, now, timeouts)
        return replace(step, commands=(Command("ABORT", job.slot, job.epoch, reason),))
    again = run.stop_sent_at is None or now >= run.stop_sent_at + timeouts.stop_repeat
    # The worker that stops for another reason keeps its checkpoints; those of a deleted job go.
    again = again or (reason == Reason.DELETED != run.stop_reason)
    commands = (Command("STOP", job.slot, job.epoch, reason),) if again else ()
    after = status.running(job, replace(run, stop_asked_at=asked, stop_reason=reason), now)
    return Actions(
        status=_changed(job, after) if run.state is not RunState.ASSIGNED else None,
        commands=commands,
        wake_at=now + timeouts.stop_repeat,
    )


def _starting(job: Job, run: JobPlacement, now: datetime, timeouts: Timeouts) -> Actions:
    due = run.since + timeouts.start_timeout
    if now < due:
        return Actions(wake_at=due)
    seconds = f"{timeouts.start_timeout.total_seconds():.0f}"
    dead = replace(
        run,
        state=RunState.FAILED,
        reason=Reason.WORKER_DIED,
        detail=f"no sign of the worker within {seconds} s",
    )
    step = _failed(job, dead, now, timeouts)
    return replace(step, commands=(Command("ABORT", job.slot, job.epoch, "StartTimeout"),))


# --- small things ---------------------------------------------------------------------------------


def _write_status(
    job: Job, after: status.Body, reason: str, message: str, *, warning: bool = False
) -> Actions:
    """Write `after` if it differs; the event comes only when the conditions' reason changes."""
    changed = _changed(job, after)
    if changed is None:
        return NOTHING
    news = _reasons(job.status) != _reasons(after)
    return Actions(status=changed, events=(Event(reason, message, warning),) if news else ())


def _reasons(status_: Mapping[str, Any]) -> set[tuple[str, str, str]]:
    held = status_.get("conditions") or ()
    return {(c["type"], c["status"], c["reason"]) for c in held}


def _changed(job: Job, after: status.Body) -> status.Body | None:
    return after if after != dict(job.status) else None


def _deadline(job: Job) -> datetime | None:
    seconds = job.spec.active_deadline_seconds if job.spec else None
    start = _time(job.status.get("startTime"))
    if seconds is None or start is None or is_true(job.status.get("conditions"), T.SUSPENDED):
        return None
    return start + timedelta(seconds=seconds)


def _deadline_words(job: Job) -> str:
    seconds = job.spec.active_deadline_seconds if job.spec else 0
    return f"spec.activeDeadlineSeconds: {seconds} seconds have passed since startTime"


def _wake_by(step: Actions, due: datetime | None) -> Actions:
    if due is None:
        return step
    return replace(step, wake_at=min(due, step.wake_at) if step.wake_at else due)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
