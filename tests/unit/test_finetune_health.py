"""Check what is noticed of a training that has gone wrong, and what is said of it."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from windrow.errors import UserError
from windrow.protocol import Ending
from windrow_sidecar.finetune.data.places import DatasetSilent, failed
from windrow_sidecar.finetune.engine.stages import EvaluationDone, JobStage, StepDone
from windrow_sidecar.finetune.job.failures import failure
from windrow_sidecar.finetune.job.scalars import Scalars
from windrow_sidecar.finetune.training.checkpoint import Position
from windrow_sidecar.finetune.training.evaluation import Judged
from windrow_sidecar.finetune.training.health import (
    GradientWatch,
    StallWatch,
    Unhealthy,
    waited_for_cores,
)
from windrow_sidecar.finetune.training.optimizer import NotFinite, StepMetrics


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


def test_a_tasklet_may_take_as_long_as_is_to_be_expected_of_it_and_a_minute_at_least():
    now = [0.0]
    watch = StallWatch(900, clock=lambda: now[0], waited=dict)

    def limit(expected_s):
        watch.begin_tasklet(expected_s)
        begun, watch_limit = now[0], 0.0
        while watch.stalled() is None:
            now[0] += 1.0
            watch_limit = now[0] - begun
        return watch_limit

    assert limit(0.02) == 60
    assert limit(10.0) == 200
    assert limit(1000.0) == 900
    assert limit(None) == 900


def test_what_was_stopped_or_had_no_core_does_not_hang():
    now, waited = [0.0], {"1": 0.0, "2": 0.0}
    watch = StallWatch(900, clock=lambda: now[0], waited=lambda: dict(waited))

    def pass_by(seconds, every=5.0, starved=0.0):
        for _ in range(int(seconds / every)):
            now[0] += every
            waited["2"] += starved * every
            watch.look()

    watch.begin_tasklet(0.02)
    pass_by(50)
    assert watch.stalled() is None
    now[0] += 3600.0  # a laptop that was closed
    watch.look()
    assert watch.stalled() is None
    pass_by(300, starved=1.0)  # others have all cores
    assert watch.stalled() is None
    pass_by(10)
    assert "a tasklet has not ended within 60 s" in str(watch.stalled())
    with watch.held():
        assert watch.stalled() is None
        pass_by(600)
    assert watch.stalled() is None, "the time in which it waited for decode does not count"
    pass_by(60)
    assert watch.stalled() is not None


def test_a_thread_that_finds_no_core_is_seen_to_wait():
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            pass

    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    thread = threading.Thread(target=busy)
    try:
        before = waited_for_cores()
        if not before:
            pytest.skip("this kernel does not count it: no /proc/self/task/*/schedstat")
        thread.start()
        deadline = time.monotonic() + 60
        while sum(waited_for_cores().values()) - sum(before.values()) < 0.05:
            assert time.monotonic() < deadline
    finally:
        rival.kill()
        rival.wait()
        stop.set()
        thread.join()
        os.sched_setaffinity(0, cpus)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotFinite("the loss of step 3 is not finite"), "LossNotFinite"),
        (Unhealthy("GradientExploded", "too large"), "GradientExploded"),
        (Unhealthy("NoProgress", "stuck"), "NoProgress"),
        (DatasetSilent("s3://b does not answer"), "DataStarved"),
        (OSError(errno.EIO, "I/O error", "/out"), "WorkerError"),
        (OSError(errno.ENOSPC, "No space left on device", "/out"), "DiskFull"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/out"), "DiskFull"),
        (OSError(errno.EFBIG, "File too large", "/out"), "DiskFull"),
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
    assert "so the next attempt begins at step 0" in failure(error, "")[0].detail
    assert "checkpoint" not in failure(error, None)[0].detail, "nobody has looked for one yet"


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
    scalars.step(StepDone(at, StepMetrics(1e-3, 0.5)))
    now[0] = 32.0
    scalars.evaluation(7, EvaluationDone(JobStage.HELD_OUT_EVALUATION, 2.5))
    now[0] = 33.0
    later = Position(8, loss=1.4, tokens_done=1500, judged=Judged())
    scalars.step(StepDone(later, StepMetrics(1e-3, 0.5)))
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
    scalars.step(StepDone(Position(3, loss=1.5, tokens_done=10), StepMetrics(1e-3, 0.5)))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    (point,) = board.Scalars("loss")
    assert (point.step, point.value) == (3, 1.5)
    assert math.isclose(
        board.Scalars("learning_rate")[0].value, 1e-3, rel_tol=2**-24
    )  # kept in fp32
