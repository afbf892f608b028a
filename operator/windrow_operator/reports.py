"""Apply what sidecars report to the cluster state.

Each function applies one message. A report about a placement counts only when it is the job's
newest one; where a hello or a heartbeat says that another one runs, the function returns the
command that ends the stale worker. An event says what has happened: a sidecar that dials again
tells those of jobs that have ended as well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from windrow.adapter_files import is_digest
from windrow.conditions import Reason
from windrow.crd import slot_name
from windrow.proto import attach_pb2 as pb
from windrow_operator import claims
from windrow_operator.cluster_state import ClusterState, LiveSlot, jobs_of
from windrow_operator.model import (
    ALIVE,
    STALE_AFTER,
    JobPlacement,
    Pod,
    RunState,
    WorkerProgress,
    key_of,
)

log = logging.getLogger(__name__)

_OF_TRACKING: Final = (Reason.TRACKING_FAILED, Reason.TRACKING_RESUMED)
_STATE: Final = {
    pb.JobEvent.STARTED: RunState.RUNNING,
    pb.JobEvent.RESUMED: RunState.RUNNING,
    pb.JobEvent.PAUSED: RunState.PAUSED,
    pb.JobEvent.STOPPED: RunState.STOPPED,
    pb.JobEvent.SUCCEEDED: RunState.SUCCEEDED,
    pb.JobEvent.FAILED: RunState.FAILED,
    pb.JobEvent.REJECTED: RunState.REJECTED,
}
# A slot's prediction follows its heartbeats with this time constant: a burst of decode, or a gap
# between two, moves no job.
_PROMISE_OVER: Final = timedelta(minutes=2)
# Longer than anybody waits, and short enough for every clock.
_LONGEST_ETA_S: Final = 1e9


def take_hello(
    cluster: ClusterState, pod: Pod, hello: pb.SidecarHello, now: datetime, *, first: bool
) -> list[pb.JobCommand]:
    """Take up a sidecar's slots and what runs on them.

    With the first hello of a stream, a placement on this pod that the sidecar does not name is
    lost: the assignment never arrived, or the worker ended meanwhile. Of a slot that it does not
    name no engine has called it yet; what a sidecar before it said of the engine is over.
    """
    slots = claims.slots_of(hello)
    if len(slots) < len(hello.slots):
        log.warning(
            "the sidecar of pod %s names %d slots, of which %d can be",
            *(pod.key, len(hello.slots), len(slots)),
        )
    for facts in slots:
        _take_slot(cluster, pod, facts)
    mine = cluster.slots_of(pod.uid)
    called = {facts.index for facts in slots}
    for live in mine:
        live.attached, live.lost_at = True, None
        live.sidecar_version = claims.version(hello.windrow_version)
        if first and live.facts.index not in called:
            live.beat = live.beat_at = None
        cluster.changed_slots.mark(live.key)
    cluster.changed_pods.mark(pod.uid)
    stale = []
    for running in claims.running(hello.running):
        key = key_of(pod.namespace, slot_name(pod.name, running.slot))
        stale += _take_running(cluster, key, running, now)
    if first:
        named = {(running.job_uid, running.epoch) for running in hello.running}
        for run in [run for live in mine for run in cluster.runs_on(live.key)]:
            if run.state in ALIVE and (run.uid, run.epoch) not in named:
                _lose(cluster, run, "the sidecar came back without the worker", now)
    return stale


def take_heartbeat(
    cluster: ClusterState, live: LiveSlot, beat: pb.SlotHeartbeat, now: datetime
) -> list[pb.JobCommand]:
    """Take up the state of one slot."""
    since = now - live.beat_at if live.beat_at else timedelta.max
    said, most = beat.predicted_tokens_per_second, claims.most_tokens_per_second(live.facts)
    if said > most:
        if not live.overstates:
            log.warning(
                "slot %s reports %.3g tokens a second, more than its hardware can do: cut to %.3g",
                *(live.key, said, most),
            )
        live.overstates = True
    rate = claims.rate(said, most)
    claims.bound(beat, most)
    live.promise = smoothed_promise(live.promise, rate, since)
    live.beat, live.beat_at = beat, now
    cluster.changed_slots.mark(live.key)
    stale = []
    for running in claims.running(jobs_of(beat)):
        stale += _take_running(cluster, live.key, running, now)
    for run in cluster.runs_on(live.key):
        reported = run.seen_at is not None and run.state in ALIVE
        # The sidecar reports and no longer names it, and it has said no last word.
        if run.slot == live.key and reported and now - (run.seen_at or now) > STALE_AFTER:
            _lose(cluster, run, "the worker is gone without a word", now)
    return stale


def take_event(
    cluster: ClusterState, slots: Iterable[str], event: pb.JobEvent, now: datetime
) -> None:
    """Take up a turn in a job's life, reported by the sidecar that speaks for `slots`."""
    slot = next((key for key in slots if cluster.expects(event.job_uid, event.epoch, key)), "")
    if not slot:
        return
    run = _current(cluster, slot, event.job_uid, event.epoch, now)
    if run.state not in ALIVE:
        return  # a last word was said already
    cluster.put_run(_with_event(run, event, now))
    cluster.changed_slots.mark(slot)


def detach(cluster: ClusterState, pod: Pod, now: datetime) -> None:
    """Note that the stream of a pod's sidecar has ended."""
    for live in cluster.slots_of(pod.uid):
        live.attached, live.lost_at = False, now
        cluster.changed_slots.mark(live.key)


def smoothed_promise(promise: float, said: float, since: timedelta) -> float:
    """Return the prediction of a slot over the last minutes, by heartbeats of any interval.

    Args:
        promise: so far; 0: none.
        said: by the newest heartbeat, tokens a second.
        since: the one before it.
    """
    if not math.isfinite(said):
        return promise
    if not promise:
        return said
    return promise + (1 - math.exp(-max(0.0, since / _PROMISE_OVER))) * (said - promise)


def _take_slot(cluster: ClusterState, pod: Pod, facts: pb.SlotFacts) -> None:
    name = slot_name(pod.name, facts.index)
    key = key_of(pod.namespace, name)
    live = cluster.slots.get(key)
    if live is not None and live.pod_uid != pod.uid:
        # Pods may be named so that their slots' names meet: `decode.1`, and device 1 of `decode`.
        holder = cluster.pods.get(live.pod_uid)
        if holder is not None and not holder.ending:
            log.warning("slot %s of pod %s is taken by pod %s", key, pod.name, live.pod_name)
            return
    if live is None or live.pod_uid != pod.uid:
        live = LiveSlot(key, pod.namespace, name, pod.name, pod.uid)
    live.node, live.facts = pod.node, facts
    cluster.put_slot(live)


def _take_running(
    cluster: ClusterState, slot: str, running: pb.RunningJob, now: datetime
) -> list[pb.JobCommand]:
    if not cluster.expects(running.job_uid, running.epoch, slot):
        return [_abort(running.job_uid, running.epoch)]
    run = _current(cluster, slot, running.job_uid, running.epoch, now)
    if run.state not in ALIVE:
        return []
    run = replace(run, seen_at=now, progress=_merged(run.progress, running.progress))
    if run.state is RunState.ASSIGNED:
        # It loads; once it knows how many steps there are, it runs.
        loaded = running.progress.total_steps > 0
        run = replace(run, state=RunState.RUNNING if loaded else run.state, since=now)
    cluster.put_run(run)
    return []


def _current(cluster: ClusterState, slot: str, uid: str, epoch: int, now: datetime) -> JobPlacement:
    run = cluster.runs.get(uid)
    if run is not None and run.epoch == epoch:
        return run
    # Placed by an earlier life of the operator, and still at it: adopted.
    return JobPlacement(uid, epoch, slot, RunState.ASSIGNED, since=now)


def _with_event(run: JobPlacement, event: pb.JobEvent, now: datetime) -> JobPlacement:
    state = _STATE.get(event.kind, run.state)
    begins = event.kind == pb.JobEvent.STARTED
    reason, detail = claims.reason(event.reason), claims.text(event.detail)
    progress = run.progress
    if event.HasField("progress"):
        progress = _merged(progress, event.progress)
    if event.kind == pb.JobEvent.WARNED and reason in _OF_TRACKING:
        return replace(run, seen_at=now, progress=progress, tracking=(reason, detail))
    if event.kind == pb.JobEvent.WARNED:
        return replace(run, seen_at=now, progress=progress, trouble=(reason, detail))
    trouble = run.trouble
    if event.kind == pb.JobEvent.CHECKPOINTED and trouble is not None:
        trouble = ("", detail)
    return replace(
        run,
        state=state,
        since=now if state is not run.state else run.since,
        seen_at=now,
        trouble=trouble,
        reason=reason,
        detail=detail,
        user_error=event.user_error,
        field=claims.text(event.field),
        remedy=claims.text(event.remedy),
        resumed=reason == Reason.RESUMED if begins else run.resumed,
        started=detail if begins else run.started,
        progress=progress,
        adapter_digest=event.adapter_digest if is_digest(event.adapter_digest) else "",
        base_loss=_loss(event, "base_eval_loss", run.base_loss),
        tuned_loss=_loss(event, "tuned_eval_loss", run.tuned_loss),
    )


def _loss(event: pb.JobEvent, name: str, known: float) -> float:
    return claims.finite(getattr(event, name)) if event.HasField(name) else known


def _merged(known: WorkerProgress, said: pb.Progress) -> WorkerProgress:
    """Return what was said; a checkpoint that it does not name stays known."""
    saved = claims.count(said.checkpoint_step) if said.checkpoint_path else known.checkpoint_step
    rate, eta = claims.finite(said.tokens_per_second), claims.finite(said.eta_seconds)
    return WorkerProgress(
        step=claims.count(said.step),
        total_steps=claims.count(said.total_steps) or known.total_steps,
        loss=claims.finite(said.loss) if said.step else math.nan,
        tokens_per_second=max(0.0, rate) if math.isfinite(rate) else 0.0,
        tokens=claims.count(said.tokens),
        eta_seconds=min(max(0.0, eta), _LONGEST_ETA_S) if math.isfinite(eta) else 0.0,
        checkpoint_step=saved,
        checkpoint_path=claims.text(said.checkpoint_path) or known.checkpoint_path,
        skipped_rows=claims.count(said.skipped_rows),
        cut_rows=claims.count(said.cut_rows),
        joined_with=claims.count(said.joined_with),
    )


def _lose(cluster: ClusterState, run: JobPlacement, why: str, now: datetime) -> None:
    detail = f"{run.slot.rpartition('/')[2]}: {why}"
    cluster.put_run(replace(run, state=RunState.LOST, since=now, detail=detail))


def _abort(uid: str, epoch: int) -> pb.JobCommand:
    return pb.JobCommand(job_uid=uid, epoch=epoch, action=pb.JobCommand.ABORT, reason="StaleEpoch")
