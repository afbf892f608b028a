"""What is noticed of a training that has gone wrong, and what is said of it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from windrow.errors import UserError
from windrow_sidecar.finetune.checkpoints.checkpoint import Position
from windrow_sidecar.finetune.dataset.places import DatasetSilent, failed
from windrow_sidecar.finetune.failures import failure
from windrow_sidecar.finetune.runner import Ending
from windrow_sidecar.finetune.stream import EvaluationDone, Stage, StepDone
from windrow_sidecar.finetune.training.course import Judged
from windrow_sidecar.finetune.training.health import GradientWatch, StallWatch, Unhealthy
from windrow_sidecar.finetune.training.optimizer import NotFinite, StepFacts
from windrow_sidecar.finetune.training.scalars import Scalars


def seen(norms) -> GradientWatch:
    watch = GradientWatch()
    for step, norm in enumerate(norms, start=1):
        watch.see(step, norm)
    return watch


def test_norms_that_stay_far_above_what_was_usual_end_the_job():
    watch = seen([1.0] * 20 + [500.0, 500.0])
    with pytest.raises(Unhealthy, match=r"500 at step 23, usual were 1") as caught:
        watch.see(23, 500.0)
    assert caught.value.reason == "GradientExploded"


def test_single_outliers_are_clipped_and_forgiven():
    watch = seen([1.0] * 20 + [500.0, 500.0, 1.0] * 5)
    watch.see(99, 500.0)


def test_the_first_steps_have_no_usual_norm():
    seen([1e-6] * 3 + [10.0] * 30)


def test_norms_that_grow_slowly_are_no_explosion():
    seen([1.1**i for i in range(100)])


def test_a_tasklet_that_does_not_end_is_noticed_and_waiting_is_not():
    now = [0.0]
    watch = StallWatch(900, clock=lambda: now[0])
    now[0] = 10_000.0
    assert watch.stalled() is None
    watch.begin()
    now[0] += 899
    assert watch.stalled() is None
    now[0] += 2
    assert watch.stalled().reason == "NoProgress"
    watch.renew()
    assert watch.stalled() is None, "it is getting on"
    with watch.during("loading", 3600):
        now[0] += 3000
        assert watch.stalled() is None
        now[0] += 601
        assert "loading has not ended within 3600 s" in str(watch.stalled())
    watch.renew()
    now[0] += 10_000
    assert watch.stalled() is None
    watch.begin()
    watch.end()
    assert watch.stalled() is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotFinite("the loss of step 3 is not finite"), "LossNotFinite"),
        (Unhealthy("GradientExploded", "too large"), "GradientExploded"),
        (Unhealthy("NoProgress", "stuck"), "NoProgress"),
        (DatasetSilent("s3://b does not answer"), "DataStarved"),
        (OSError("disk full"), "WorkerError"),
        (MemoryError("4096 activations fit into no lent chunk"), "OutOfMemory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemory"),
        (RuntimeError("the size of tensor a must match"), "WorkerError"),
    ],
)
def test_each_failure_is_a_condition_that_names_the_last_good_checkpoint(error, reason):
    event, _ = failure(error, "/out/.windrow/uid/checkpoints/step-00000040-00000")
    assert event.reason == reason
    assert "step-00000040" in event.detail
    assert not event.user_error
    assert "no checkpoint yet" in failure(error, "")[0].detail


def test_memory_that_the_host_refuses_torch_is_told_as_such():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50)
    event, ending = failure(refused.value, "")
    assert event.reason == "OutOfMemory"
    assert f"{4 << 50} bytes" in event.detail
    assert ending is Ending.FAILED


def test_a_network_that_fails_is_tried_again_and_a_missing_file_is_not():
    assert isinstance(failed("s3://b/k", TimeoutError("slow")), DatasetSilent)
    assert isinstance(failed("s3://b/k", FileNotFoundError(2, "none")), UserError)
    assert isinstance(failed("/data/rows.jsonl", OSError(5, "I/O error")), UserError)


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_the_figures_of_each_step_are_lines_of_json(tmp_path):
    now = [10.0]
    scalars = Scalars(tmp_path, 2, tensorboard=False, clock=lambda: now[0])
    scalars.begin(1000)
    now[0] = 12.0
    at = Position(7, loss=1.5, tokens_done=1400, judged=Judged())
    scalars.step(StepDone(at, StepFacts(1e-3, 0.5)))
    now[0] = 32.0
    scalars.evaluation(7, EvaluationDone(Stage.HELD_OUT_EVALUATION, 2.5))
    now[0] = 33.0
    later = Position(8, loss=1.4, tokens_done=1500, judged=Judged())
    scalars.step(StepDone(later, StepFacts(1e-3, 0.5)))
    step, evaluation, after = lines(tmp_path)
    assert step["tokens_per_second"] == 200.0
    assert after["tokens_per_second"] == 100.0, "an evaluation's time is not the next step's"
    assert (step["step"], step["loss"], step["learning_rate"]) == (7, 1.5, 1e-3)
    assert (step["gradient_norm"], step["epoch"]) == (0.5, 2)
    assert step["memory_bytes"] > 1 << 20
    assert (evaluation["eval_loss"], evaluation["stage"]) == (2.5, "held-out")


def test_tensorboard_files_hold_the_same_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = Scalars(tmp_path, 1, tensorboard=True)
    scalars.step(StepDone(Position(3, loss=1.5, tokens_done=10), StepFacts(1e-3, 0.5)))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (point,) = board.Scalars("loss")
    assert (point.step, point.value) == (3, 1.5)
    assert math.isclose(
        board.Scalars("learning_rate")[0].value, 1e-3, rel_tol=2**-24
    )  # kept in fp32
