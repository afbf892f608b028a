"""A job ends with the very same adapter, whatever interrupts it."""

from __future__ import annotations

import copy
import itertools
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
from windrow_lab.finetune.local_job import LocalJob, forget
from windrow_sidecar.finetune.adapter.adapters import trainable
from windrow_sidecar.finetune.engine.orders import interleaved, token_major
from windrow_sidecar.finetune.engine.sizing import Windows
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.training.checkpoint import Fenced, JobFolder, Position
from windrow_sidecar.finetune.training.evaluation import EvaluationPolicy
from windrow_sidecar.finetune.training.optimizer import NotFinite
from windrow_sidecar.testing.architectures import random_model
from windrow_sidecar.testing.equality import (
    Cut,
    small_rows,
    small_spec,
    stream_of,
    tuned_model,
)
from windrow_sidecar.testing.rounding import apart, in_type_of
from windrow_sidecar.testing.tinyjob import (
    TinyJob,
    adapter_of,
    advance,
    bit_equal,
    finish,
    tiny_job,
)

UID = "a-job"
CUTS = {
    "rows one by one": Cut(max_tokens=1),
    "windows of 7": Cut(Windows(7), token_major, max_tokens=64),
    "interleaved": Cut(Windows(5), interleaved, max_tokens=40, micro_batches=2),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 25), max_size=4))
def test_micro_batches_that_are_dropped_anywhere_change_nothing(uninterrupted, cuts):
    job = tiny_job()
    for cut in cuts:
        advance(job.stream, cut)
        job.stream.drop()
    finish(job)
    assert bit_equal(adapter_of(job), uninterrupted)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(CUTS, 2)))
def test_a_job_resumes_under_other_limits_in_another_order_and_learns_the_same(before, after):
    rows, spec = small_rows(), small_spec()
    whole = tuned_model(random_model("Llama").double(), spec)
    first, second, start = (copy.deepcopy(whole) for _ in range(3))
    with in_type_of(whole):
        finish(TinyJob(whole, stream_of(whole, rows, CUTS[before])))
        interrupted = stream_of(first, rows, CUTS[before])
        # In the middle of the second step: some of its rows are in the sums, a group is on its way.
        while interrupted.position.step < 1 or not interrupted.position.committed_rows:
            advance(interrupted, 1)
        advance(interrupted, 3)
        held = {name: tensor.clone() for name, tensor in interrupted.tensors().items()}
        resumed = stream_of(second, rows, CUTS[after])
        resumed.restore(interrupted.position, held)
        finish(TinyJob(second, resumed))
    begun, found, wanted = (adapter_of(TinyJob(of, None)) for of in (start, second, whole))
    assert apart(found, wanted).by_rounding
    assert not apart(begun, wanted).by_rounding


def poisoned_sum(job):
    """A gradient that is NaN in one number, on its way into the sums."""
    parameter = next(iter(trainable(job.model).values()))
    parameter.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.nan))


def poisoned_loss(job):
    """A base that overflows in its last layer."""
    with torch.no_grad():
        job.model.get_base_model().lm_head.weight[:2] = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("poison", "what"), [(poisoned_sum, "gradient of step 2"), (poisoned_loss, "loss of step 2")]
)
def test_what_is_not_finite_ends_the_job_in_the_state_of_the_step_before(tmp_path, poison, what):
    job = tiny_job(evaluation_policy=EvaluationPolicy())
    while job.stream.position.step < 1:
        advance(job.stream, 1)
    before = adapter_of(job)
    poison(job)
    with pytest.raises(NotFinite, match=f"the {what} is not finite") as caught:
        finish(job)
    assert bit_equal(adapter_of(job), before)
    assert job.stream.position.step == 1
    assert failure(caught.value, str(tmp_path))[0].reason == "LossNotFinite"


def test_a_base_with_a_weight_that_is_no_number_is_the_users_error_by_its_name():
    job = tiny_job(evaluation_policy=EvaluationPolicy())
    with torch.no_grad():
        job.model.get_base_model().model.layers[1].mlp.down_proj.weight[3, 1] = torch.nan
    with pytest.raises(UserError, match=r"down_proj.*weight holds numbers that are not finite"):
        finish(job)


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
    if found.position == Position(2):
        (passed_over,) = folder.passed_over
        assert passed_over.startswith(f"{path.parent}: ")
        assert passed_over != f"{path.parent}: ", "it says why"
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


_HOLDS = """
import sys
from pathlib import Path
from windrow_sidecar.finetune.training.checkpoint import JobFolder
JobFolder(Path(sys.argv[1]), sys.argv[2], 1).claim()
print("claimed", flush=True)
sys.stdin.read()
"""


def test_a_job_that_runs_already_is_not_run_a_second_time_until_its_process_is_gone(tmp_path):
    command = [sys.executable, "-c", _HOLDS, tmp_path, UID]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"claimed\n"
        with pytest.raises(Fenced, match=f"process {first.pid} on .* is training this job"):
            JobFolder(tmp_path, UID, 1).claim()
        job = LocalJob(
            tmp_path / "job.yaml", UID, tmp_path / ".windrow" / UID, tmp_path, small_spec()
        )
        with pytest.raises(UserError, match=f"process {first.pid} on") as refused:
            forget(job)
        assert refused.value.field == "--fresh"
        # A higher epoch is another matter: the operator has given the first one up.
        JobFolder(tmp_path, UID, 2).claim()
        (tmp_path / ".windrow" / UID / "fence").write_text("1")
        first.kill()
        first.wait()
        JobFolder(tmp_path, UID, 1).claim()
        JobFolder(tmp_path, UID, 1).claim()  # a process may come back to its own
        forget(job)
    assert not job.folder.exists()


def test_a_directory_where_the_adapter_goes_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "adapter_model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is a directory"):
        JobFolder(tmp_path, UID, 1).claim()


def test_a_destination_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        JobFolder(tmp_path / "file" / "out", UID, 1).claim()
    assert caught.value.field == "spec.output.destination"
    assert caught.value.reason == "OutputNotWritable"
