"""The one loop that acts: it looks at everything, lets `reconcile` decide, and carries it out.

One job after the other, one pass at a time, so that no slot is given away twice. What a pass wants
to tell a sidecar is told only after the API server has taken the status that says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from windrow.crd import FINALIZER, FINETUNE_JOB, HARVEST_POLICY
from windrow.errors import UserError
from windrow.proto import attach_pb2 as pb
from windrow_operator import agents, policies, preemption
from windrow_operator.attach import AttachServer, Session
from windrow_operator.cluster_state import ClusterState, is_waiting
from windrow_operator.events import Recorder
from windrow_operator.injection import Refusal, SidecarTemplate, attached_sidecar
from windrow_operator.kube import ApiError, Body, Conflict, Kube, ObjectNotFound, kind_path
from windrow_operator.lease import NotLeading
from windrow_operator.metrics import Metrics
from windrow_operator.model import Base, Holder, Job, Pod, Slot, Usage
from windrow_operator.planning import SlotTable
from windrow_operator.reconcile import Actions, Command, Event, Timeouts, reconcile, without_secret
from windrow_operator.secrets import JobSecrets, read_secrets
from windrow_operator.status import is_urgent
from windrow_operator.webhook import WebhookRegistration

log = logging.getLogger(__name__)

# Bursts of news become one pass.
_SETTLE_SECONDS = 0.02
_IDLE_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_HOUSEKEEPING = timedelta(seconds=1)
PROGRESS_INTERVAL = timedelta(seconds=2)
# Of many jobs each one's progress is written more seldom: so many writes a second in all.
_PROGRESS_PER_SECOND = 3.0
USAGE_INTERVAL = timedelta(seconds=10)
# A pod that could not get a sidecar is asked about again after this time.
_REFUSED_AGAIN = timedelta(minutes=5)


@dataclass
class _Alarm:
    """Wakes the loop at the earliest moment that anybody asked for."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    due: float = 0.0

    def within(self, seconds: float) -> None:
        self.due = min(self.due, time.monotonic() + max(0.0, seconds))
        self.event.set()

    async def wait(self) -> None:
        while (left := self.due - time.monotonic()) > 0:
            self.event.clear()
            try:
                await asyncio.wait_for(self.event.wait(), left)
            except TimeoutError:
                break
        self.due = time.monotonic() + _IDLE_SECONDS


class Driver:
    """Carries out what `reconcile` decides."""

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        recorder: Recorder,
        metrics: Metrics,
        *,
        timeouts: Timeouts,
        clock: Callable[[], datetime],
    ) -> None:
        self._cluster, self._kube, self._recorder, self._metrics = cluster, kube, recorder, metrics
        self._timeouts, self._clock = timeouts, clock
        self._attach: AttachServer | None = None
        self._registration: WebhookRegistration | None = None
        self._template: Callable[[], SidecarTemplate] | None = None
        self._asked: dict[str, datetime] = {}  # by pod UID: when a sidecar was added
        self._refused: dict[str, datetime] = {}  # by pod UID: not asked about before then
        self._alarm = _Alarm()
        self._progress_written: dict[str, datetime] = {}  # by job UID
        self._usage_written: dict[str, datetime] = {}  # by policy key
        self._charged_at: datetime | None = None
        self._kept_house: datetime | None = None

    def connect(self, attach: AttachServer) -> None:
        """Say through whom sidecars are reached."""
        self._attach = attach

    def prepare_pods(
        self, registration: WebhookRegistration, template: Callable[[], SidecarTemplate]
    ) -> None:
        """Say how pods are registered for, and what a sidecar is made of."""
        self._registration, self._template = registration, template

    def wake(self) -> None:
        """Look at everything soon: something happened."""
        self._alarm.within(_SETTLE_SECONDS)

    def wake_for_progress(self) -> None:
        """Look at everything within the time that progress may wait."""
        self._alarm.within(PROGRESS_INTERVAL.total_seconds())

    async def run(self) -> None:
        """Pass after pass, until cancelled."""
        while True:
            await self._alarm.wait()
            started = time.monotonic()
            try:
                await self.turn()
            except NotLeading as error:
                log.warning("a pass was ended: %s", error)
                self._alarm.within(_RETRY_SECONDS)
            self._metrics.passed(time.monotonic() - started)

    async def turn(self) -> None:
        """One pass over policies and jobs."""
        now = self._clock()
        keeps_house = self._keeps_house(now)
        if keeps_house:
            self._charge(now)
            self._end_sessions(now)
            self._configure_sidecars(now)
        slots = SlotTable(self._cluster.slot_views(now).values())
        self._preempt(slots)
        for job in self._cluster.job_views():
            await self._step(job, slots)
            self._metrics.moved()
        if not keeps_house:
            return
        await self._attach_sidecars(slots, now)
        await self._register()
        await self._write_policies(now)
        self._cluster.forget_unused_slots()
        self._metrics.show(self._cluster, slots, now)

    def _keeps_house(self, now: datetime) -> bool:
        """Return whether this pass also does what need not be done for each piece of news.

        With thousands of pods that takes longer than the jobs do, so it comes once a second.
        """
        if self._kept_house is not None and now - self._kept_house < _HOUSEKEEPING:
            self._alarm.within((self._kept_house + _HOUSEKEEPING - now).total_seconds())
            return False
        self._kept_house = now
        return True

    # --- jobs -------------------------------------------------------------------------------------

    def _preempt(self, slots: SlotTable) -> None:
        """Choose which jobs give their slot to one that waits; what was chosen stays so."""
        jobs = self._cluster.job_views()
        placed = [job for job in jobs if job.slot]
        waiting = [job for job in jobs if self._waits(job)]
        wanted = {job.key for job in waiting}
        self._cluster.preempted = {
            job.uid: job.preempted_by for job in placed if job.preempted_by in wanted
        } | preemption.victims(placed, slots, self._cluster.runs, waiting)

    async def _step(self, job: Job, slots: SlotTable) -> None:
        now = self._clock()
        try:
            run = self._cluster.run_of(job)
            actions = reconcile(job, run, slots, now, self._timeouts)
            actions, secrets = await self._with_secrets(job, actions, now)
            await self._carry_out(job, actions, slots, secrets)
        except ObjectNotFound:
            self._cluster.drop_job(job.uid)
        except Conflict:
            await self._refresh(job)
        except ApiError as error:
            log.warning("job %s: %s", job.key, error)
            self._alarm.within(error.retry_after.total_seconds())
        except NotLeading:
            raise
        except Exception:  # a surprise in one job must not stop the others
            log.exception("job %s could not be reconciled", job.key)
            self._alarm.within(_IDLE_SECONDS)

    async def _with_secrets(
        self, job: Job, actions: Actions, now: datetime
    ) -> tuple[Actions, JobSecrets]:
        """Read the Secrets of a job that is about to be placed; without them it waits."""
        if job.spec is None or all(command.action != "ASSIGN" for command in actions.commands):
            return actions, JobSecrets()
        try:
            return actions, await read_secrets(self._kube, job.namespace, job.spec)
        except UserError as error:
            return without_secret(job, str(error), now, self._timeouts), JobSecrets()

    async def _carry_out(
        self, job: Job, actions: Actions, slots: SlotTable, secrets: JobSecrets
    ) -> None:
        now = self._clock()
        if actions.wake_at is not None:
            self._alarm.within((actions.wake_at - now).total_seconds())
        # The version that was decided on: where it is no longer the newest, the server refuses.
        body = dict(job.body)
        if actions.finalizer is True:
            body = await self._set_finalizer(job, body, present=True)
        if actions.status is not None and self._due(job, dict(actions.status), now):
            body = await self._write_status(job, {**body, "status": actions.status}, now)
        self._note_health(job, actions, now)
        for command in actions.commands:
            self._send(job, command, slots, now, secrets)
        for event in actions.events:
            await self._recorder.record(self._cluster.jobs.get(job.uid), event)
        if actions.finalizer is False:
            await self._set_finalizer(job, body, present=False)
        if actions.delete:
            await self._kube.delete(kind_path(FINETUNE_JOB, job.namespace, job.name))

    def _note_health(self, job: Job, actions: Actions, now: datetime) -> None:
        if actions.slot_failed is None or not job.slot:
            return
        if actions.slot_failed:
            self._cluster.health.failed(job.slot, job.key, now)
        else:
            self._cluster.health.worked(job.slot)

    def _due(self, job: Job, after: Body, now: datetime) -> bool:
        """Return whether to write now; mere progress is written every two seconds."""
        if is_urgent(job.status, after):
            return True
        last = self._progress_written.get(job.uid)
        of_all = timedelta(seconds=len(self._cluster.runs) / _PROGRESS_PER_SECOND)
        interval = max(PROGRESS_INTERVAL, of_all)
        if last is None or now - last >= interval:
            return True
        self._alarm.within((last + interval - now).total_seconds())
        return False

    async def _write_status(self, job: Job, body: Body, now: datetime) -> Body:
        path = kind_path(FINETUNE_JOB, job.namespace, job.name, "status")
        written = await self._kube.replace(path, body)
        self._cluster.put_job(written)
        self._metrics.status_written(job, body["status"], now)
        self._progress_written[job.uid] = now
        return written

    async def _set_finalizer(self, job: Job, body: Body, *, present: bool) -> Body:
        metadata = body["metadata"]
        others = [name for name in metadata.get("finalizers") or () if name != FINALIZER]
        wanted = {
            "resourceVersion": metadata["resourceVersion"],
            "finalizers": [*others, FINALIZER] if present else others,
        }
        path = kind_path(FINETUNE_JOB, job.namespace, job.name)
        written = await self._kube.merge(path, {"metadata": wanted})
        if written["metadata"].get("deletionTimestamp") and not wanted["finalizers"]:
            self._cluster.drop_job(job.uid)
        else:
            self._cluster.put_job(written)
        return written

    async def _refresh(self, job: Job) -> None:
        """Somebody else wrote the job first: take the newest version and decide again."""
        try:
            body = await self._kube.get(kind_path(FINETUNE_JOB, job.namespace, job.name))
        except ObjectNotFound:
            self._cluster.drop_job(job.uid)
            return
        except ApiError as error:
            log.warning("job %s could not be read again: %s", job.key, error)
            self._alarm.within(_RETRY_SECONDS)
            return
        if body["metadata"]["uid"] == job.uid:
            self._cluster.put_job(body)
        else:
            self._cluster.drop_job(job.uid)
        self.wake()

    def _send(
        self,
        job: Job,
        command: Command,
        slots: SlotTable,
        now: datetime,
        secrets: JobSecrets,
    ) -> None:
        session = self._attach.session_of(command.slot) if self._attach else None
        live = self._cluster.slots.get(command.slot)
        if session is None or live is None:
            return  # detached since: the next passes wait for it or give it up
        if command.action == "ASSIGN":
            self._cluster.assign(job.uid, command.epoch, command.slot, now)
            slot, base = slots[command.slot], Base.of(job.spec) if job.spec else None
            holder = Holder(job.uid, job.key, base)
            slots.put(replace(slot, holders=(*slot.holders, holder)))
            self._configure(session, now)  # what a job may take is known before the job
            assign = self._assignment(job, command, slot, live.facts.index)
            assign.dataset_secret.update(secrets.dataset)
            assign.output_secret.update(secrets.output)
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

    def _assignment(self, job: Job, command: Command, slot: Slot, index: int) -> pb.Assign:
        return pb.Assign(
            slot=index,
            job_namespace=job.namespace,
            job_name=job.name,
            job_uid=job.uid,
            epoch=command.epoch,
            spec_json=json.dumps(job.body["spec"]),
            outputs=pb.Outputs(trees=slot.outputs),
            checkpoint_path=(job.status.get("checkpoint") or {}).get("path", ""),
        )

    # --- sidecars ---------------------------------------------------------------------------------

    async def _attach_sidecars(self, views: SlotTable, now: datetime) -> None:
        waiting = [job for job in self._cluster.job_views() if self._waits(job)]
        pods, look_again = agents.wanted(self._pod_views(views, now), waiting, now)
        for pod in pods:
            try:
                await self._attach_sidecar(pod, now)
            except (Refusal, ApiError) as error:
                await self._not_attached(pod, error, now)
        if look_again is not None:
            self._alarm.within((look_again - now).total_seconds())

    def _waits(self, job: Job) -> bool:
        spec = job.spec
        asks = spec is not None and not spec.suspend and job.deleted_at is None and job.is_ours
        return asks and not job.slot and is_waiting(self._cluster.jobs[job.uid])

    def _pod_views(self, views: SlotTable, now: datetime) -> list[agents.PodView]:
        """Return the pods that a sidecar could be added to: those without one that is attached."""
        known = self._cluster.slots
        attached = {known[key].pod_uid for key, slot in views.items() if slot.attached}
        # A slot's name is its pod's, or that with the number of the device.
        keys = self._cluster.holders()
        held = {*keys, *(key.rpartition(".")[0] for key in keys)}
        return [
            agents.PodView(
                pod,
                self._cluster.terms(pod, now),
                held=pod.key in held,
                asked_at=self._asked.get(uid),
                retry_at=self._refused.get(uid),
            )
            for uid, pod in self._cluster.pods.items()
            if pod.sidecar.prepared and pod.sidecar.decode_ready and uid not in attached
        ]

    async def _attach_sidecar(self, pod: Pod, now: datetime) -> None:
        terms = self._cluster.terms(pod, now)
        if terms is None or terms.policy.spec is None or self._template is None:
            return
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        body = await self._kube.get(path)
        container = attached_sidecar(self._template(), body, terms.policy.spec.sidecar)
        patch = {
            # Another pod of the name, or one that changed since: refused, and decided again.
            "metadata": {"uid": pod.uid, "resourceVersion": body["metadata"]["resourceVersion"]},
            "spec": {"ephemeralContainers": [container]},
        }
        after = await self._kube.strategic_merge(f"{path}/ephemeralcontainers", patch)
        self._cluster.put_pod(after)
        self._asked[pod.uid] = now
        message = f"Container {container['name']} added, by policy {terms.policy.name}"
        await self._recorder.record(after, Event("SidecarAttached", message))

    async def _not_attached(self, pod: Pod, error: Refusal | ApiError, now: datetime) -> None:
        if isinstance(error, Conflict | ObjectNotFound):
            self._alarm.within(_RETRY_SECONDS)
            return
        log.warning("pod %s gets no sidecar: %s", pod.key, error)
        self._refused[pod.uid] = now + _REFUSED_AGAIN
        reason = error.reason if isinstance(error, Refusal) else "NotAdmitted"
        self._metrics.not_injected(reason)
        about = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
        }
        await self._recorder.record(about, Event("SidecarRefused", str(error), warning=True))

    async def _register(self) -> None:
        """Keep the webhook registered for the namespaces that have a policy."""
        for known in (self._asked, self._refused):
            for uid in [uid for uid in known if uid not in self._cluster.pods]:
                del known[uid]
        if self._registration is None:
            return
        try:
            await self._registration.keep({p.namespace for p in self._cluster.policies.values()})
        except ApiError as error:
            log.warning("the webhook could not be registered: %s", error)
            self._alarm.within(_RETRY_SECONDS)

    # --- policies and slots -----------------------------------------------------------------------

    def _charge(self, now: datetime) -> None:
        since = now - self._charged_at if self._charged_at else timedelta(0)
        self._charged_at = now
        for key in self._cluster.active_slots():
            live = self._cluster.slots.get(key)
            pod = self._cluster.pods.get(live.pod_uid) if live and live.attached else None
            terms = self._cluster.terms(pod, now) if pod else None
            if terms is not None:
                tenants = self._cluster.tenants(key)
                self._cluster.charge(terms.policy.key, since.total_seconds(), tenants, now)
                self._metrics.harvested(since.total_seconds(), terms.policy, tenants)

    def _end_sessions(self, now: datetime) -> None:
        """End the streams of sidecars that are silent, and of those whose pod is no more."""
        if self._attach is None:
            return
        if (due := self._attach.end_silent(now)) is not None:
            self._alarm.within((due - now).total_seconds())
        for session in list(self._attach.sessions.values()):
            if session.pod.uid not in self._cluster.pods:
                log.warning("pod %s is gone: the stream of its sidecar is ended", session.pod.key)
                self._attach.end(session)

    def _configure_sidecars(self, now: datetime) -> None:
        for session in self._attach.sessions.values() if self._attach else ():
            self._configure(session, now)

    def _configure(self, session: Session, now: datetime) -> None:
        pod = self._cluster.pods.get(session.pod.uid, session.pod)
        session.configure(policies.config_of(self._cluster.terms(pod, now)))

    async def _write_policies(self, now: datetime) -> None:
        policy_counts = self._policy_counts()
        for key in list(self._cluster.policy_bodies):
            # Watches go on while a status is written: a policy may be gone by its turn.
            if (body := self._cluster.policy_bodies.get(key)) is None:
                continue
            policy, before = self._cluster.policies[key], body.get("status") or {}
            usage = self._cluster.used.get(key, Usage())
            after = policies.status_of(
                policy,
                policy_counts.get(key, policies.PolicyCounts()),
                usage,
                before.get("conditions") or (),
                now,
            )
            if not self._policy_due(key, before, after, now):
                continue
            path = kind_path(HARVEST_POLICY, policy.namespace, policy.name, "status")
            try:
                self._cluster.put_policy(await self._kube.replace(path, {**body, "status": after}))
                self._usage_written[key] = now
            except ObjectNotFound:
                self._cluster.drop_policy(key)
            except ApiError as error:
                # A conflict: the watch brings the newer version.
                log.info("policy %s: %s", key, error)
                self._alarm.within(_RETRY_SECONDS)

    def _policy_due(self, key: str, before: Body, after: Body, now: datetime) -> bool:
        if {**before, "usage": None} != {**after, "usage": None}:
            return True
        last = self._usage_written.get(key)
        return before != after and (last is None or now - last >= USAGE_INTERVAL)

    def _policy_counts(self) -> dict[str, policies.PolicyCounts]:
        """Return what every policy has under it."""
        counts: dict[str, list[int]] = {}
        active = self._cluster.active_slots()
        policy_of_pod: dict[str, str] = {}
        for pod in self._cluster.pods.values():
            policy = self._cluster.policy_of(pod)
            if policy is not None and not pod.ending:
                policy_of_pod[pod.uid] = policy.key
                counts.setdefault(policy.key, [0, 0, 0])[0] += 1
        for live in self._cluster.slots.values():
            key = policy_of_pod.get(live.pod_uid)
            if key is not None and live.attached:
                counts[key][1] += 1
                counts[key][2] += live.key in active
        return {key: policies.PolicyCounts(*three) for key, three in counts.items()}
