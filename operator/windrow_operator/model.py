"""The data types that the operator's decisions work on: plain and frozen.

Times are aware datetimes. A slot or a policy is named by its key, `namespace/name`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from windrow.conditions import Reason
from windrow.crd import FinetuneJobSpec, HarvestPolicySpec
from windrow.crd.finetunejob import MANAGED_BY_US

# Ten heartbeats: what a sidecar or a worker said before is out of date.
STALE_AFTER: Final = timedelta(seconds=10)


class Refusal(Exception):
    """A pod cannot have what was asked for.

    Attributes:
        reason: one word in CamelCase, for metrics and events.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def key_of(namespace: str, name: str) -> str:
    """Return the key of a namespaced object."""
    return f"{namespace}/{name}"


def version_of(body: Mapping[str, Any]) -> int:
    """Return the version of an object: versions of one kind are in order, newer ones higher."""
    # Comparable since Kubernetes 1.35 (KEP-5504); etcd's revision in all versions before.
    return int(body["metadata"].get("resourceVersion") or 0)


def name_in(key: str) -> str:
    """Return the name in a key, for messages."""
    return key.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class SidecarState:
    """State of a pod's sidecar, by the pod object.

    Attributes:
        prepared: the pod has what a sidecar needs.
        native: the sidecar is part of the pod's spec.
        decode_ready: the decode container is ready.
        attached: ephemeral containers that were added as sidecars, ended ones included.
        alive: the newest of them has not ended.
        ended_at: when the newest one ended.
    """

    prepared: bool = False
    native: bool = False
    decode_ready: bool = False
    attached: int = 0
    alive: bool = False
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A directory that a sidecar can write: its path there, and what it is (see `policies`)."""

    path: str
    source: str


@dataclass(frozen=True, slots=True)
class Pod:
    """Decode pod, as far as it is kept."""

    namespace: str
    name: str
    uid: str
    node: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ending: bool = False  # deleted, or its containers have ended
    volumes: frozenset[str] = frozenset()  # names of what it can mount
    mounts: frozenset[Mount] | None = None  # what its sidecar can write; None: it has none yet
    version: int = 0  # of the object
    model: str = ""  # that the decode container's command line names
    sidecar: SidecarState = SidecarState()

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return key_of(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class CheckedPolicy:
    """A HarvestPolicy, checked."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: str
    spec: HarvestPolicySpec | None  # None: invalid, see `error`
    error: str = ""
    offered: bool = False  # its namespace is marked as one whose policies are offered to all

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return key_of(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """Terms of a pod's policy at this moment."""

    policy: CheckedPolicy
    mode: str  # harvest, observe, off
    why: str = ""  # when the mode is not the policy's own, or not harvest
    spent: frozenset[str] = frozenset()  # namespaces that have had their share of today


@dataclass(frozen=True, slots=True)
class Usage:
    """Device seconds that jobs have had under a policy on a day (UTC)."""

    day: str = ""
    seconds: float = 0.0
    by_namespace: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Progress of a worker; of JobEvents and heartbeats."""

    step: int = 0
    total_steps: int = 0
    loss: float = float("nan")
    tokens_per_second: float = 0.0
    tokens: int = 0
    eta_seconds: float = 0.0
    checkpoint_step: int = 0
    checkpoint_path: str = ""
    skipped_rows: int = 0
    cut_rows: int = 0
    joined_with: int = 0  # other jobs whose rows pass in the same tasklets


class RunState(StrEnum):
    """State of one placement."""

    ASSIGNED = "assigned"  # the sidecar has it; the worker has not answered yet
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REJECTED = "rejected"
    LOST = "lost"  # the sidecar is there and knows nothing of it


ALIVE = frozenset({RunState.ASSIGNED, RunState.RUNNING, RunState.PAUSED})


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """One placement of a job, as its sidecar reports it."""

    uid: str
    epoch: int
    slot: str
    state: RunState
    since: datetime  # of the state
    seen_at: datetime | None = None  # when the worker was last reported
    reason: str = ""
    detail: str = ""
    user_error: bool = False
    field: str = ""  # of a user error: the path of what is wrong
    remedy: str = ""  # and what to write instead
    resumed: bool = False
    started: str = ""  # what the worker said when it had loaded the job
    progress: WorkerProgress = WorkerProgress()
    # Of its checkpoints: (reason, detail); None: nothing, ("", path) that one was written after it.
    trouble: tuple[str, str] | None = None
    tracking: tuple[str, str] | None = None  # of the servers of spec.tracking: (reason, detail)
    adapter_digest: str = ""  # of SUCCEEDED; empty: an older worker says none
    base_loss: float = float("nan")
    tuned_loss: float = float("nan")
    checkpoint_before: int | None = None  # step of the job's checkpoint when it was placed
    stop_asked_at: datetime | None = None  # first STOP of this placement
    stop_sent_at: datetime | None = None  # latest
    stop_reason: str = ""  # of that one

    @property
    def got_further(self) -> bool:
        """Return whether a checkpoint was written, as far as is known."""
        if self.checkpoint_before is None:
            return True
        return self.progress.checkpoint_step > self.checkpoint_before


@dataclass(frozen=True, slots=True)
class Base:
    """Frozen weights: jobs that name the same ones can share a worker."""

    name: str
    revision: str
    precision: str

    @classmethod
    def of(cls, spec: FinetuneJobSpec) -> Base | None:
        """Return what a job trains over; None: it is quantised, which cannot be shared."""
        if spec.model.quantization != "none":
            return None
        name = posixpath.normpath(spec.model.name)
        return cls(name, spec.model.revision, spec.training.precision)


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has a slot or is reported on it."""

    uid: str
    name: str = "that is unknown"  # for messages
    base: Base | None = None  # None: not known, or not to be shared

    @property
    def is_known(self) -> bool:
        """Return whether the name is that of a job, by which its namespace is known."""
        return "/" in self.name

    @property
    def namespace(self) -> str:
        """Return the namespace of the job; empty: it is not known."""
        return self.name.partition("/")[0] if self.is_known else ""


@dataclass(frozen=True, slots=True)
class Slot:
    """A harvested device, as placement sees it."""

    key: str
    pod_uid: str = ""
    node: str = ""
    model: str = ""
    tensor_parallel: int = 1
    ranks: int = 1  # of a worker that its sidecar starts
    unseen_device: str = ""  # why no worker can reach it: its sidecar does not see it
    sharing: str = ""  # of a GPU: spatial or temporal; "": of a host, or nobody has said
    sharing_code: str = ""  # why it is shared so, as a reason of the condition SharedInSpace
    sharing_reason: str = ""  # the same in words
    refused: str = ""  # why its engine cannot be harvested, in the plugin's words
    off: str = ""  # why its sidecar harvests nothing whatever the policy says
    engine_state: str = "serving"
    breaker: str = ""
    predicted_tokens_per_second: float = 0.0  # over the last minutes
    predicted_from: str = ""  # one of PREDICTED_FROM; "": nobody has said
    overstates: bool = False  # its sidecar claimed more than the hardware can do
    memory_full: bool = False
    attached: bool = True
    silent: bool = False  # attached, but its heartbeats have ceased
    lost_at: datetime | None = None  # since when the sidecar is not attached
    awaited: bool = False  # not attached yet since the operator came to lead
    pod_gone: bool = False  # or on its way
    node_leaving: str = ""  # why its node takes no new pods: it is cordoned, or on its way out
    resting: str = ""  # until when it takes no job, and why
    failed_jobs: frozenset[str] = frozenset()  # UIDs of jobs that failed on it lately
    terms: EffectivePolicy | None = None
    holders: tuple[Holder, ...] = ()
    max_jobs: int = 1  # that share a base model may run on it at a time
    # Directories that jobs may write; {namespace} is replaced by that of the job.
    outputs: tuple[str, ...] = ()

    @property
    def lacks_ranks(self) -> bool:
        """Return whether a worker here has other ranks than decode, so that it cannot train."""
        return self.tensor_parallel > 1 and self.ranks != self.tensor_parallel

    @property
    def lacks_space(self) -> bool:
        """Return whether the policy wants the GPU to be shared in space, and it is not."""
        spec = self.terms.policy.spec if self.terms else None
        wanted = spec.wanted_sharing if spec else "auto"
        return wanted == "spatial" and self.sharing == "temporal"


@dataclass(frozen=True, slots=True)
class UnreadableSecret:
    """A Secret of a job that could not be read.

    Attributes:
        message: which, why, and what to do.
        until: when it is read again.
    """

    message: str
    until: datetime


@dataclass(frozen=True, slots=True)
class QueueAdmission:
    """Admission of a job with a queue, as the operator last read it from its Workload.

    Attributes:
        admitted: whether Kueue lets the job run.
        reserved: whether it has quota; admission checks may still be pending.
        reason: of the job's condition Admitted.
        message: in Kueue's words where it has said anything.
    """

    admitted: bool
    reserved: bool
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """A FinetuneJob, checked."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: datetime
    spec: FinetuneJobSpec | None  # None: invalid, see `error`
    error: str = ""
    error_field: str = ""  # the path of what is wrong
    error_remedy: str = ""  # what to write instead
    status: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)  # the object that all this was read from
    deleted_at: datetime | None = None
    has_finalizer: bool = False
    priority: int = 0
    may_preempt: bool = False  # jobs of lower priority give their slot to it
    preempted_by: str = ""  # key of the job that is to have its slot
    moves: str = ""  # why it is to move to a better slot
    priority_class_missing: str = ""  # the PriorityClass that it names, where there is none
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    destination_owner: str = ""  # an older job that writes to the same place, in words
    unreadable: UnreadableSecret | None = None  # a Secret of its, when it was last read
    queue: str = ""  # LocalQueue of Kueue that its label names
    admission: QueueAdmission | None = None  # there; None: not known yet

    @property
    def key(self) -> str:
        """Return namespace/name."""
        return key_of(self.namespace, self.name)

    @property
    def is_ours(self) -> bool:
        """Return whether no other controller looks after the job."""
        return self.spec is None or self.spec.managed_by in (None, MANAGED_BY_US)

    @property
    def is_queued(self) -> bool:
        """Return whether the job names a queue and is not known to be admitted."""
        return bool(self.queue) and not (self.admission and self.admission.admitted)

    @property
    def lost_admission(self) -> bool:
        """Return whether the job names a queue that is known not to admit it."""
        return self.is_queued and self.admission is not None

    @property
    def epoch(self) -> int:
        """Return the fencing token of the newest placement; 0: never placed."""
        return int(self.status.get("epoch") or 0)

    @property
    def slot(self) -> str:
        """Return the key of the slot on which the job is placed, or nothing."""
        return str(self.status.get("slot") or "")
