"""Status of a FinetuneJob after each turn of its life.

Every function takes the status before and returns the whole status after; nothing is changed in
place. The table in `windrow.conditions` lists the reasons.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from windrow.conditions import ConditionType as T
from windrow.conditions import Reason, Status, get_condition, set_condition, state_of, timestamp
from windrow.outputs import OWN_FOLDER, path_of
from windrow_operator.model import Job, JobPlacement, RunState, WorkerProgress
from windrow_operator.planning import rate

Body = dict[str, Any]

# A shorter pause is decode's daily business: the tokens per second show it, the conditions do not.
NOTABLE_PAUSE = timedelta(seconds=10)

# As workers name them: finished steps, and rows of the next one.
_CHECKPOINT = re.compile(r"step-[0-9]{8,12}-[0-9]{5,12}")
# Only how far the job is: such a change can wait, so that it costs few writes.
FLOWING = frozenset({"progress", "step", "loss", "tokensPerSecond", "eta"})


def accepted(job: Job, now: datetime) -> Body:
    """The spec is valid and the destination is the job's own."""
    after = {key: value for key, value in job.status.items() if key != "userError"}
    return _with(job, after, now, (T.ACCEPTED, "True", Reason.VALID, "The spec is valid"))


def refused(job: Job, reason: Reason, message: str, now: datetime) -> Body:
    """The job cannot be placed before somebody changes something."""
    return _with(
        job,
        _with_user_error(job.status, job.error_field, job.error_remedy),
        now,
        (T.ACCEPTED, "False", reason, message),
        (T.PLACED, "False", reason, "The job is not accepted"),
        (T.RUNNING, "False", Reason.NOT_PLACED, "The job has no slot"),
    )


def waiting(job: Job, reason: Reason, message: str, now: datetime) -> Body:
    """The job could run, but not now."""
    return _with(
        job,
        accepted(job, now),
        now,
        (T.SUSPENDED, "False", Reason.NOT_SUSPENDED, "The job is not suspended"),
        (T.PLACED, "False", reason, message),
        (T.RUNNING, "False", Reason.NOT_PLACED, "The job has no slot"),
    )


def with_admission(job: Job, status: Mapping[str, Any], now: datetime) -> Body:
    """Return `status` with what Kueue says of the job; without, where it names no queue."""
    held = list(status.get("conditions") or ())
    if not job.queue:
        left = [condition for condition in held if condition["type"] != T.ADMITTED]
        return {**status, "conditions": left} if len(left) < len(held) else dict(status)
    if job.admission is None:
        return dict(status)  # what was known before stays until it is read again
    value: Status = "True" if job.admission.admitted else "False"
    fact = (T.ADMITTED, value, job.admission.reason, job.admission.message)
    return _with(job, status, now, fact)


def placed(job: Job, slot: str, message: str, now: datetime) -> Body:
    """A slot is assigned under the next epoch. To be written before the sidecar hears of it."""
    before = accepted(job, now)
    resumes = get_condition(before.get("conditions"), T.SUSPENDED)
    if resumes is not None and resumes["status"] == "True":
        before.pop("startTime", None)  # as for Jobs of Kubernetes, the deadline starts over
    before |= {"epoch": job.epoch + 1, "slot": slot}
    before.setdefault("startTime", timestamp(now))
    before.pop("retryAt", None)
    if get_condition(before.get("conditions"), T.EVICTED) is not None:
        words = "The job has a slot again"
        before = _with(
            job,
            before,
            now,
            (T.EVICTED, "False", Reason.PLACED, words),
            (T.REQUEUED, "False", Reason.PLACED, words),
        )
    return _with(
        job,
        before,
        now,
        (T.SUSPENDED, "False", Reason.NOT_SUSPENDED, "The job is not suspended"),
        (T.PLACED, "True", Reason.PLACED, message),
        (T.RUNNING, "False", Reason.STARTING, "The worker is loading the job"),
    )


def running(job: Job, run: JobPlacement, now: datetime) -> Body:
    """Return the status of a job that the worker has loaded, and its progress."""
    after = _progress(job, run)
    fact: tuple[str, str]
    if run.stop_asked_at is not None:
        why = f": {run.stop_reason}" if run.stop_reason else ""
        fact = (Reason.STOPPING, f"The worker writes a checkpoint and stops{why}")
    elif run.state is RunState.PAUSED and now - run.since >= NOTABLE_PAUSE:
        fact = (Reason.PAUSED, run.detail or "Decode has all compute for now")
    elif run.resumed:
        fact = (Reason.RESUMED, run.started or "The worker resumed from a checkpoint")
    else:
        fact = (Reason.STARTED, run.started or "The worker has loaded the job")
    after = _placed_alone(job, _warned(job, after, run, now), now)
    after.pop("rejections", None)
    return _with(job, after, now, (T.RUNNING, "True", fact[0], fact[1]))


def _placed_alone(job: Job, status: Body, now: datetime) -> Body:
    """Return `status` with what policies that were edited say of the destination meanwhile."""
    held = get_condition(status.get("conditions"), T.PLACED)
    if job.destination_owner and job.spec is not None:
        message = (
            f"By the policies of now, spec.output.destination {job.spec.output.destination!r} "
            f"belongs to {job.destination_owner}. This one goes on with the volumes that its "
            "pod has; should it lose its slot, it waits until that job has ended"
        )
        return _with(job, status, now, (T.PLACED, "True", Reason.DESTINATION_IN_USE, message))
    if held is not None and held["reason"] == Reason.DESTINATION_IN_USE:
        message = "No other job has the destination any more"
        return _with(job, status, now, (T.PLACED, "True", Reason.PLACED, message))
    return status


def silent(job: Job, heard_at: datetime, now: datetime) -> Body:
    """Return the status where the worker is silent since `heard_at`: its progress is unknown.

    Its last step is in the message, as what it was, and in `progress` beside its other totals.
    """
    after = _without_rates(job.status)
    step = after.pop("step", "")
    at = f", when it was at step {step}" if step else ""
    held = get_condition(job.status.get("conditions"), T.RUNNING)
    if held is not None and held["reason"] == Reason.SILENT:
        message = held["message"]
    else:
        message = f"Nothing was heard of the worker since {timestamp(heard_at)}{at}"
    return _with(job, after, now, (T.RUNNING, "Unknown", Reason.SILENT, message))


def unplaced(
    job: Job, run: JobPlacement | None, reason: Reason, message: str, now: datetime
) -> Body:
    """The placement is over, the job is not: it goes on from its checkpoint."""
    after = _without_rates(_progress(job, run) if run else job.status)
    after = _warned(job, after, run, now) if run else after
    after.pop("slot", None)
    if "progress" in after:
        step = (after.get("checkpoint") or {}).get("step", 0)
        after["progress"] = {**after["progress"], "step": step}
        after["step"] = _steps(step, after["progress"].get("totalSteps", 0))
    facts: list[tuple[str, Status, str, str]] = [
        (T.PLACED, "False", reason, message),
        (T.RUNNING, "False", Reason.NOT_PLACED, "The job has no slot"),
    ]
    if job.slot:
        after["evictions"] = _counted(job.status.get("evictions") or (), reason)
        facts.append((T.EVICTED, "True", reason, message))
        facts.append(_requeued(reason, after["evictions"]))
    return _with(job, after, now, *facts)


def _requeued(reason: str, evictions: Iterable[Body]) -> tuple[str, Status, str, str]:
    if reason == Reason.SUSPENDED:
        return (T.REQUEUED, "False", reason, "The job waits for nothing: it is suspended")
    counts = {entry["reason"]: int(entry["count"]) for entry in evictions}
    times = sum(counts.values())
    why = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return (T.REQUEUED, "True", reason, f"Evicted {times} time{'s'[: times > 1]}: {why}")


def _counted(held: Iterable[Mapping[str, Any]], reason: str) -> list[Body]:
    counts = {entry["reason"]: int(entry["count"]) for entry in held}
    counts[str(reason)] = counts.get(str(reason), 0) + 1
    return [{"reason": name, "count": count} for name, count in counts.items()]


def suspended(job: Job, run: JobPlacement | None, now: datetime) -> Body:
    """Stopped as asked."""
    base = unplaced(job, run, Reason.SUSPENDED, "spec.suspend is true", now)
    checkpoint = base.get("checkpoint")
    at = f" at step {checkpoint['step']}" if checkpoint else ""
    message = f"Suspended{at}"
    return _with(
        job,
        base,
        now,
        (T.ACCEPTED, "True", Reason.VALID, "The spec is valid"),
        (T.SUSPENDED, "True", Reason.SUSPENDED, message),
    )


def retried(
    job: Job, run: JobPlacement, retry_at: datetime, now: datetime, *, counts: bool
) -> Body:
    """The worker failed (`counts`) or was not taken; the next attempt comes at `retry_at`."""
    reason = Reason.BACK_OFF if counts else Reason.REJECTED
    what = f"{run.reason or 'WorkerError'}: {run.detail or 'no detail'}"
    after = unplaced(job, run, reason, f"{what}. Tried again at {timestamp(retry_at)}", now)
    after["retryAt"] = timestamp(retry_at)
    count = "attempts" if counts else "rejections"
    after[count] = int(job.status.get(count) or 0) + 1
    return after


def lost(
    job: Job,
    run: JobPlacement | None,
    message: str,
    now: datetime,
    *,
    losses: int,
    retry_at: datetime | None,
) -> Body:
    """The placement was lost; `losses` in a row without a new checkpoint, this one included."""
    again = f". Tried again at {timestamp(retry_at)}" if retry_at else ""
    after = unplaced(job, run, Reason.SLOT_LOST, f"{message}{again}", now)
    after.pop("losses", None)
    if losses:
        after["losses"] = losses
    if retry_at is not None:
        after["retryAt"] = timestamp(retry_at)
    return after


def succeeded(job: Job, run: JobPlacement, now: datetime) -> Body:
    """All steps are done."""
    after = _finished(job, run, now)
    # Never what the sidecar says: servers load from there.
    path = path_of(job.spec.output.destination) if job.spec else ""
    after["adapter"] = {"path": path}
    if run.adapter_digest:  # a claim: what is loaded has to have it
        after["adapter"]["digest"] = run.adapter_digest
    return _with(
        job, after, now, (T.SUCCEEDED, "True", Reason.COMPLETED, f"The adapter is in {path}")
    )


def failed(job: Job, run: JobPlacement | None, reason: str, message: str, now: datetime) -> Body:
    """No retry is left, or none can help."""
    after = _finished(job, run, now)
    if run is not None and run.user_error:
        after = _with_user_error(after, run.field, run.remedy)
    return _with(job, after, now, (T.FAILED, "True", reason, message))


def _with_user_error(status: Mapping[str, Any], field: str, remedy: str) -> Body:
    """Return `status` with what a person is to change; without, where nothing names it."""
    after = {key: value for key, value in status.items() if key != "userError"}
    if field or remedy:
        after["userError"] = {"field": field, "remedy": remedy}
    return after


def _finished(job: Job, run: JobPlacement | None, now: datetime) -> Body:
    after = _without_rates(_progress(job, run) if run else job.status)
    after = _warned(job, after, run, now) if run else after
    for gone in ("slot", "retryAt"):
        after.pop(gone, None)
    after["completionTime"] = timestamp(now)
    requeued = get_condition(after.get("conditions"), T.REQUEUED)
    if requeued is not None and requeued["status"] == "True":
        after = _with(job, after, now, (T.REQUEUED, "False", Reason.FINISHED, "The job has ended"))
    return _with(
        job,
        after,
        now,
        (T.PLACED, "False", Reason.FINISHED, "The job has given its slot back"),
        (T.RUNNING, "False", Reason.FINISHED, "The job has ended"),
    )


def deployed(job: Job, reason: Reason, message: str, now: datetime) -> Body:
    """Return the status of loading the adapter into serving pods."""
    value: Status = "True" if reason is Reason.LOADED else "False"
    after = dict(job.status)
    if reason is Reason.LOADED and "servedAt" not in after.get("adapter", {}):
        after["adapter"] = {**after.get("adapter", {}), "servedAt": timestamp(now)}
    return _with(job, after, now, (T.DEPLOYED, value, reason, message))


def _with(
    job: Job, status: Mapping[str, Any], now: datetime, *facts: tuple[str, Status, str, str]
) -> Body:
    """Return `status` with these conditions, the word for people and the generation."""
    held = list(status.get("conditions") or ())
    for type_, value, reason, message in facts:
        held = set_condition(held, type_, value, reason, message, job.generation, now)
    return {
        **status,
        "conditions": held,
        "state": state_of(held),
        "observedGeneration": job.generation,
    }


def _warned(job: Job, status: Body, run: JobPlacement, now: datetime) -> Body:
    """Return `status` with what the worker says of checkpoints and of tracking servers."""
    if run.tracking is not None:
        value: Status = "True" if run.tracking[0] == Reason.TRACKING_RESUMED else "False"
        status = _with(job, status, now, (T.TRACKED, value, *run.tracking))
    if run.trouble is None:
        return status
    reason, detail = run.trouble
    if reason:
        return _with(job, status, now, (T.CHECKPOINTED, "False", reason, detail))
    return _with(job, status, now, (T.CHECKPOINTED, "True", Reason.CHECKPOINT_WRITTEN, detail))


def own_checkpoint(job: Job, step: int, said: str) -> str:
    """Return the path of a checkpoint of `job` that `said` reports; "": there is none.

    A sidecar's word decides over the name only: the folder is the job's own, below its destination.
    """
    if not said:
        return ""
    name = posixpath.basename(said)
    if not _CHECKPOINT.fullmatch(name):
        name = f"step-{step:08d}-00000"
    # A spec that is not valid any more names no destination.
    place = path_of(job.spec.output.destination) if job.spec else ""
    return posixpath.join(place, OWN_FOLDER, job.uid, "checkpoints", name)


def _progress(job: Job, run: JobPlacement) -> Body:
    """Return the job's status with what the worker reported; a field it has not reported stays."""
    after = dict(job.status)
    progress = run.progress
    if progress.total_steps or progress.step:
        after["progress"] = _numbers(progress)
        after["step"] = _steps(progress.step, progress.total_steps)
        after["tokensPerSecond"] = rate(progress.tokens_per_second)
        if math.isfinite(progress.loss):
            after["loss"] = f"{progress.loss:.3f}"
        after.pop("eta", None)
        if progress.eta_seconds > 0:
            after["eta"] = clock(progress.eta_seconds)
    if path := own_checkpoint(job, progress.checkpoint_step, progress.checkpoint_path):
        after["checkpoint"] = {"step": progress.checkpoint_step, "path": path}
    if math.isfinite(run.base_loss) and math.isfinite(run.tuned_loss):
        after["evaluation"] = {"baseLoss": run.base_loss, "tunedLoss": run.tuned_loss}
    return after


def _steps(step: int, total: int) -> str:
    return f"{step}/{total}" if total else f"{step}"


def _without_rates(status: Mapping[str, Any]) -> Body:
    """Return `status` without what is true only while a worker reports."""
    after = {key: value for key, value in status.items() if key not in ("tokensPerSecond", "eta")}
    if "progress" in after:
        rates = ("tokensPerSecond", "etaSeconds", "joinedWith")
        after["progress"] = {k: v for k, v in after["progress"].items() if k not in rates}
    return after


def _numbers(progress: WorkerProgress) -> Body:
    numbers: Body = {
        "step": progress.step,
        "totalSteps": progress.total_steps,
        "tokensPerSecond": round(progress.tokens_per_second, 1),
        "tokens": progress.tokens,
        "skippedRows": progress.skipped_rows,
        "cutRows": progress.cut_rows,
        **({"joinedWith": progress.joined_with} if progress.joined_with else {}),
    }
    if math.isfinite(progress.loss):
        numbers["loss"] = progress.loss
    if progress.eta_seconds > 0:
        numbers["etaSeconds"] = round(progress.eta_seconds, 1)
    return numbers


def clock(seconds: float) -> str:
    """Return a length for people: `42s`, `1m12s`, `3h05m`."""
    whole = int(timedelta(seconds=seconds).total_seconds())
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def is_urgent(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether more than progress and words changed, so that the write should not wait.

    Why slots refuse a job that waits changes with each of them, and there may be a thousand.
    """
    keys = (before.keys() | after.keys()) - FLOWING - {"conditions"}
    if any(before.get(key) != after.get(key) for key in keys):
        return True
    return _without_words(before) != _without_words(after)


def _without_words(status: Mapping[str, Any]) -> list[Body]:
    """Return the conditions; of a job that no slot takes, without why each one refuses."""
    return [
        {**condition, "message": ""} if condition["reason"] == Reason.NO_SLOT else condition
        for condition in status.get("conditions") or ()
    ]
