"""Map an exception to the event and the exit status of a job."""

from __future__ import annotations

from dataclasses import replace

from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.protocol import Ending, WorkerEvent
from windrow.redaction import redacted
from windrow_sidecar.compute.host_device import out_of_memory
from windrow_sidecar.finetune.data.places import DatasetSilent
from windrow_sidecar.finetune.job.bucket import BucketSilent
from windrow_sidecar.finetune.job.ledger import CheckpointUnreachable
from windrow_sidecar.finetune.model.hub_models import ModelSilent
from windrow_sidecar.finetune.training.checkpoint import Fenced, is_disk_full, no_room
from windrow_sidecar.finetune.training.health import Unhealthy
from windrow_sidecar.finetune.training.optimizer import NotFinite


class Crowded(MemoryError):
    """A job finds no room beside others of its worker; no fault of its own."""


def failure(error: Exception, checkpoint: str | None) -> tuple[WorkerEvent, Ending]:
    """Return the event that reports an error, without signatures of URLs, and how the worker ends.

    `checkpoint`: the last good one, "" where there is none; None: nobody has looked for it yet.
    """
    event, ending = _failure(error, checkpoint)
    shown = replace(
        event,
        detail=redacted(event.detail),
        field=redacted(event.field),
        remedy=redacted(event.remedy),
    )
    return shown, ending


def _failure(error: Exception, checkpoint: str | None) -> tuple[WorkerEvent, Ending]:
    if isinstance(error, UserError):
        event = WorkerEvent(
            "FAILED",
            error.reason,
            str(error),
            user_error=True,
            field=error.field,
            remedy=error.remedy,
        )
        return event, Ending.USER_ERROR
    kept = f"; the last good checkpoint is {checkpoint}" if checkpoint else ""
    if checkpoint == "":
        kept = "; no checkpoint yet, so the next attempt begins at step 0"
    if isinstance(error, Crowded):
        return WorkerEvent("REJECTED", Reason.OUT_OF_MEMORY, str(error)), Ending.FAILED
    if isinstance(error, OSError) and is_disk_full(error):
        detail = f"{no_room(error)}{kept}"
        return WorkerEvent("FAILED", Reason.DISK_FULL, detail), Ending.FAILED
    if isinstance(error, Fenced):
        return WorkerEvent("FAILED", Reason.FENCED, str(error)), Ending.FENCED
    if isinstance(error, Unhealthy):
        return WorkerEvent("FAILED", error.reason, f"{error}{kept}"), Ending.FAILED
    if isinstance(error, CheckpointUnreachable):
        return WorkerEvent("FAILED", Reason.CHECKPOINT_UNREACHABLE, str(error)), Ending.FAILED
    if isinstance(error, BucketSilent):
        detail = f"{error}; nobody knows of a checkpoint before it does"
        return WorkerEvent("FAILED", Reason.OUTPUT_UNREACHABLE, detail), Ending.FAILED
    if isinstance(error, DatasetSilent):
        return WorkerEvent("FAILED", Reason.DATA_STARVED, f"{error}{kept}"), Ending.FAILED
    if isinstance(error, ModelSilent):
        return WorkerEvent("FAILED", Reason.MODEL_UNREACHABLE, f"{error}{kept}"), Ending.FAILED
    if isinstance(error, NotFinite):
        return WorkerEvent("FAILED", Reason.LOSS_NOT_FINITE, f"{error}{kept}"), Ending.FAILED
    reason = Reason.OUT_OF_MEMORY if out_of_memory(error) else Reason.WORKER_ERROR
    detail = f"{type(error).__name__}: {error}{kept}"
    return WorkerEvent("FAILED", reason, detail), Ending.FAILED
