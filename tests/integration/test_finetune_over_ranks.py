"""A job over several ranks (`windrow finetune --tp`) reports, ends and resumes as any other."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from test_finetune_command import finetune, manifest
from test_finetune_ends import ADAPTER, ENDLESS, checkpoints, started, worker_of
from waiting import is_running, wait_until

from windrow_sidecar.engines.weight_files import read_header


def other_ranks(worker: int) -> list[int]:
    """Return the processes that a worker has forked."""
    return [int(p) for p in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the folder of a job whose rank 1 was killed, its exit status and its last words."""
    folder = tmp_path_factory.mktemp("ranks")
    with started(manifest(folder, **ENDLESS), "--tp", "2", "--json") as process:
        wait_until(lambda: len(checkpoints(folder)) > 1, "two: the first is told", seconds=120)
        (other,) = other_ranks(worker_of(folder))
        os.kill(other, signal.SIGKILL)
        out, _ = process.communicate(timeout=240)
    return folder, process.returncode, json.loads(out)


@pytest.fixture
def folder(killed):
    return killed[0]


@pytest.mark.extended
def test_a_rank_that_is_killed_ends_the_job_by_its_name_and_the_checkpoint_stays(killed):
    _, code, said = killed
    assert (code, said["state"]) == (1, "Failed")
    assert "rank 1 was ended by SIGKILL; the last good checkpoint is" in said["message"]
    assert said["notes"][0] == "the model is cut over 2 ranks"


@pytest.mark.extended
def test_other_ranks_end_with_the_first_one(folder):
    before = checkpoints(folder)[-1].name
    with started(manifest(folder, **ENDLESS), "--tp", "2", "--json") as process:
        wait_until(lambda: checkpoints(folder)[-1].name > before, "a later one", seconds=120)
        worker = worker_of(folder)
        (other,) = other_ranks(worker)
        os.kill(worker, signal.SIGKILL)
        out, _ = process.communicate(timeout=240)
    wait_until(lambda: not is_running(other), "its end", seconds=60)
    assert "the worker ended without a report" in json.loads(out)["message"]


@pytest.mark.extended
def test_a_job_goes_on_over_another_number_of_ranks_and_leaves_a_plain_adapter(folder):
    step = int(checkpoints(folder)[-1].name.split("-")[1])
    _, over_four = finetune(manifest(folder, maxSteps=step + 1), "--tp", "4")
    assert (over_four["state"], over_four["step"]) == ("Succeeded", step + 1)
    whole = read_header(folder / "out" / ADAPTER).tensors
    _, alone = finetune(manifest(folder, maxSteps=step + 2))
    assert (alone["state"], alone["step"]) == ("Succeeded", step + 2)
    last = read_header(folder / "out" / ADAPTER).tensors
    assert whole
    assert {n: at["shape"] for n, at in whole.items()} == {n: at["shape"] for n, at in last.items()}


def test_what_does_not_go_over_ranks_is_refused_before_anything_runs(tmp_path):
    path = manifest(tmp_path)
    code, said = finetune(path, "--tp", "2", "--seconds", "1")
    assert (code, said["field"]) == (2, "--tp")
    code, said = finetune(path, "--tp", "3")
    assert (code, said["field"]) == (2, "spec.model.name")
    assert "8 attention heads, which 3 ranks cannot share evenly" in said["message"]
