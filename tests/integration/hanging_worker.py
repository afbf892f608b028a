"""A real worker in which a tasklet of one job never ends, once a file says so.

`python hanging_worker.py RUN_DIR JOB_UID EPOCH`. Whose turn it is when the file `hang` in the run
directory names that job, waits for ever in the model's first layer. Its watch has little patience
with tasklets.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

from windrow.eventlog import EventLog
from windrow.rundir import RunDir
from windrow_sidecar._core import Arena
from windrow_sidecar.compute.host import HostPartition
from windrow_sidecar.finetune.colocated.jobs import WorkerJobs
from windrow_sidecar.finetune.colocated.slot import WorkerSlot
from windrow_sidecar.finetune.colocated.slot_device import slot_device
from windrow_sidecar.finetune.colocated.standby import JobOrder
from windrow_sidecar.finetune.data.readers import Readers
from windrow_sidecar.finetune.job.assembly import JobSpec
from windrow_sidecar.finetune.job.ledger import JobState
from windrow_sidecar.finetune.model.loading import BaseModel, find_model, load_base
from windrow_sidecar.finetune.training.health import StallWatch
from windrow_sidecar.turn import TurnNote, read_turn

PATIENCE_S = 5.0


class Impatient(StallWatch):
    """Gives no tasklet longer than that; rows may come slowly."""

    def begin_tasklet(self, expected_s) -> None:
        self.begin(after_s=PATIENCE_S)


def hang_if_told(run_dir: RunDir, *_: object) -> None:
    order, turn = run_dir.root / "hang", read_turn(run_dir.turn_note())
    if turn and order.exists() and order.read_text() == turn[0]:
        threading.Event().wait()


def load(run_dir: RunDir, job: JobSpec) -> BaseModel:
    base = load_base(find_model(job.spec.model.name, job.spec.model.revision))
    embeddings = base.model.get_input_embeddings()
    embeddings.register_forward_pre_hook(partial(hang_if_told, run_dir))
    return base


def main() -> int:
    root, job_uid, epoch = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    run_dir, partition = RunDir(root), HostPartition.from_affinity("finetune")

    def open_slot() -> WorkerSlot:
        arena = Arena.attach(str(run_dir.arena_socket()))
        return WorkerSlot(
            epoch, arena, slot_device(arena, epoch, partition), partial(load, run_dir)
        )

    return WorkerJobs(
        run_dir,
        JobOrder(job_uid, epoch),
        open_slot,
        lambda order: EventLog(root / f"{order.job_uid}.events.jsonl", source="worker"),
        Readers(),
        TurnNote(run_dir.turn_note()),
        lambda: JobState(stall=Impatient()),
    ).run()


if __name__ == "__main__":
    sys.exit(main())
