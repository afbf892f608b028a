"""Whatever interrupts a job, it ends with the very same adapter."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windrow.errors import UserError
from windrow_sidecar.finetune.checkpoints.checkpoint import Fenced, JobFolder, Position
from windrow_sidecar.testing.tinyjob import adapter_of, advance, bit_equal, finish, tiny_job

UID = "a-job"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def uninterrupted():
    job = tiny_job()
    finish(job)
    return adapter_of(job)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.integers(0, 25), max_size=4))
def test_micro_batches_that_are_dropped_anywhere_change_nothing(uninterrupted, cuts):
    job = tiny_job()
    for cut in cuts:
        advance(job.stream, cut)
        job.stream.drop()
    finish(job)
    assert bit_equal(adapter_of(job), uninterrupted)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(kills=st.lists(st.integers(0, 60), min_size=1, max_size=3))
def test_a_job_that_is_killed_anywhere_resumes_bit_for_bit(uninterrupted, tmp_path, kills):
    folder = JobFolder(tmp_path / str(kills), UID, 1)
    shutil.rmtree(folder.destination, ignore_errors=True)
    folder.claim()
    for kill in kills:
        job = tiny_job()
        if (found := folder.newest()) is not None:
            job.stream.restore(found.position, found.tensors)
        advance(job.stream, kill)
        folder.save(job.stream.position, job.stream.tensors(), keep=2)
        advance(job.stream, 3)  # lost
    job = tiny_job()
    found = folder.newest()
    job.stream.restore(found.position, found.tensors)
    finish(job)
    assert bit_equal(adapter_of(job), uninterrupted)


def test_a_worker_that_is_killed_in_any_phase_is_resumed_bit_for_bit(uninterrupted, tmp_path):
    script = Path(__file__).with_name("killed_in_each_phase.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], check=True, capture_output=True, text=True
    )
    ends = dict(line.split() for line in done.stdout.splitlines())
    phases = ("forward", "loss", "backward", "optimizer", "evaluation", "checkpoint")
    assert ends == dict.fromkeys(phases, str(-signal.SIGKILL))
    for phase in phases:
        folder, job = JobFolder(tmp_path / phase, UID, 2), tiny_job()
        folder.claim()
        found = folder.newest()
        assert found.position.step == 2, phase
        job.stream.restore(found.position, found.tensors)
        finish(job)
        assert bit_equal(adapter_of(job), uninterrupted), phase


def saved(tmp_path, steps=(1, 2, 3), keep=3, epoch=1) -> JobFolder:
    folder = JobFolder(tmp_path, UID, epoch)
    folder.claim()
    for step in steps:
        folder.save(Position(step), {"parameter/x": torch.full((3,), float(step))}, keep=keep)
    return folder


def newest_path(folder: JobFolder, nth: int = 0):
    return sorted(folder.checkpoints.glob("step-*"), reverse=True)[nth]


def test_the_newest_checkpoint_is_found_and_only_so_many_are_kept(tmp_path):
    folder = saved(tmp_path, keep=2)
    assert folder.newest().position == Position(3)
    assert torch.equal(folder.newest().tensors["parameter/x"], torch.full((3,), 3.0))
    assert len(list(folder.checkpoints.iterdir())) == 2


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, file, damage):
    folder = saved(tmp_path)
    path = newest_path(folder) / file
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    found = folder.newest()
    # One flipped bit in the manifest's layout may leave it readable and true.
    assert found.position in (
        {Position(2)} if file != "manifest.json" else {Position(2), Position(3)}
    )


def test_a_checkpoint_of_another_job_is_passed_over(tmp_path):
    folder = saved(tmp_path)
    manifest = newest_path(folder) / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "job_uid": "other"}))
    assert folder.newest().position == Position(2)


def test_a_draft_that_was_never_finished_is_not_a_checkpoint(tmp_path):
    folder = saved(tmp_path, steps=(1,))
    shutil.copytree(newest_path(folder), folder.checkpoints / ".step-00000009-00000.1")
    assert folder.newest().position == Position(1)


def test_a_lower_epoch_may_neither_start_nor_write(tmp_path):
    old = saved(tmp_path, steps=(1,), epoch=1)
    new = JobFolder(tmp_path, UID, 2)
    new.claim()
    with pytest.raises(Fenced):
        old.save(Position(2), {}, keep=2)
    with pytest.raises(Fenced):
        JobFolder(tmp_path, UID, 1).claim()
    assert new.newest().position == Position(1)


def test_a_destination_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        JobFolder(tmp_path / "file" / "out", UID, 1).claim()
    assert caught.value.field == "spec.output.destination"
    assert caught.value.reason == "OutputNotWritable"
