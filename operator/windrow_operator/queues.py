"""Keep a Kueue Workload for each job with a queue label, and answer admission checks.

Apart from the driver's loop, because Kueue need not be there: what it does not answer holds up jobs
with a queue alone. AdmissionChecks are watched, and Workloads while a job names a queue or there is
a check of ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from windrow.crd import LABEL_QUEUE_PRIORITY
from windrow.errors import UserError
from windrow_operator import headroom, workloads
from windrow_operator.cluster_state import ClusterState
from windrow_operator.headroom import Answer, HeadroomCheck
from windrow_operator.kube import ApiError, Conflict, Kube, ObjectNotFound
from windrow_operator.lease import NotLeading
from windrow_operator.model import Job, QueueAdmission
from windrow_operator.slot_table import SlotTable
from windrow_operator.watched import WatchedCollection
from windrow_operator.workloads import KUEUE, LABEL_JOB, Priority

log = logging.getLogger(__name__)

Body = dict[str, Any]

_API: Final = f"/apis/{KUEUE}"
# Jobs change without an event of Kueue's, and a slot has a while to come: nothing is asked of the
# API server for that.
_LOOK_SECONDS: Final = 2.0
_TOGETHER_SECONDS: Final = 0.1  # events that come in a row are looked at once
_MESSAGE_MAX: Final = 2048
NOT_INSTALLED: Final = (
    f"The cluster serves no {KUEUE}: install Kueue 0.15 or newer, or remove the label "
    "kueue.x-k8s.io/queue-name from the job"
)
_NO_RIGHTS: Final = "Set kueue.enabled in the chart's values, which gives the operator these rights"


class Queues:
    """Looks after Workloads and admission checks.

    Args:
        cluster: what is known; keeps what Kueue says of each job.
        kube: a client that may write.
        slots: what placement decides on.
        clock: the time, aware.
        on_news: called when a job's admission has changed.
        namespaces: that are served; none: all.
    """

    def __init__(
        self,
        cluster: ClusterState,
        kube: Kube,
        slots: SlotTable,
        clock: Callable[[], datetime],
        on_news: Callable[[], None],
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._cluster, self._kube, self._slots = cluster, kube, slots
        self._clock, self._on_news, self._namespaces = clock, on_news, namespaces
        self._kept: set[str] = set()  # UIDs of jobs that had a Workload at the last look
        self._wake = asyncio.Event()
        self._checks = _Watch([self._watched(f"{_API}/admissionchecks")])
        self._workloads = _Watch([])
        self._of_everybody = False  # whose Workloads are watched
        self._no_headroom: dict[str, str] = {}  # by job UID: why a check sent it back

    async def run(self) -> None:
        """Watch, and look at what has changed, until cancelled."""
        self._checks.start()
        try:
            while True:
                try:
                    await self.look()
                except (ApiError, NotLeading) as error:
                    log.warning("Workloads of Kueue were not looked after: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _LOOK_SECONDS)
                    await asyncio.sleep(_TOGETHER_SECONDS)
                self._wake.clear()
        finally:
            self._checks.stop()
            self._workloads.stop()

    async def look(self) -> None:
        """Do what is due for each Workload and check now.

        Raises:
            ApiError: the API server does not answer.
        """
        queued = self._kept | self._cluster.index.queued.keys()
        jobs = self._cluster.job_views(queued)
        try:
            if not self._checks.is_listed:
                return
            checks = await self._mark_checks()
            self._watch_workloads(wanted=bool(queued or checks), everybody=bool(checks))
            if not self._workloads.is_listed:
                return
        except ObjectNotFound:
            self._all_unavailable(jobs, NOT_INSTALLED)
            return
        except ApiError as error:
            if error.status != 403:
                raise
            self._all_unavailable(jobs, f"{error}. {_NO_RIGHTS}")
            return
        by_name = self._workloads.objects
        for job in jobs:
            await self._keep(job, by_name.get((job.namespace, workloads.name_of(job))))
        found = [*by_name.values()]
        ours = {(body["metadata"].get("labels") or {}).get(LABEL_JOB) for body in found}
        self._kept = {uid for uid in ours if uid in self._cluster.jobs}
        self._forget_gone()
        if checks:
            await self._answer(found, {check.name: check for check in checks})

    def _forget_gone(self) -> None:
        for uid in [uid for uid in self._no_headroom if uid not in self._cluster.jobs]:
            del self._no_headroom[uid]

    # --- Workloads --------------------------------------------------------------------------------

    def _watched(self, path: str, labels: str = "") -> WatchedCollection:
        return WatchedCollection(
            self._kube,
            path,
            labels=labels,
            on_change=self._wake.set,
            is_urgent=lambda: bool(self._cluster.index.queued),
        )

    def _watch_workloads(self, *, wanted: bool, everybody: bool) -> None:
        """Watch the Workloads of our jobs; of everybody where a check may stand at any queue."""
        if self._workloads.runs == wanted and self._of_everybody == everybody:
            return
        self._workloads.stop()
        self._workloads, self._of_everybody = _Watch([]), everybody
        if wanted:
            places = [f"/namespaces/{name}" for name in self._namespaces] or [""]
            labels = "" if everybody else LABEL_JOB
            self._workloads = _Watch(
                [self._watched(f"{_API}{p}/workloads", labels) for p in places]
            )
            self._workloads.start()

    async def _keep(self, job: Job, workload: Body | None) -> None:
        """Do what is due for one job; what fails for it does not keep others from their turn."""
        if not job.is_ours:
            return
        try:
            priority = await self._priority(job) if workloads.wants_workload(job) else None
            step = workloads.next_step(job, workload, priority, self._clock())
            self._tell(job, self._explained(job, step.admission))
            await self._carry_out(job, step)
        except Conflict:
            return  # Kueue wrote first; the next event has it
        except UserError as error:
            self._unavailable(job, str(error))
        except ApiError as error:
            if not error.is_refusal:
                raise
            log.warning("the Workload of job %s: %s", job.key, error)
            remedy = f". {_NO_RIGHTS}" if error.status == 403 else ""
            self._unavailable(job, f"{error}{remedy}")

    async def _carry_out(self, job: Job, step: workloads.WorkloadStep) -> None:
        collection = f"{_API}/namespaces/{job.namespace}/workloads"
        path = f"{collection}/{workloads.name_of(job)}"
        if step.create is not None:
            await self._kube.create(collection, step.create)
        elif step.delete:
            await self._kube.delete(path)
        elif step.status is not None:
            await self._kube.merge(f"{path}/status", {"status": step.status})

    async def _priority(self, job: Job) -> Priority | None:
        """Return the priority of a job's Workload: of Kueue's class, else of its PriorityClass.

        Raises:
            UserError: there is no such WorkloadPriorityClass.
        """
        name = (job.body["metadata"].get("labels") or {}).get(LABEL_QUEUE_PRIORITY)
        if name:
            try:
                found = await self._kube.get(f"{_API}/workloadpriorityclasses/{name}")
            except ObjectNotFound as error:
                raise UserError(
                    f"there is no WorkloadPriorityClass {name!r}",
                    field=f"metadata.labels[{LABEL_QUEUE_PRIORITY}]",
                    remedy="Create it, or name one that exists.",
                ) from error
            value = int(found.get("value", 0))
            return Priority("kueue.x-k8s.io", "WorkloadPriorityClass", name, value)
        if job.spec is not None and job.spec.priority_class_name:
            name = job.spec.priority_class_name
            return Priority("scheduling.k8s.io", "PriorityClass", name, job.priority)
        return None

    def _explained(self, job: Job, admission: QueueAdmission | None) -> QueueAdmission | None:
        """Return `admission` with why the last check sent the job back, while it waits."""
        if admission is None or admission.admitted:
            self._no_headroom.pop(job.uid, None)
            return admission
        why = self._no_headroom.get(job.uid)
        if why is None or admission.reserved:
            return admission
        return replace(admission, message=f"{admission.message}. No headroom: {why}")

    def _tell(self, job: Job, admission: QueueAdmission | None) -> None:
        if admission is not None:
            admission = replace(admission, message=admission.message[:_MESSAGE_MAX])
        if self._cluster.put_admission(job.uid, admission):
            self._on_news()

    def _all_unavailable(self, jobs: Iterable[Job], message: str) -> None:
        for job in jobs:
            if workloads.wants_workload(job):
                self._unavailable(job, message)

    def _unavailable(self, job: Job, message: str) -> None:
        """Say why a job can have no Workload; one that has a slot goes on as it was admitted."""
        if not job.slot:
            self._tell(job, workloads.unavailable(message))

    # --- admission checks -------------------------------------------------------------------------

    async def _mark_checks(self) -> list[HeadroomCheck]:
        """Return the AdmissionChecks that we answer; those that work are marked as active."""
        checks = []
        for body in [*self._checks.objects.values()]:
            if (check := headroom.check_of(body)) is None:
                continue
            status = headroom.activity(body, check, self._clock())
            if status is not None:
                path = f"{_API}/admissionchecks/{check.name}/status"
                await self._kube.merge(path, {"status": status})
            if not check.error:
                checks.append(check)
        return checks

    async def _answer(self, found: Iterable[Body], checks: Mapping[str, HeadroomCheck]) -> None:
        """Answer the checks that Workloads wait for, the oldest first."""
        asked = [(body, due) for body in found if (due := headroom.pending(body, checks))]
        if not asked:
            return
        now = self._clock()
        waiting = self._cluster.job_views(self._cluster.index.waiting)
        coming = [job for job in waiting if job.admission and job.admission.admitted]
        slots = headroom.without_coming(self._slots, coming)
        for body, due in sorted(asked, key=lambda one: one[0]["metadata"]["creationTimestamp"]):
            answers = self._answers(body, due, slots, now)
            if not answers:
                continue
            namespace, name = _key(body)
            status = headroom.answered(body, answers, now)
            version = {"resourceVersion": body["metadata"]["resourceVersion"]}
            path = f"{_API}/namespaces/{namespace}/workloads/{name}/status"
            try:
                await self._kube.merge(path, {"metadata": version, "status": status})
            except (Conflict, ObjectNotFound):
                continue  # it has changed: the next event has it

    def _answers(
        self, body: Body, due: Iterable[HeadroomCheck], slots: SlotTable, now: datetime
    ) -> dict[str, Answer]:
        uid = body["metadata"].get("labels", {}).get(LABEL_JOB, "")
        if uid not in self._cluster.jobs:
            return {check.name: headroom.NOT_A_JOB for check in due} if not uid else {}
        job = self._cluster.job_view(uid)
        if _key(body) != (job.namespace, workloads.name_of(job)):
            # Somebody wrote the label: nothing of that job is said here, and nothing there.
            return {check.name: headroom.NOT_A_JOB for check in due}
        found = {check.name: headroom.answer(job, check.least, slots) for check in due}
        refused = [one.message for one in found.values() if one.state == "Retry"]
        if not refused:
            headroom.take(slots, job)
        elif headroom.may_still_come(body, now):
            return {}
        else:
            self._no_headroom[uid] = refused[0]
        return found


class _Watch:
    """Watches of some collections as one, each in a task.

    Attributes:
        runs: whether it was started and not stopped.
    """

    def __init__(self, parts: list[WatchedCollection]) -> None:
        self._parts = parts
        self._tasks: list[asyncio.Task[None]] = []
        self.runs = False

    def start(self) -> None:
        """Begin to list and to watch."""
        self.runs = True
        self._tasks = [asyncio.create_task(part.run()) for part in self._parts]

    def stop(self) -> None:
        """End it."""
        self.runs = False
        for task in self._tasks:
            task.cancel()

    @property
    def is_listed(self) -> bool:
        """True once all was listed; raises the ApiError that keeps a part from being up to date."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()  # nothing ends it but a mistake of ours
        for part in self._parts:
            if part.error is not None:
                raise part.error
        return all(part.is_listed for part in self._parts)

    @property
    def objects(self) -> dict[tuple[str, str], Body]:
        """All of them, by namespace and name."""
        return {key: body for part in self._parts for key, body in part.objects.items()}


def _key(body: Body) -> tuple[str, str]:
    return body["metadata"]["namespace"], body["metadata"]["name"]
