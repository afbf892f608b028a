"""A checkpoint holds one moment, whole, whatever training does meanwhile and however it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windrow.errors import UserError
from windrow_sidecar.finetune.training.checkpoint import (
    Fenced,
    JobFolder,
    Position,
    is_disk_full,
)
from windrow_sidecar.finetune.training.checkpoint_origin import Origin
from windrow_sidecar.finetune.training.checkpoint_writer import CheckpointWriter
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.snapshot import Spare, TensorSnapshot
from windrow_sidecar.testing.tinyjob import adapter_of, advance, bit_equal, finish, tiny_job

UID = "a-job"
COURSE = EvaluationPolicy(eval_every=2, patience=3)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path):
    made = JobFolder(tmp_path, UID, 1)
    made.claim()
    return made


@pytest.fixture(scope="module")
def uninterrupted():
    job = tiny_job(evaluation_policy=COURSE)
    finish(job)
    return adapter_of(job)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=3))
def test_checkpoints_that_are_copied_while_training_goes_on_resume_bit_for_bit(
    uninterrupted, tmp_path, plan
):
    folder = JobFolder(tmp_path / str(hash(tuple(plan))), UID, 1)
    folder.claim()
    for before, after in plan:
        job = tiny_job(evaluation_policy=COURSE)
        if (found := folder.newest()) is not None:
            job.stream.restore(found.position, found.tensors)
        advance(job.stream, before)
        position, snapshot = job.stream.position, job.stream.snapshot()
        advance(job.stream, after)  # lost, but for what the copies must not see
        folder.save(position, snapshot.take(), keep=2)
    job = tiny_job(evaluation_policy=COURSE)
    found = folder.newest()
    job.stream.restore(found.position, found.tensors)
    finish(job)
    assert bit_equal(adapter_of(job), uninterrupted)


def test_what_changes_first_is_copied_first_and_the_rest_meanwhile():
    tensors = {name: torch.zeros(4) for name in ("parameter/x", "state/y/x", "sum/x")}
    snapshot = TensorSnapshot(tensors)
    snapshot.copy(["sum"])
    for tensor in tensors.values():
        tensor.fill_(1.0)
    taken = snapshot.take()
    assert not taken["sum/x"].any()
    assert taken["parameter/x"].all(), "it was copied although nobody was about to change it"


def test_copies_lie_where_those_of_the_checkpoint_before_lay():
    spare, tensors = Spare(), {"parameter/x": torch.ones(4), "sum/x": torch.ones(2)}
    first = TensorSnapshot(tensors, spare)
    at = {name: t.data_ptr() for name, t in first.take().items()}
    second = TensorSnapshot(tensors, spare)
    assert at["sum/x"] != second.take()["sum/x"].data_ptr(), "the first is still being written"
    second.release()
    first.release()
    tensors["sum/x"] = torch.ones(3)
    third = TensorSnapshot(tensors, spare).take()
    assert third["parameter/x"].data_ptr() == at["parameter/x"]
    assert third["sum/x"].shape == (3,)


def test_a_copy_that_fails_is_tried_by_the_next_who_needs_it(monkeypatch):
    snapshot = TensorSnapshot({"sum/x": torch.ones(2)})

    def full(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("windrow_sidecar.finetune.training.snapshot._room_for", full)
        with pytest.raises(MemoryError):
            snapshot.take()
    assert torch.equal(snapshot.take()["sum/x"], torch.ones(2))


class Slow(TensorSnapshot):
    """Held back until the test lets it go."""

    def __init__(self, tensors) -> None:
        super().__init__(tensors)
        self.may_go = threading.Event()

    def take(self):
        assert self.may_go.wait(timeout=30)
        return super().take()


def test_training_goes_on_while_a_checkpoint_is_written(folder):
    saved = []
    writer = CheckpointWriter(folder, Origin(), keep=2, saved=saved.append)
    snapshot = Slow({"x": torch.ones(2)})
    writer.begin(Position(1), snapshot)
    writer.settle()
    assert (saved, folder.newest()) == ([], None)
    snapshot.may_go.set()
    writer.settle(wait=True)
    assert [s.position.step for s in saved] == [1]
    assert folder.newest().position == Position(1)


def test_the_last_checkpoint_waits_for_the_one_before(folder):
    saved = []
    writer = CheckpointWriter(folder, Origin(), keep=2, saved=saved.append)
    writer.begin(Position(1), TensorSnapshot({"x": torch.ones(2)}))
    assert writer.finish(Position(2), TensorSnapshot({"x": torch.ones(2)})).position == Position(2)
    assert [s.position.step for s in saved] == [1, 2]


def test_a_worker_that_is_fenced_learns_it_from_its_checkpoint(folder):
    writer = CheckpointWriter(folder, Origin(), keep=2, saved=lambda _: None)
    JobFolder(folder.destination, UID, 2).claim()
    writer.begin(Position(1), TensorSnapshot({}))
    with pytest.raises(Fenced):
        writer.settle(wait=True)


@contextlib.contextmanager
def small_files():
    """No file may grow beyond 4 KiB: writing more fails as on a full disk.

    Not a fixture: pytest's own output may be a file, and it writes before a fixture ends.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_checkpoint_before_and_no_half_of_the_new_one(folder):
    folder.save(Position(1), {"x": torch.ones(8)}, keep=2)
    failed = []
    writer = CheckpointWriter(
        folder,
        Origin(),
        keep=2,
        saved=lambda _: None,
        failed=lambda step, error: failed.append((step, error.errno)),
    )
    with small_files():
        writer.begin(Position(2), TensorSnapshot({"x": torch.ones(8192)}))
        writer.settle(wait=True)  # the job goes on
    assert failed == [(2, errno.EFBIG)]
    assert folder.newest().position == Position(1)
    assert [str(path) for path in folder.checkpoints.iterdir()] == [folder.newest().path]
    with small_files(), pytest.raises(OSError, match=r"tensors\.safetensors"):
        writer.finish(Position(2), TensorSnapshot({"x": torch.ones(8192)}))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_checkpoint_that_was_just_written_stays_whatever_broken_ones_sort_above_it(folder, keep):
    for step in (2, 3, 5, 6):
        newest = folder.save(Position(step), {"x": torch.ones(2)}, keep=4)
        if step > 3:
            Path(newest, "tensors.safetensors").write_bytes(b"")
    assert folder.newest().position == Position(3)
    written = folder.save(Position(4), {"x": torch.ones(2)}, keep=keep)
    assert folder.newest().path == written
    left = sorted(path.name for path in folder.checkpoints.iterdir())
    assert left == ["step-00000003-00000", "step-00000004-00000"][-keep:]


def test_a_disk_without_room_for_a_checkpoint_is_told_before_anything_is_trained(folder):
    disk = os.statvfs(folder.checkpoints)
    folder.check_room(disk.f_bavail * disk.f_frsize // 2)
    with pytest.raises(OSError, match=r"\d+ bytes are free, a checkpoint takes \d+") as refused:
        folder.check_room(2 * disk.f_bavail * disk.f_frsize)
    assert is_disk_full(refused.value)
    assert refused.value.filename == str(folder.checkpoints)


def test_what_killed_workers_left_half_written_goes_with_the_next_claim(folder):
    kept = folder.save(Position(1), {"x": torch.ones(2)}, keep=2)
    drafts = [folder.checkpoints / ".step-00000002-00000.1", folder.root / "adapter"]
    for draft in drafts:
        draft.mkdir()
        (draft / "half").write_bytes(b"0")
    JobFolder(folder.destination, UID, 2).claim()
    assert not any(draft.exists() for draft in drafts)
    assert Path(kept).exists()


_KILLED = """
import os, sys
from pathlib import Path
import torch
from windrow_sidecar.finetune.training import checkpoint
folder = checkpoint.JobFolder(Path(sys.argv[1]), "a-job", 1)
folder.claim()
folder.save(checkpoint.Position(1), {"x": torch.ones(4)}, keep=2)
calls = 0
def dies(name):
    before = getattr(checkpoint, name)
    def instead(*args):
        global calls
        calls += 1
        if calls == int(sys.argv[3]):
            os._exit(9)
        return before(*args)
    setattr(checkpoint, name, instead)
dies(sys.argv[2])
folder.save(checkpoint.Position(2), {"x": torch.ones(4)}, keep=2)
"""


@pytest.mark.parametrize(("at", "call"), [("_write_file", 2), ("sync_folder", 1)])
def test_a_worker_that_dies_while_it_writes_leaves_the_checkpoint_before(tmp_path, at, call):
    died = subprocess.run(
        [sys.executable, "-c", _KILLED, tmp_path, at, str(call)], check=False
    ).returncode
    assert died == 9
    assert JobFolder(tmp_path, UID, 1).newest().position == Position(1)


ORIGIN = Origin(
    *("a", "b", 0.1, 4, 17, {"type": "lora", "rank": 8, "dropout": 0.0}, "fp32", False, "none"),
    optimizer="adamw",
)
LORA = "spec.adapter.lora"


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"base": "o"}, "spec.model.revision", "other weights"),
        ({"rows": "o"}, "spec.dataset", "other tokens"),
        ({"eval_fraction": 0.2}, "spec.dataset.evalFraction", "0.1 was .*, the job says 0.2"),
        ({"batch_size": 8}, "spec.training.batchSize", "4 was trained with, the job says 8"),
        ({"seed": 3}, "spec.training.seed", "17 was trained with, the job says 3"),
        ({"adapter": {"type": "ia3"}}, "spec.adapter.type", "lora was .*, the job says ia3"),
        ({"adapter": {**ORIGIN.adapter, "rank": 16}}, f"{LORA}.rank", "8 was .* says 16"),
        ({"precision": "bf16"}, "spec.training.precision", "fp32 was .*, the job says bf16"),
        ({"quantization": "nf4"}, "spec.model.quantization", "none was .*, the job says nf4"),
        ({"optimizer": "adamw8bit"}, "spec.training.optimizer.type", "adamw was .* adamw8bit"),
    ],
)
def test_a_checkpoint_of_another_origin_is_refused_by_field_with_both_values(
    folder, change, field, words
):
    folder.save(Position(1), {}, keep=2, origin=ORIGIN)
    found = folder.newest()
    found.check(ORIGIN)
    with pytest.raises(UserError, match=words) as caught:
        found.check(replace(ORIGIN, **change))
    assert caught.value.field == field
    assert caught.value.reason == "CheckpointMismatch"


def test_a_job_that_leaves_its_precision_open_goes_on_in_another_and_says_so(folder):
    folder.save(Position(1), {}, keep=2, origin=ORIGIN)
    found, now = folder.newest(), replace(ORIGIN, precision="bf16", open_precision=True)
    found.check(now)
    assert found.origin.moved(now) == "; in bf16, until now in fp32"
    assert found.origin.moved(ORIGIN) == ""
