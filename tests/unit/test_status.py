"""Check what the status says for people, and which changes of it can wait."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from windrow_operator import status
from windrow_operator.model import Job, JobPlacement, RunState, WorkerProgress

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)


def job(**held):
    return Job("team", "tone", "u", 3, NOW, None, status=held)


def run(**changes):
    return JobPlacement("u", 1, "team/decode-0", RunState.RUNNING, NOW, **changes)


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.4, "42s"), (72, "1m12s"), (11100, "3h05m"), (0.2, "0s")]
)
def test_lengths_are_written_for_people(seconds, text):
    assert status.clock(seconds) == text


def test_a_loss_that_is_no_number_stays_out_of_the_status():
    after = status.running(job(), run(progress=WorkerProgress(1, 10, math.nan)), NOW)
    assert "loss" not in after
    assert "loss" not in after["progress"]


def test_progress_can_wait_and_a_checkpoint_cannot():
    before = status.running(job(), run(progress=WorkerProgress(1, 10, 3.0)), NOW)
    step = status.running(job(**before), run(progress=WorkerProgress(2, 10, 2.9)), NOW)
    assert not status.is_urgent(before, step)
    saved = run(progress=WorkerProgress(2, 10, 2.9, checkpoint_step=2, checkpoint_path="/c"))
    assert status.is_urgent(step, status.running(job(**step), saved, NOW))


def test_a_job_says_beside_how_many_others_its_rows_run_as_long_as_it_is_so():
    joined = run(progress=WorkerProgress(1, 10, 3.0, joined_with=2))
    before = status.running(job(), joined, NOW)
    assert before["progress"]["joinedWith"] == 2
    alone = status.running(job(**before), run(progress=WorkerProgress(2, 10, 3.0)), NOW)
    assert "joinedWith" not in alone["progress"]
    lost = status.unplaced(job(**before), joined, "SlotLost", "it is gone", NOW)
    assert "joinedWith" not in lost["progress"]


def test_a_checkpoint_that_the_worker_does_not_repeat_stays_known():
    held = {"checkpoint": {"step": 5, "path": "/c5"}}
    after = status.running(job(**held), run(progress=WorkerProgress(6, 10, 2.0)), NOW)
    assert after["checkpoint"] == {"step": 5, "path": "/c5"}


def test_every_status_names_the_generation_that_it_is_about():
    after = status.accepted(job(), NOW)
    assert after["observedGeneration"] == 3
    assert {c["observedGeneration"] for c in after["conditions"]} == {3}


def test_nothing_is_changed_in_place():
    held = {"conditions": [], "slot": "team/decode-0", "eta": "1m"}
    before = job(**held)
    status.failed(before, run(), "WorkerDied", "signal 9", NOW)
    assert before.status == held
