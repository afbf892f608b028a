"""Words between a finetune worker and the process that started it.

A worker beside decode reports over the sidecar's socket (`agent.proto`), one on a device of its own
as lines of JSON on its standard output; what is said is the same. Exit statuses, kinds of events
and fields of the progress are defined here, once for both sides. A command that runs a part of
Windrow as a process reads its errors by `error_of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal

from windrow.errors import UserError, WindrowError


class Ending(IntEnum):
    """Ending of a worker; its exit status."""

    SUCCEEDED = 0
    FAILED = 1
    USER_ERROR = 2
    STOPPED = 3  # as asked, after a checkpoint
    FENCED = 4  # another worker has the job, or the assignment was withdrawn
    DECODE_GONE = 5  # after a checkpoint


# What a slot's predicted rate rests on, the surest first: a worker that ran on the slot, one that
# ran while the latency profile was taken, decode's own steps.
PREDICTED_FROM: Final = ("measured", "profiled", "derived")

# FORGET: stop, and remove the checkpoints; the job was deleted.
Action = Literal["PAUSE", "RESUME", "CHECKPOINT", "STOP", "FORGET", "ABORT"]
EventKind = Literal[
    "STARTED",
    "PAUSED",
    "RESUMED",
    "CHECKPOINTED",
    "STOPPED",
    "SUCCEEDED",
    "FAILED",
    "REJECTED",
    "EVALUATED",
    "WARNED",
]
# Kinds of events after which a job does nothing more.
ENDS: Final[tuple[EventKind, ...]] = ("SUCCEEDED", "STOPPED", "FAILED", "REJECTED")


@dataclass(frozen=True, slots=True)
class JobProgress:
    """Progress of the job (`WorkerProgress`). What no step has reported yet is None."""

    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    tokens: int = 0
    checkpoint_step: int = 0
    checkpoint_path: str = ""
    held_chunks: int = 0
    busy_seconds: float = 0.0
    train_rows: int = 0
    held_out_rows: int = 0
    skipped_rows: int = 0
    cut_rows: int = 0
    memory_bytes: int = 0
    allocator_held_bytes: int = 0
    allocator_requested_bytes: int = 0
    graph_bytes: int = 0  # that the driver has taken for CUDA graphs
    sharing: str = ""  # of a GPU with decode: "spatial", "temporal"
    sharing_reason: str = ""
    sharing_code: str = ""  # as a reason of the condition SharedInSpace
    joined_with: int = 0  # other jobs whose rows pass in the same tasklets


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Event of the job (`WorkerEvent`)."""

    kind: EventKind
    reason: str = ""
    detail: str = ""
    user_error: bool = False
    field: str = ""  # of a user error: the path of what is wrong, as in `UserError`
    remedy: str = ""  # of a user error: what to write instead
    adapter_path: str = ""
    adapter_digest: str = ""  # of SUCCEEDED: see `windrow.adapter_files`
    base_eval_loss: float | None = None  # None: not known yet; a loss may be 0
    tuned_eval_loss: float | None = None
    notes: tuple[str, ...] = ()  # of STARTED: see `job.TrainingSession`; part of `detail` as well


def error_line(error: Exception) -> dict[str, str]:
    """Return what a process writes on standard output in place of its result, as JSON."""
    if isinstance(error, UserError):
        return {"error": error.problem, "field": error.field, "remedy": error.remedy}
    known = isinstance(error, WindrowError)
    return {"error": str(error) if known else f"{type(error).__name__}: {error}"}


def error_of(said: Mapping[str, Any], *, user_error: bool = True) -> WindrowError | None:
    """Return the error that a process wrote by `error_line`, None where it wrote something else.

    `user_error`: whether its exit status says that a person acts (2).
    """
    if "error" not in said:
        return None
    if not user_error:
        return WindrowError(said["error"])
    return UserError(said["error"], field=said.get("field", ""), remedy=said.get("remedy", ""))
