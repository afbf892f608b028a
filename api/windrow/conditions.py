"""Conditions and reasons that exist, and the rules by which a condition changes.

The table `LIFECYCLE` is the one place that says what can become of a FinetuneJob, and
docs/conditions.md is made from it. `SLOT` and `POLICY` say the same for the other two kinds that
have conditions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, Literal

Condition = dict[str, Any]
Status = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """Types of conditions."""

    ACCEPTED = "Accepted"
    ADMITTED = "Admitted"
    PLACED = "Placed"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    CHECKPOINTED = "Checkpointed"
    TRACKED = "Tracked"
    EVICTED = "Evicted"
    REQUEUED = "Requeued"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DEPLOYED = "Deployed"
    ATTACHED = "Attached"
    READY = "Ready"
    SELECTS_PODS = "SelectsPods"
    SHARED_IN_SPACE = "SharedInSpace"


class Reason(StrEnum):
    """Reasons of conditions and events; a worker's `JobEvent.reason` is one of them as well."""

    # Accepted
    VALID = "Valid"
    INVALID_SPEC = "InvalidSpec"
    DESTINATION_IN_USE = "DestinationInUse"
    PRIORITY_CLASS_NOT_FOUND = "PriorityClassNotFound"
    # Admitted: what Kueue says of a job with a queue
    ADMITTED = "Admitted"
    QUEUED = "Queued"
    QUEUE_EVICTED = "QueueEvicted"
    QUEUE_UNAVAILABLE = "QueueUnavailable"
    # Placed
    PLACED = "Placed"
    NO_SLOT = "NoSlot"
    BACK_OFF = "BackOff"
    SLOT_LOST = "SlotLost"
    REJECTED = "Rejected"
    POLICY_CHANGED = "PolicyChanged"
    PREEMPTED = "Preempted"
    DECODE_BUSY = "DecodeBusy"
    FINISHED = "Finished"
    # Running
    STARTED = "Started"
    RESUMED = "Resumed"
    PAUSED = "Paused"
    STARTING = "Starting"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    DELETED = "Deleted"
    SILENT = "Silent"
    NOT_PLACED = "NotPlaced"
    SECRET_UNREADABLE = "SecretUnreadable"
    # Suspended
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"
    # Succeeded
    COMPLETED = "Completed"
    # Failed, by the job's author
    DATASET_UNREADABLE = "DatasetUnreadable"
    DATASET_INVALID = "DatasetInvalid"
    DATASET_EMPTY = "DatasetEmpty"
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_UNSUPPORTED = "ModelUnsupported"
    MODEL_TOO_LARGE = "ModelTooLarge"
    OUTPUT_NOT_WRITABLE = "OutputNotWritable"
    CREDENTIALS_MISSING = "CredentialsMissing"
    CHECKPOINT_MISMATCH = "CheckpointMismatch"
    # Checkpointed
    CHECKPOINT_WRITTEN = "CheckpointWritten"
    CHECKPOINT_NOT_WRITTEN = "CheckpointNotWritten"
    # Tracked
    TRACKING_FAILED = "TrackingFailed"
    TRACKING_RESUMED = "TrackingResumed"
    # Failed, or failed once and tried again
    WORKER_DIED = "WorkerDied"
    WORKER_ERROR = "WorkerError"
    OUT_OF_MEMORY = "OutOfMemory"
    DISK_FULL = "DiskFull"
    LOSS_NOT_FINITE = "LossNotFinite"
    GRADIENT_EXPLODED = "GradientExploded"
    NO_PROGRESS = "NoProgress"
    DATA_STARVED = "DataStarved"
    MODEL_UNREACHABLE = "ModelUnreachable"
    OUTPUT_UNREACHABLE = "OutputUnreachable"
    CHECKPOINT_UNREACHABLE = "CheckpointUnreachable"
    CHECKPOINT_UNREADABLE = "CheckpointUnreadable"
    FENCED = "Fenced"
    STALE_EPOCH = "StaleEpoch"
    BUSY = "Busy"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    # Deployed
    LOADED = "Loaded"
    NOT_LOADED = "NotLoaded"
    NO_INSTANCES = "NoInstances"
    FETCHING = "Fetching"
    CANARY_FAILED = "CanaryFailed"
    SUPERSEDED = "Superseded"
    # Slots and policies
    CONNECTED = "Connected"
    DISCONNECTED = "Disconnected"
    SERVING = "Serving"
    ENGINE_NOT_SERVING = "EngineNotServing"
    BREAKER_OPEN = "BreakerOpen"
    RESTING = "Resting"
    NODE_LEAVING = "NodeLeaving"
    TENSOR_PARALLEL = "TensorParallel"
    DEVICE_NOT_SEEN = "DeviceNotSeen"
    NOT_SHARED_IN_SPACE = "NotSharedInSpace"
    NO_POLICY = "NoPolicy"
    POLICY_OFF = "PolicyOff"
    SWITCHED_OFF = "SwitchedOff"
    ENGINE_REFUSED = "EngineRefused"
    PODS_SELECTED = "PodsSelected"
    NO_PODS = "NoPods"
    QUOTA_USED = "QuotaUsed"
    # How a slot's GPU is shared
    MPS_CLIENTS = "MpsClients"
    NO_WORKER_YET = "NoWorkerYet"
    POLICY_TEMPORAL = "PolicyTemporal"
    NO_GREEN_CONTEXTS = "NoGreenContexts"
    SHARES_MEET = "SharesMeet"
    NO_MPS_DAEMON = "NoMpsDaemon"
    MPS_MISSING = "MpsMissing"
    MPS_NOT_STARTED = "MpsNotStarted"
    MPS_CLIENT_HANGS = "MpsClientHangs"
    MPS_NOT_CONNECTED = "MpsNotConnected"
    MPS_TOO_LATE = "MpsTooLate"
    MPS_ENDED = "MpsEnded"
    OTHER_PIPE_DIRECTORY = "OtherPipeDirectory"
    OTHER_SHARED_MEMORY = "OtherSharedMemory"
    OTHER_USER = "OtherUser"
    CLIENT_UNKNOWN = "ClientUnknown"
    REASON_NOT_SAID = "ReasonNotSaid"


@dataclass(frozen=True)
class ConditionRow:
    """One row of a table: a condition of this type and status for this reason means `meaning`."""

    type: ConditionType
    status: Status
    reason: Reason
    meaning: str


T = ConditionType
R = Reason

LIFECYCLE: Final = (
    ConditionRow(
        T.ACCEPTED, "True", R.VALID, "The spec is valid and the destination is the job's own."
    ),
    ConditionRow(
        T.ACCEPTED, "False", R.INVALID_SPEC, "A field is wrong; the message names it and a remedy."
    ),
    ConditionRow(
        T.ACCEPTED,
        "False",
        R.DESTINATION_IN_USE,
        "An older job writes to the same `spec.output.destination`.",
    ),
    ConditionRow(
        T.ACCEPTED,
        "False",
        R.PRIORITY_CLASS_NOT_FOUND,
        "There is no PriorityClass of the name in `spec.priorityClassName`.",
    ),
    ConditionRow(
        T.ADMITTED,
        "True",
        R.ADMITTED,
        "Kueue has admitted the job's Workload; the message names the ClusterQueue.",
    ),
    ConditionRow(
        T.ADMITTED, "False", R.QUEUED, "The job waits in its LocalQueue; the message is Kueue's."
    ),
    ConditionRow(
        T.ADMITTED,
        "False",
        R.QUEUE_EVICTED,
        "Kueue has taken the job's quota back; the worker writes a checkpoint and stops.",
    ),
    ConditionRow(
        T.ADMITTED,
        "False",
        R.QUEUE_UNAVAILABLE,
        "The job names a queue and cannot have a Workload: Kueue is not installed, the operator "
        "lacks rights, or Kueue refused it. The message says which, and what to do.",
    ),
    ConditionRow(T.PLACED, "True", R.PLACED, "A slot is assigned; the message says why this one."),
    ConditionRow(
        T.PLACED,
        "True",
        R.DESTINATION_IN_USE,
        "It has its slot, but policies that were edited since make its destination that of another "
        "job: it goes on where it is, and is not placed again before that job has ended.",
    ),
    ConditionRow(
        T.PLACED,
        "False",
        R.NO_SLOT,
        "No slot can take the job; the message says why, slot by slot.",
    ),
    ConditionRow(
        T.PLACED, "False", R.BACK_OFF, "A worker failed; the next attempt waits until `retryAt`."
    ),
    ConditionRow(
        T.PLACED,
        "False",
        R.SLOT_LOST,
        "Pod or sidecar is gone, or a neighbour has ended the worker; resumes from the checkpoint, "
        "no attempt is counted.",
    ),
    ConditionRow(
        T.PLACED, "False", R.REJECTED, "The slot refused the assignment; another is looked for."
    ),
    ConditionRow(
        T.PLACED,
        "False",
        R.POLICY_CHANGED,
        "The slot's policy no longer admits the job (its mode, hours, seconds a day, namespaces): "
        "it has written a checkpoint and waits; the message says why.",
    ),
    ConditionRow(T.PLACED, "False", R.QUEUED, "The job waits for admission by Kueue."),
    ConditionRow(
        T.PLACED,
        "False",
        R.QUEUE_EVICTED,
        "Kueue has taken the job's quota back: it has written a checkpoint and waits.",
    ),
    ConditionRow(
        T.PLACED, "False", R.QUEUE_UNAVAILABLE, "The job's queue cannot be used; see Admitted."
    ),
    ConditionRow(T.PLACED, "False", R.SUSPENDED, "`spec.suspend` is true."),
    ConditionRow(T.PLACED, "False", R.FINISHED, "The job has ended and has given its slot back."),
    ConditionRow(T.RUNNING, "True", R.STARTED, "The worker has loaded the job."),
    ConditionRow(T.RUNNING, "True", R.RESUMED, "The worker has loaded the job from a checkpoint."),
    ConditionRow(T.RUNNING, "True", R.PAUSED, "Decode has all compute for now; the worker waits."),
    ConditionRow(T.RUNNING, "False", R.STARTING, "The slot is assigned, the worker is loading."),
    ConditionRow(
        T.RUNNING, "True", R.STOPPING, "The worker was asked to write a checkpoint and to stop."
    ),
    ConditionRow(
        T.RUNNING,
        "Unknown",
        R.SILENT,
        "Nothing was heard of the worker for a while; step, rate and ETA are dropped until it is.",
    ),
    ConditionRow(T.RUNNING, "False", R.NOT_PLACED, "The job has no slot."),
    ConditionRow(
        T.EVICTED,
        "True",
        R.SLOT_LOST,
        "The last placement ended before the job did, because pod, sidecar or worker went. "
        "`status.evictions` counts by reason.",
    ),
    ConditionRow(T.EVICTED, "True", R.POLICY_CHANGED, "A policy no longer admitted the job there."),
    ConditionRow(T.EVICTED, "True", R.PREEMPTED, "A job of higher priority was to have the slot."),
    ConditionRow(T.EVICTED, "True", R.QUEUE_EVICTED, "Kueue took the job's quota back."),
    ConditionRow(T.EVICTED, "True", R.SUSPENDED, "`spec.suspend` was set."),
    ConditionRow(T.EVICTED, "True", R.BACK_OFF, "The worker failed; tried again at `retryAt`."),
    ConditionRow(T.EVICTED, "True", R.REJECTED, "The sidecar did not take the job."),
    ConditionRow(
        T.EVICTED,
        "True",
        R.DECODE_BUSY,
        "Decode left the job little for minutes, and another slot had much more; the message has "
        "both figures.",
    ),
    ConditionRow(T.EVICTED, "False", R.PLACED, "The job has a slot again."),
    *(
        ConditionRow(
            T.REQUEUED,
            "True",
            reason,
            "The job waits for a slot again; the message counts how often and why.",
        )
        for reason in (
            R.SLOT_LOST,
            R.POLICY_CHANGED,
            R.PREEMPTED,
            R.QUEUE_EVICTED,
            R.DECODE_BUSY,
            R.BACK_OFF,
            R.REJECTED,
        )
    ),
    ConditionRow(T.REQUEUED, "False", R.PLACED, "The job has a slot again."),
    ConditionRow(T.REQUEUED, "False", R.SUSPENDED, "The job waits for nothing: it is suspended."),
    ConditionRow(T.REQUEUED, "False", R.FINISHED, "The job has ended."),
    ConditionRow(
        T.PLACED,
        "False",
        R.DECODE_BUSY,
        "Decode left the job little here, and another slot has much more. Resumes elsewhere.",
    ),
    ConditionRow(
        T.PLACED,
        "False",
        R.PREEMPTED,
        "A job of higher priority was to have the slot; the message names it. Resumes elsewhere.",
    ),
    ConditionRow(T.RUNNING, "False", R.FINISHED, "The job has ended."),
    ConditionRow(
        T.SUSPENDED, "True", R.SUSPENDED, "Stopped as asked; the checkpoint is in the status."
    ),
    ConditionRow(T.SUSPENDED, "False", R.NOT_SUSPENDED, "`spec.suspend` is false."),
    ConditionRow(
        T.CHECKPOINTED,
        "False",
        R.DISK_FULL,
        "The disk takes no checkpoint; the job goes on, and the message names the last good one.",
    ),
    ConditionRow(
        T.CHECKPOINTED,
        "False",
        R.CHECKPOINT_NOT_WRITTEN,
        "A checkpoint could not be written; the job goes on as above.",
    ),
    ConditionRow(
        T.CHECKPOINTED,
        "False",
        R.CHECKPOINT_UNREADABLE,
        "A damaged checkpoint was passed over; the message names it, and what is wrong with it.",
    ),
    ConditionRow(
        T.CHECKPOINTED,
        "True",
        R.CHECKPOINT_WRITTEN,
        "A checkpoint was written after one of these.",
    ),
    ConditionRow(
        T.TRACKED,
        "False",
        R.TRACKING_FAILED,
        "A server of `spec.tracking` does not take the job's figures, as the message says; the job "
        "goes on.",
    ),
    ConditionRow(
        T.TRACKED, "True", R.TRACKING_RESUMED, "The server takes the job's figures again."
    ),
    ConditionRow(T.SUCCEEDED, "True", R.COMPLETED, "All steps are done, the adapter is written."),
    ConditionRow(
        T.FAILED, "True", R.BACKOFF_LIMIT_EXCEEDED, "Workers failed `backoffLimit` times and once."
    ),
    ConditionRow(T.FAILED, "True", R.DEADLINE_EXCEEDED, "`activeDeadlineSeconds` have passed."),
    ConditionRow(T.FAILED, "True", R.DATASET_UNREADABLE, "The file of rows cannot be opened."),
    ConditionRow(
        T.FAILED, "True", R.DATASET_INVALID, "A row is wrong; the message names file and line."
    ),
    ConditionRow(T.FAILED, "True", R.DATASET_EMPTY, "There is no row to train on."),
    ConditionRow(T.FAILED, "True", R.MODEL_NOT_FOUND, "There is no model of that name or path."),
    ConditionRow(
        T.FAILED, "True", R.MODEL_UNSUPPORTED, "The model's architecture cannot be trained here."
    ),
    ConditionRow(T.FAILED, "True", R.MODEL_TOO_LARGE, "The model fits into no slot."),
    ConditionRow(T.FAILED, "True", R.OUTPUT_NOT_WRITABLE, "The destination cannot be written."),
    ConditionRow(
        T.FAILED, "True", R.CREDENTIALS_MISSING, "The Secret lacks a key that its place needs."
    ),
    ConditionRow(
        T.FAILED,
        "True",
        R.CHECKPOINT_MISMATCH,
        "The checkpoint is of another base, adapter or order of rows.",
    ),
    ConditionRow(T.FAILED, "True", R.INVALID_SPEC, "The worker found a field that is wrong."),
    ConditionRow(
        T.DEPLOYED,
        "True",
        R.LOADED,
        "Decode and prefill instances answer by the adapter; the message has its name.",
    ),
    ConditionRow(
        T.DEPLOYED,
        "False",
        R.NOT_LOADED,
        "An instance refused; those that had taken it have unloaded it. Tried again each minute.",
    ),
    ConditionRow(
        T.DEPLOYED,
        "False",
        R.NO_INSTANCES,
        "No ready instance serves the model under a policy that lets the job load adapters.",
    ),
    ConditionRow(
        T.DEPLOYED,
        "False",
        R.FETCHING,
        "Sidecars copy it to where the servers load it from (`sidecar.adapterCache`).",
    ),
    ConditionRow(
        T.DEPLOYED,
        "False",
        R.CANARY_FAILED,
        "Servers do not answer by it, or its loss is above what `deploy.canary` allows. The name "
        "points to the version before it.",
    ),
    ConditionRow(
        T.DEPLOYED,
        "False",
        R.SUPERSEDED,
        "The name points to the version of a newer job; when that is deleted, to this one again.",
    ),
)

# Why a GPU is shared in time, and what gets the better form.
IN_TIME: Final[Mapping[Reason, str]] = {
    R.NO_WORKER_YET: "The sidecar has not looked yet: it does when decode calls.",
    R.POLICY_TEMPORAL: "The policy says `sharing: temporal`. Write `auto` or `spatial`, and let "
    "the pod be made again.",
    R.NO_GREEN_CONTEXTS: "The driver cuts no shares of SMs. Use CUDA 12.5 or newer on a GPU that "
    "has them; a MIG slice may have too few SMs.",
    R.SHARES_MEET: "The shares of decode and worker were measured on common SMs, or could not be "
    "measured. Leave `WINDROW_DECODE_PARTITION` out.",
    R.NO_MPS_DAEMON: "Decode's start brought up no MPS daemon: it ran without the plugin, or "
    "without its run directory. Restart decode with them.",
    R.MPS_MISSING: "`nvidia-cuda-mps-control` is not on PATH in the container that the message "
    "names. NVIDIA's container toolkit mounts it with the driver capability `compute`; the "
    "sidecar gets it with `sidecar.gpuAccess`.",
    R.MPS_NOT_STARTED: "The MPS daemon ended or did not answer within 2 s; `mps/log` in the run "
    "directory says why.",
    R.MPS_CLIENT_HANGS: "A process under the daemon did not initialise CUDA in time and was "
    "killed. Look for a server of another user on this GPU (`mps/log`).",
    R.MPS_NOT_CONNECTED: "A process under the daemon ran without it: another user, another GPU, "
    "or too many clients (`mps/log`).",
    R.MPS_TOO_LATE: "CUDA was initialised in decode before its start could bring up the daemon. "
    "Start the server by `windrow run --`.",
    R.MPS_ENDED: "The daemon has ended, and decode's context with it. The pod restarts decode.",
    R.OTHER_PIPE_DIRECTORY: "The sidecar does not see the daemon's pipes: the containers mount "
    "different volumes at the run directory, or decode is the client of another daemon.",
    R.OTHER_SHARED_MEMORY: "The sidecar has another `/dev/shm` than decode, which clients of one "
    "daemon must share. Mount decode's volume at `/dev/shm` as a whole, without `subPath`, or use "
    "`sidecar.form: sidecar`.",
    R.OTHER_USER: "The sidecar runs as another user than decode, and the daemon would let it wait "
    "without end. Set `securityContext.runAsUser` of the pod.",
    R.CLIENT_UNKNOWN: "The daemon's list of clients does not name the sidecar's processes, so a "
    "worker's work could not be ended safely. Use `sidecar.form: attach`, or "
    "`shareProcessNamespace`.",
    R.REASON_NOT_SAID: "The sidecar is older than this condition; `status.sharingReason` has its "
    "words.",
}

SLOT: Final = (
    ConditionRow(T.ATTACHED, "True", R.CONNECTED, "The sidecar is connected."),
    ConditionRow(
        T.ATTACHED,
        "False",
        R.DISCONNECTED,
        "The sidecar's stream has ended. One that runs dials again; one that has ended comes back "
        "once a job needs its slot.",
    ),
    ConditionRow(T.READY, "True", R.SERVING, "The slot can take a job."),
    ConditionRow(T.READY, "False", R.DISCONNECTED, "The sidecar is not connected."),
    ConditionRow(
        T.READY, "False", R.SILENT, "Connected, but no heartbeat comes; its figures are dropped."
    ),
    ConditionRow(T.READY, "False", R.ENGINE_NOT_SERVING, "The decode engine is starting or gone."),
    ConditionRow(T.READY, "False", R.BREAKER_OPEN, "Harvesting gave up here: too many slow steps."),
    ConditionRow(
        T.READY,
        "False",
        R.RESTING,
        "Jobs of several owners failed here one after the other; the message says which.",
    ),
    ConditionRow(
        T.READY,
        "False",
        R.NODE_LEAVING,
        "The node is cordoned, drained or about to be removed: no job is placed here; one that "
        "runs goes on.",
    ),
    ConditionRow(
        T.READY, "False", R.TENSOR_PARALLEL, "Decode is split over ranks, and a worker here is not."
    ),
    ConditionRow(
        T.READY,
        "False",
        R.DEVICE_NOT_SEEN,
        "The sidecar's container does not see decode's GPU; the message says who gives it.",
    ),
    ConditionRow(
        T.READY,
        "False",
        R.NOT_SHARED_IN_SPACE,
        "The policy says `sharing: spatial`, and this GPU is shared in time; the condition "
        "SharedInSpace says why.",
    ),
    ConditionRow(
        T.READY,
        "False",
        R.ENGINE_REFUSED,
        "The engine cannot be harvested, or its plugin has never called; the message says why.",
    ),
    ConditionRow(
        T.READY,
        "False",
        R.SWITCHED_OFF,
        "Turned off in the pod, or the operator was not heard for the policy's lease.",
    ),
    ConditionRow(T.READY, "False", R.NO_POLICY, "No HarvestPolicy selects the pod."),
    ConditionRow(
        T.READY, "False", R.POLICY_OFF, "Mode, hours or daily seconds forbid harvesting now."
    ),
    ConditionRow(
        T.SHARED_IN_SPACE,
        "True",
        R.MPS_CLIENTS,
        "Decode and worker run on the GPU at once, as clients of one MPS daemon.",
    ),
    *(ConditionRow(T.SHARED_IN_SPACE, "False", reason, text) for reason, text in IN_TIME.items()),
)

POLICY: Final = (
    ConditionRow(T.ACCEPTED, "True", R.VALID, "The spec is valid."),
    ConditionRow(
        T.ACCEPTED, "False", R.INVALID_SPEC, "A field is wrong; the message names it and a remedy."
    ),
    ConditionRow(T.SELECTS_PODS, "True", R.PODS_SELECTED, "At least one decode pod is selected."),
    ConditionRow(T.SELECTS_PODS, "False", R.NO_PODS, "No decode pod of the namespace is selected."),
)

# What a worker may report as FAILED; with `user_error` no retry helps. Others may appear: a reason
# that is not in the table is shown as it came.
RETRIED: Final = (
    R.WORKER_DIED,
    R.WORKER_ERROR,
    R.OUT_OF_MEMORY,
    R.DISK_FULL,
    R.LOSS_NOT_FINITE,
    R.GRADIENT_EXPLODED,
    R.NO_PROGRESS,
    R.DATA_STARVED,
    R.MODEL_UNREACHABLE,
    R.OUTPUT_UNREACHABLE,
    R.CHECKPOINT_UNREADABLE,
    R.CHECKPOINT_UNREACHABLE,
    R.FENCED,
)

STATES: Final = (
    "Pending",
    "Queued",
    "Invalid",
    "Placed",
    "Running",
    "Stopping",
    "Silent",
    "Suspended",
    "Succeeded",
    "Failed",
)

_REASON_PATTERN: Final = re.compile(r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")


def timestamp(moment: datetime) -> str:
    """Return an aware `moment` as Kubernetes writes times: UTC, whole seconds, `Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def set_condition(
    conditions: Iterable[Mapping[str, Any]],
    type_: str,
    status: Status,
    reason: str,
    message: str,
    generation: int | None,
    now: datetime,
) -> list[Condition]:
    """Return `conditions` with the one of `type_` set; the others keep their order.

    `lastTransitionTime` changes only when the status does, as Kubernetes' conventions want it.
    """
    entry: Condition = {
        "type": str(type_),
        "status": status,
        "reason": str(reason) if _REASON_PATTERN.match(reason) else str(Reason.WORKER_ERROR),
        "message": message,
        "lastTransitionTime": timestamp(now),
    }
    if generation is not None:
        entry["observedGeneration"] = generation
    result, found = [], False
    for old in conditions:
        if old["type"] != type_:
            result.append(dict(old))
            continue
        found = True
        if old["status"] == status:
            entry["lastTransitionTime"] = old["lastTransitionTime"]
        result.append(entry)
    return result if found else [*result, entry]


def get_condition(conditions: Iterable[Mapping[str, Any]] | None, type_: str) -> Condition | None:
    """Return the condition of `type_`, or None."""
    return next((dict(c) for c in conditions or () if c["type"] == type_), None)


def is_true(conditions: Iterable[Mapping[str, Any]] | None, type_: str) -> bool:
    """Return whether the condition of `type_` is there and True."""
    condition = get_condition(conditions, type_)
    return condition is not None and condition["status"] == "True"


def is_finished(conditions: Iterable[Mapping[str, Any]] | None) -> bool:
    """Return whether a job with these conditions has ended, well or not."""
    held = list(conditions or ())
    return is_true(held, T.SUCCEEDED) or is_true(held, T.FAILED)


def state_of(conditions: Iterable[Mapping[str, Any]] | None) -> str:
    """Return a job's conditions as one of `STATES`: the word that `kubectl get` prints."""
    held = list(conditions or ())
    for type_, word in ((T.SUCCEEDED, "Succeeded"), (T.FAILED, "Failed")):
        if is_true(held, type_):
            return word
    accepted = get_condition(held, T.ACCEPTED)
    if accepted is not None and accepted["status"] == "False":
        return "Invalid"
    running = get_condition(held, T.RUNNING)
    if running is not None and running["status"] == "True":
        return "Stopping" if running["reason"] == R.STOPPING else "Running"
    if running is not None and running["status"] == "Unknown":
        return "Silent"
    if is_true(held, T.SUSPENDED):
        return "Suspended"
    placed = get_condition(held, T.PLACED)
    if placed is not None and placed["reason"] in (R.QUEUED, R.QUEUE_EVICTED):
        return "Queued"
    return "Placed" if is_true(held, T.PLACED) else "Pending"


def conditions_markdown() -> str:
    """Return docs/conditions.md."""
    parts = [
        "# Conditions",
        "",
        "Made from `api/windrow/conditions.py` by `tools/generate_crds.py`: change it there.",
        "",
        "Every condition has `type`, `status`, `reason`, `message`, `observedGeneration` and",
        "`lastTransitionTime` (when the status last changed). A job passes through Accepted,",
        "Placed and Running to Succeeded or Failed; Suspended says that it was asked to wait.",
        "",
        *_table("FinetuneJob", LIFECYCLE),
        "A worker that fails for one of these reasons is tried again until `backoffLimit`: "
        + ", ".join(f"`{reason}`" for reason in RETRIED)
        + ".",
        "",
        "`kubectl get ftj` prints the conditions as one word: "
        + ", ".join(f"`{state}`" for state in STATES)
        + ".",
        "",
        *_table("HarvestSlot", SLOT),
        *_table("HarvestPolicy", POLICY),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _table(title: str, rows: Sequence[ConditionRow]) -> list[str]:
    return [
        f"## {title}",
        "",
        "| type | status | reason | meaning |",
        "|---|---|---|---|",
        *(f"| {row.type} | {row.status} | {row.reason} | {row.meaning} |" for row in rows),
        "",
    ]
