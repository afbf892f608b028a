"""Each check that follows a fault in `make e2e` lets a right day pass and sees a wrong one."""

from dataclasses import replace

import closing
import pytest

from windrow.eventlog import MarkEvent, StepEvent, TaskletEvent

UNITS = 2
MS = 1_000_000


def tasklet(epoch, step, at_ms, phase="opt"):
    return TaskletEvent(
        *("u", epoch, step, phase, 0, 8, 8 * step),
        start_ns=at_ms * MS,
        end_ns=(at_ms + 5) * MS,
        units=1,
    )


def decode_step(at_ms, took_ms=10, units=UNITS, finetune=0, lent=0):
    return StepEvent(
        step=at_ms,
        start_ns=at_ms * MS,
        end_ns=(at_ms + took_ms) * MS,
        batch=1,
        context_tokens=9,
        admitted=0,
        prefill_tokens=0,
        waiting=0,
        decode_units=units,
        finetune_units=finetune,
        predicted_us=0,
        hook_us=1.0,
        chunks_kv=1,
        chunks_lent=lent,
    )


# Checkpoints after every four steps: killed after step 6, resumed from the checkpoint of four.
RESUMED = [tasklet(1, step, 10 * step) for step in range(7)]
RESUMED += [tasklet(2, step, 100 + 10 * step) for step in range(4, 12)]
SERVED = [decode_step(at, units=1, finetune=1, lent=3) for at in range(0, 100, 10)]
SERVED += [decode_step(at) for at in range(100, 200, 10)]


def test_a_job_that_went_on_from_its_checkpoint_is_right():
    closing.assert_ran_once(RESUMED)
    closing.assert_went_on(RESUMED, 12, 4)


def test_what_a_killed_worker_had_not_written_of_its_log_is_not_missed():
    closing.assert_went_on([e for e in RESUMED if e.epoch == 2 or e.step < 3], 12, 4)


@pytest.mark.parametrize(
    ("tasklets", "what"),
    [
        ([], "no tasklet"),
        ([*RESUMED, tasklet(1, 7, 145)], "two workers at once"),
        ([*RESUMED, tasklet(2, 12, 212, "fwd")], "two workers in epoch 2"),
        ([*RESUMED, tasklet(2, 5, 300)], "ran twice"),
    ],
    ids=["nothing", "an-epoch-that-is-over", "under-one-epoch", "a-step-again"],
)
def test_a_second_worker_is_seen(tasklets, what):
    with pytest.raises(AssertionError, match=what):
        closing.assert_ran_once(tasklets)


@pytest.mark.parametrize(
    ("tasklets", "what"),
    [
        ([], "no step"),
        (RESUMED[:-1], "the last step"),
        ([*RESUMED[:7], *(tasklet(2, step, 100 + step) for step in range(12))], "began at 0"),
        ([*RESUMED[:7], *(tasklet(2, step, 100 + step) for step in range(2, 12))], "began at 2"),
    ],
    ids=["nothing", "a-step-short", "from-the-beginning", "from-an-older-checkpoint"],
)
def test_a_job_that_did_not_go_on_from_its_checkpoint_is_seen(tasklets, what):
    with pytest.raises(AssertionError, match=what):
        closing.assert_went_on(tasklets, 12, 4)


def mark(at_ms, what):
    return MarkEvent(at_ms * MS, what, "epoch 1")


CAME, GONE = mark(0, "worker-attached"), mark(95, "worker-gone")


def test_decode_that_is_hit_for_two_steps_and_has_its_device_again_is_right():
    hit = [*SERVED[:5], decode_step(50, 900), decode_step(950, 900), *SERVED[7:]]
    closing.assert_kept_pace(hit, 100.0)
    closing.assert_alone([*SERVED, CAME, GONE], UNITS)
    closing.assert_alone([*SERVED, CAME, mark(75, "worker-gone")], UNITS)  # two steps of before
    closing.assert_alone(SERVED[10:], UNITS)  # no worker came


@pytest.mark.parametrize(
    "steps", [[], [decode_step(at, 900) for at in range(0, 2700, 900)]], ids=["none", "three"]
)
def test_decode_that_stays_late_is_seen(steps):
    with pytest.raises(AssertionError):
        closing.assert_kept_pace(steps, 100.0)


@pytest.mark.parametrize(
    "wrong",
    [{"decode_units": 1}, {"finetune_units": 1}, {"chunks_lent": 1}],
    ids=["share", "grant", "memory"],
)
def test_what_decode_does_not_have_back_is_seen(wrong):
    served = [*SERVED[:-1], replace(SERVED[-1], **wrong)]
    with pytest.raises(AssertionError, match="decode does not have"):
        closing.assert_alone([*served, CAME, GONE], UNITS)


@pytest.mark.parametrize("marks", [[CAME], [GONE, mark(96, "worker-attached")]])
def test_a_worker_that_never_went_is_seen(marks):
    with pytest.raises(AssertionError, match="still is a worker"):
        closing.assert_alone([*SERVED, *marks], UNITS)


def test_a_decode_that_stands_still_is_seen():
    with pytest.raises(AssertionError, match="took no step"):
        closing.assert_alone([*SERVED, CAME, mark(180, "worker-gone")], UNITS)
