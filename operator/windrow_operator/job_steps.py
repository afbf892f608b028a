"""Carries out what `reconcile` decides about one job: status, finalizer, commands, events.

What a step wants to send to a sidecar is sent only after the API server has taken the status that
says so; a slot is reserved from the decision until then.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from windrow.crd import FINALIZER, FINETUNE_JOB, FinetuneJobSpec
from windrow.errors import UserError
from windrow.proto import attach_pb2 as pb
from windrow_operator import tenancy
from windrow_operator.budget import PROGRESS_PER_SECOND, WriteBudget
from windrow_operator.cluster_state import ClusterState
from windrow_operator.events import Recorder
from windrow_operator.finalizers import set_finalizer
from windrow_operator.kube import ApiError, Body, Conflict, Kube, ObjectNotFound, kind_path
from windrow_operator.lease import NotLeading
from windrow_operator.metrics import Metrics
from windrow_operator.model import Base, Holder, Job, Slot, UnreadableSecret
from windrow_operator.planning import serves_model
from windrow_operator.rate_limit import TokenBucket
from windrow_operator.reconcile import Actions, Command, Timeouts, reconcile
from windrow_operator.secrets import JobSecrets, names_secrets, read_secrets
from windrow_operator.sidecars import Sidecars
from windrow_operator.slot_table import SlotTable
from windrow_operator.status import is_urgent, own_checkpoint

log = logging.getLogger(__name__)

_AGAIN = timedelta(seconds=1)
_AFTER_A_SURPRISE = timedelta(seconds=5)
PROGRESS_INTERVAL = timedelta(seconds=2)
_TURNS_AT_ONCE, _TURNS_PER_SECOND = 30.0, 1.0


class JobSteps:
    """Takes steps of jobs; one job has one step at a time.

    Args:
        cluster: what is known.
        slots: what is decided on.
        kube: a client that may write.
        recorder: of events.
        metrics: of the process.
        sidecars: receive the orders.
        look_again: asked to give a job another step after that time.
        timeouts: for decisions.
        clock: the time, aware.
    """

    def __init__(
        self,
        cluster: ClusterState,
        slots: SlotTable,
        kube: Kube,
        recorder: Recorder,
        metrics: Metrics,
        sidecars: Sidecars,
        *,
        look_again: Callable[[str, timedelta], None],
        timeouts: Timeouts,
        clock: Callable[[], datetime],
    ) -> None:
        self._cluster, self._slots, self._kube = cluster, slots, kube
        self._recorder, self._metrics, self._sidecars = recorder, metrics, sidecars
        self._look_again, self._timeouts, self._clock = look_again, timeouts, clock
        self._budget = WriteBudget(PROGRESS_PER_SECOND)
        self._progress_written: dict[str, datetime] = {}  # by job UID
        # By job UID, with the job's generation: one that has changed may name another.
        self._unreadable: dict[str, tuple[int, UnreadableSecret]] = {}
        self._turns: dict[str, TokenBucket] = {}  # by job UID: of statuses that say another state
        self._paused: dict[str, datetime] = {}  # by job UID: when a step that failed is due again

    def forget(self, uid: str) -> None:
        """Drop what is known of a job that is gone."""
        self._progress_written.pop(uid, None)
        self._unreadable.pop(uid, None)
        self._turns.pop(uid, None)
        self._paused.pop(uid, None)

    def pauses(self, uid: str) -> bool:
        """Return whether a job waits after a step that failed, so that no free slot wakes it.

        A step gives back what it had reserved. That wakes jobs that wait, but not the job itself:
        it would ask the API server as fast as that answers.
        """
        until = self._paused.get(uid)
        return until is not None and self._clock() < until

    async def take(self, uid: str) -> None:
        """Take the step that is due for a job.

        Raises:
            NotLeading: this replica may not act any more.
        """
        if uid not in self._cluster.jobs:
            self.forget(uid)
            return
        job = self._cluster.job_view(uid)
        self._paused.pop(uid, None)
        try:
            await self._take(job)
        except ObjectNotFound:
            self._cluster.drop_job(uid)
        except Conflict:
            await self._refresh(job)
        except ApiError as error:
            log.warning("job %s: %s", job.key, error)
            self._pause(uid, error.retry_after)
        except NotLeading:
            self._pause(uid, _AGAIN)
            raise
        except Exception:  # a surprise in one job must not stop the others
            log.exception("job %s could not be reconciled", job.key)
            self._pause(uid, _AFTER_A_SURPRISE)
        finally:
            if slot := self._slots.release(uid):
                self._cluster.changed_slots.mark(slot)

    async def _take(self, job: Job) -> None:
        actions, secrets = self._decide(job), JobSecrets()
        if job.spec is not None and _places(actions) and names_secrets(job.spec):
            # Nothing is reserved while a Secret is read: slots may have changed when it is there.
            secrets = await self._read_secrets(job, job.spec)
            actions = self._decide(job)
            try:  # by the policy of the slot that it is to have now
                self._require_endpoints(job, actions, secrets)
            except UserError as error:
                self._note_unreadable(job, error)
                actions, secrets = self._decide(job), JobSecrets()
        for command in actions.commands:
            if command.action == "ASSIGN":
                base = Base.of(job.spec) if job.spec else None
                self._slots.reserve(command.slot, Holder(job.uid, job.key, base))
        await self._carry_out(job, actions, secrets)

    def _pause(self, uid: str, pause: timedelta) -> None:
        self._paused[uid] = self._clock() + pause
        self._look_again(uid, pause)

    def _decide(self, job: Job) -> Actions:
        now = self._clock()
        if job.slot and (view := self._cluster.slot_of(job.slot, now)) is not None:
            self._slots.put(view)  # as new as what is known of the run
        generation, unreadable = self._unreadable.get(job.uid, (0, None))
        if unreadable is not None and generation == job.generation:
            job = replace(job, unreadable=unreadable)
        run = self._cluster.run_of(job)
        return reconcile(job, run, self._slots, now, self._timeouts)

    async def _read_secrets(self, job: Job, spec: FinetuneJobSpec) -> JobSecrets:
        """Read the Secrets of a job that is about to be placed; without them it waits."""
        try:
            secrets = await read_secrets(self._kube, job.namespace, spec)
        except UserError as error:
            self._note_unreadable(job, error)
            return JobSecrets()
        self._unreadable.pop(job.uid, None)
        return secrets

    def _note_unreadable(self, job: Job, error: UserError) -> None:
        until = self._clock() + self._timeouts.secret_pause
        self._unreadable[job.uid] = (job.generation, UnreadableSecret(str(error), until))

    def _require_endpoints(self, job: Job, actions: Actions, secrets: JobSecrets) -> None:
        """Refuse Secrets that name an endpoint which the policy of the slot does not allow."""
        for command in actions.commands:
            slot = self._slots.get(command.slot)
            if slot is None or slot.terms is None:
                continue
            for part, held in (("dataset", secrets.dataset), ("output", secrets.output)):
                if refusal := tenancy.endpoint_refusal(job, slot.terms.policy, held):
                    raise UserError(refusal, field=f"spec.{part}.secretRef")

    async def _carry_out(self, job: Job, actions: Actions, secrets: JobSecrets) -> None:
        now = self._clock()
        if actions.wake_at is not None:
            self._look_again(job.uid, actions.wake_at - now)
        # The version that was decided on: where a newer one exists, the server refuses.
        body = dict(job.body)
        if actions.finalizer is True:
            body = await set_finalizer(self._kube, self._cluster, body, FINALIZER, present=True)
        after = dict(actions.status) if actions.status is not None else None
        # What a command or an object hangs on is written whatever came before.
        acts = bool(actions.commands or actions.delete or actions.finalizer is not None)
        if after is not None and self._due(job, after, now, acts=acts):
            body = await self._write_status(job, {**body, "status": after}, now)
        self._note_health(job, actions, now)
        for command in actions.commands:
            self._send(job, command, now, secrets)
        for event in actions.events:
            self._recorder.put(self._cluster.jobs.get(job.uid), event)
        if actions.finalizer is False:
            await set_finalizer(self._kube, self._cluster, body, FINALIZER, present=False)
        if actions.delete:
            await self._kube.delete(kind_path(FINETUNE_JOB, job.namespace, job.name))

    def _note_health(self, job: Job, actions: Actions, now: datetime) -> None:
        if actions.slot_failed is None or not job.slot:
            return
        if actions.slot_failed:
            self._cluster.health.failed(job.slot, job.namespace, job.uid, now)
        else:
            self._cluster.health.worked(job.slot)
        self._cluster.changed_slots.mark(job.slot)

    def _due(self, job: Job, after: Body, now: datetime, *, acts: bool) -> bool:
        """Return whether to write now; what can wait is written as the budget allows.

        A sidecar may say another state a hundred times a second: of one job many are written at
        once, then one a second. `acts`: whether more is done than to write.
        """
        if is_urgent(job.status, after):
            now_s = now.timestamp()
            full = TokenBucket.full(_TURNS_PER_SECOND, _TURNS_AT_ONCE, now_s)
            bucket = self._turns.setdefault(job.uid, full)
            if acts or bucket.level_at(now_s) >= 1:
                bucket.take(1, now_s)
                return True
            self._look_again(job.uid, _AGAIN)
            return False
        writers = len(self._cluster.runs) + len(self._cluster.index.waiting)
        interval = max(PROGRESS_INTERVAL, self._budget.interval(writers))
        last = self._progress_written.get(job.uid)
        due = now if last is None else last + interval
        if due <= now and self._budget.take(now):
            return True
        self._look_again(job.uid, max(due - now, PROGRESS_INTERVAL))
        return False

    async def _write_status(self, job: Job, body: Body, now: datetime) -> Body:
        path = kind_path(FINETUNE_JOB, job.namespace, job.name, "status")
        written = await self._kube.replace(path, body)
        self._cluster.put_job(written)
        self._metrics.status_written(job, body["status"], now)
        self._progress_written[job.uid] = now
        return written

    async def _refresh(self, job: Job) -> None:
        """Take the newest version of a job that another client changed first, and decide again."""
        try:
            body = await self._kube.get(kind_path(FINETUNE_JOB, job.namespace, job.name))
        except ObjectNotFound:
            self._cluster.drop_job(job.uid)
            return
        except ApiError as error:
            log.warning("job %s could not be read again: %s", job.key, error)
            self._pause(job.uid, _AGAIN)
            return
        if body["metadata"]["uid"] == job.uid:
            self._cluster.put_job(body)
        else:
            self._cluster.drop_job(job.uid)
        self._look_again(job.uid, timedelta(0))

    def _send(self, job: Job, command: Command, now: datetime, secrets: JobSecrets) -> None:
        session = self._sidecars.session_of(command.slot)
        live = self._cluster.slots.get(command.slot)
        if session is None or live is None:
            return  # detached since: the next step waits for it or gives it up
        if command.action == "ASSIGN":
            self._cluster.assign(job.uid, command.epoch, command.slot, now)
            self._sidecars.configure(session, now)  # what a job may take is known before the job
            assign = assignment(job, command, self._slots[command.slot], live.facts.index)
            assign.dataset_secret.update(secrets.dataset)
            assign.output_secret.update(secrets.output)
            assign.tracking_secret.update(secrets.tracking)
            assign.model_secret.update(secrets.model)
            session.expect_soon(now)
            session.send(pb.OperatorMessage(assign=assign))
            return
        if command.action == "STOP":
            self._cluster.stop_sent(job.uid, command.reason, now)
        session.command(
            pb.JobCommand(
                job_uid=job.uid,
                epoch=command.epoch,
                action=command.action,
                reason=command.reason,
            )
        )


def _places(actions: Actions) -> bool:
    return any(command.action == "ASSIGN" for command in actions.commands)


def assignment(job: Job, command: Command, slot: Slot, index: int) -> pb.Assign:
    """Return the order to the sidecar of a slot: the spec as it was decided on."""
    policy = slot.terms.policy if slot.terms else None
    checkpoint = job.status.get("checkpoint") or {}
    checkpoint_path = own_checkpoint(
        job, int(checkpoint.get("step", 0)), str(checkpoint.get("path", ""))
    )
    return pb.Assign(
        slot=index,
        job_namespace=job.namespace,
        job_name=job.name,
        job_uid=job.uid,
        epoch=command.epoch,
        spec_json=json.dumps(job.body["spec"]),
        outputs=pb.Outputs(
            trees=tenancy.with_namespace(slot.outputs, job.namespace),
            mounts=tenancy.mounts_of(policy),
        ),
        checkpoint_path=checkpoint_path,
        access=tenancy.access_of(job, policy, serves_model=serves_model(job, slot)),
    )
