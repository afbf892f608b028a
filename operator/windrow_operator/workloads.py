"""Decide what to do about the Workload of a job with a queue: pure functions over plain data.

A Workload is how Kueue (kueue.x-k8s.io/v1beta2) accounts for something that runs. Kueue reserves
quota for it and admits it, and evicts it; its owner stops what runs, gives the quota back and says
when it has ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from windrow.conditions import Reason, get_condition, is_finished, is_true, set_condition
from windrow.crd import API_VERSION, FINETUNE_JOB, GROUP, HARVEST_SLOTS, LABEL_QUEUE
from windrow_operator.model import Job, QueueAdmission

Body = Mapping[str, Any]

KUEUE: Final = "kueue.x-k8s.io/v1beta2"
# On Workloads that the operator made: the UID of the job, by which it finds them.
LABEL_JOB: Final = f"{GROUP}/job-uid"
_NAME_MAX: Final = 63  # the name is a label's value in metrics and pods of other frameworks
_POD_SET: Final = "main"
# Evictions after which Kueue queues the Workload again at once; after others it decides when.
_QUEUED_AGAIN: Final = ("Preempted", "NodeFailures")


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority of a Workload: its value, and the class that it comes from.

    Attributes:
        group: of the class: scheduling.k8s.io or kueue.x-k8s.io.
        kind: of the class.
        name: of the class.
        value: higher is more urgent.
    """

    group: str
    kind: str
    name: str
    value: int

    @property
    def reference(self) -> dict[str, str]:
        """Return it as `spec.priorityClassRef`."""
        return {"group": self.group, "kind": self.kind, "name": self.name}


@dataclass(frozen=True, slots=True)
class WorkloadStep:
    """Step that is due for a job's Workload: at most one of create, delete and status.

    Attributes:
        create: the object to make.
        delete: whether the object goes.
        status: to merge into the status of the object.
        admission: of the job from now on; None: it is not known, or the job has no queue.
    """

    create: Body | None = None
    delete: bool = False
    status: Body | None = None
    admission: QueueAdmission | None = None


def name_of(job: Job) -> str:
    """Return the name of the Workload of `job`: one for each UID."""
    tail = hashlib.sha256(job.uid.encode()).hexdigest()[:8]
    return f"{f'finetunejob-{job.name}'[: _NAME_MAX - 9].rstrip('.-')}-{tail}"


def workload_of(job: Job, priority: Priority | None) -> dict[str, Any]:
    """Return the Workload of `job`. The job owns it, so it goes with the job.

    One pod of one container, which no scheduler sees: its requests are what quotas count.
    """
    owner = {
        "apiVersion": API_VERSION,
        "kind": FINETUNE_JOB.kind,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
    }
    amount = {HARVEST_SLOTS: "1"}
    container = {
        "name": "worker",
        "image": "windrow.dev/harvested",  # never pulled: no pod is made of it
        "resources": {"requests": amount, "limits": amount},
    }
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    spec: dict[str, Any] = {
        "queueName": job.queue,
        "active": True,
        "podSets": [{"name": _POD_SET, "count": 1, "template": template}],
    }
    if priority is not None:
        spec |= {"priorityClassRef": priority.reference, "priority": priority.value}
    return {
        "apiVersion": KUEUE,
        "kind": "Workload",
        "metadata": {
            "name": name_of(job),
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.uid, LABEL_QUEUE: job.queue},
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def wants_workload(job: Job) -> bool:
    """Return whether `job` is to have quota: it names a queue and could run."""
    if not job.queue or job.spec is None or job.spec.suspend:
        return False
    return not (job.priority_class_missing or job.destination_owner)


def next_step(
    job: Job, workload: Body | None, priority: Priority | None, now: datetime
) -> WorkloadStep:
    """Return what is due for the Workload of `job`.

    Args:
        job: one that names a queue, or did.
        workload: the one of its name; None: there is none.
        priority: of the job by its classes.
        now: an aware datetime.
    """
    if is_finished(job.status.get("conditions")):
        return _finished(job, workload, now)
    if job.deleted_at is not None:
        return WorkloadStep(
            admission=job.admission
        )  # it goes with the job, once its worker has stopped
    if not wants_workload(job):
        if job.slot and job.queue:
            return WorkloadStep(
                admission=job.admission
            )  # the worker is stopping, and has its quota still
        return WorkloadStep(delete=workload is not None)
    wanted = workload_of(job, priority)
    if workload is None:
        words = f"The Workload {name_of(job)} was made for LocalQueue {job.queue}"
        # A job that runs stops only when it is known not to be admitted.
        return WorkloadStep(wanted, admission=None if job.slot else _queued(words))
    if workload["metadata"].get("deletionTimestamp"):
        return WorkloadStep(admission=_taken(job, "its Workload is being deleted"))
    if _promise(workload) != _promise(wanted) or not _is_of(workload, job):
        admission = _taken(job, "its queue or priority class was changed")
        return WorkloadStep(delete=not job.slot, admission=admission)
    return _accounted(job, workload, now)


def _finished(job: Job, workload: Body | None, now: datetime) -> WorkloadStep:
    if workload is None or is_true(_conditions(workload), "Finished"):
        return WorkloadStep()
    reason = "Succeeded" if is_true(job.status.get("conditions"), "Succeeded") else "Failed"
    ended = get_condition(job.status.get("conditions"), reason) or {}
    held = set_condition(
        _conditions(workload),
        *("Finished", "True", reason, str(ended.get("message", ""))),
        _generation(workload),
        now,
    )
    return WorkloadStep(status={"conditions": held})


def _accounted(job: Job, workload: Body, now: datetime) -> WorkloadStep:
    """Return what is due where the Workload is the one that the job needs."""
    held = _conditions(workload)
    evicted = get_condition(held, "Evicted")
    has_quota = is_true(held, "QuotaReserved")
    if has_quota and evicted is not None and evicted["status"] == "True":
        words = f"Kueue evicted the Workload ({evicted['reason']}): {evicted['message']}"
        given_back = None if job.slot else _without_quota(workload, evicted, now)
        return WorkloadStep(status=given_back, admission=_taken(job, words))
    if is_true(held, "Admitted") and has_quota:
        queue = ((workload.get("status") or {}).get("admission") or {}).get("clusterQueue", "")
        words = f"Admitted by ClusterQueue {queue}"
        admission = QueueAdmission(
            admitted=True, reserved=True, reason=Reason.ADMITTED, message=words
        )
        return WorkloadStep(status=_pods_ready(job, workload, now), admission=admission)
    if job.slot:
        return WorkloadStep(admission=_taken(job, waits_for(workload)))
    return WorkloadStep(admission=_queued(waits_for(workload), reserved=has_quota))


def waits_for(workload: Body) -> str:
    """Return why a Workload is not admitted, in Kueue's words where it has said anything."""
    if (workload.get("spec") or {}).get("active") is False:
        return "The Workload is deactivated (spec.active is false)"
    queue = workload["spec"].get("queueName", "")
    held = _conditions(workload)
    if is_true(held, "QuotaReserved"):
        checks = (workload.get("status") or {}).get("admissionChecks") or ()
        open_ = [check for check in checks if check.get("state") != "Ready"]
        said = "; ".join(
            f"{check['name']} is {check.get('state') or 'Pending'}"
            + (f": {check['message']}" if check.get("message") else "")
            for check in open_
        )
        return f"Has quota; waits for admission checks: {said}" if said else "Has quota"
    quota = get_condition(held, "QuotaReserved")
    said = str(quota["message"]) if quota is not None else ""
    return f"Waits in LocalQueue {queue}{f': {said}' if said else ''}"


def _queued(message: str, *, reserved: bool = False) -> QueueAdmission:
    return QueueAdmission(admitted=False, reserved=reserved, reason=Reason.QUEUED, message=message)


def _taken(job: Job, message: str) -> QueueAdmission:
    """Return the admission of a job that has none any more; while it has a slot it is evicted."""
    reason = Reason.QUEUE_EVICTED if job.slot else Reason.QUEUED
    return QueueAdmission(admitted=False, reserved=False, reason=reason, message=message)


def unavailable(message: str) -> QueueAdmission:
    """Return the admission of a job that can have no Workload."""
    return QueueAdmission(
        admitted=False, reserved=False, reason=Reason.QUEUE_UNAVAILABLE, message=message
    )


def _without_quota(workload: Body, evicted: Body, now: datetime) -> Body:
    """Return the status of a Workload whose job has stopped: what it had is free."""
    reason, message, generation = evicted["reason"], evicted["message"], _generation(workload)
    held = _conditions(workload)
    again: Any = "True" if reason in _QUEUED_AGAIN else "False"
    held = set_condition(held, "Requeued", again, reason, message, generation, now)
    held = set_condition(held, "QuotaReserved", "False", "Pending", message, generation, now)
    if get_condition(held, "PodsReady") is not None:
        words = "The job has stopped"
        held = set_condition(held, "PodsReady", "False", "WaitForStart", words, generation, now)
    if is_true(held, "Admitted"):
        words = "The workload has no reservation"
        held = set_condition(held, "Admitted", "False", "NoReservation", words, generation, now)
    return {"conditions": held, "admission": None}


def _pods_ready(job: Job, workload: Body, now: datetime) -> Body | None:
    """Return the status that says whether the job runs, for `waitForPodsReady`; None: it does."""
    held = _conditions(workload)
    runs = is_true(job.status.get("conditions"), "Running")
    known = get_condition(held, "PodsReady")
    if known is not None and (known["status"] == "True") == runs:
        return None
    if runs:
        fact: tuple[Any, str, str] = ("True", "Started", f"The job runs on {job.slot}")
    else:
        fact = ("False", "WaitForStart", "The job waits for a slot, or its worker starts")
    return {"conditions": set_condition(held, "PodsReady", *fact, _generation(workload), now)}


def _promise(workload: Body) -> tuple[object, ...]:
    """Return what of a Workload decides over its quota and its turn."""
    spec = workload["spec"]
    reference = spec.get("priorityClassRef") or {}
    sets = [
        (each.get("name"), each.get("count"), _requests(each)) for each in spec.get("podSets") or ()
    ]
    named = tuple(reference.get(field) for field in ("group", "kind", "name"))
    return (spec.get("queueName"), named, sets)


def _requests(pod_set: Body) -> list[object]:
    pod = (pod_set.get("template") or {}).get("spec") or {}
    containers = [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]
    return [(each.get("resources") or {}).get("requests") or {} for each in containers]


def _is_of(workload: Body, job: Job) -> bool:
    owners: Iterable[Body] = workload["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == job.uid and owner.get("controller") for owner in owners)


def _conditions(workload: Body) -> list[dict[str, Any]]:
    return list((workload.get("status") or {}).get("conditions") or ())


def _generation(workload: Body) -> int:
    return int(workload["metadata"].get("generation") or 0)
