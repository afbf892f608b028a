"""Progress and events that a worker reports of a job, and the commands it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

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
    "EVALUATED",
    "WARNED",
]


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far the job is (`WorkerProgress`). What no step has told yet is None."""

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
    sharing: str = ""  # of a GPU with decode: "spatial", "temporal"
    sharing_reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Something that happened to the job (`WorkerEvent`)."""

    kind: EventKind
    reason: str = ""
    detail: str = ""
    user_error: bool = False
    adapter_path: str = ""
    base_eval_loss: float | None = None  # None: not known yet; a loss may be 0
    tuned_eval_loss: float | None = None
    notes: tuple[str, ...] = ()  # of STARTED: see `job.TrainingSession`; part of `detail` as well


class JobReporter(Protocol):
    """Takes a worker's reports, and gives it commands."""

    def event(self, event: WorkerEvent) -> None:
        """Tell that something happened; never waits."""

    def take_command(self) -> Action | None:
        """Return the oldest command that was not picked up yet."""
