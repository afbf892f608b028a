"""Check how far and how fast a job is, from its worker's reports once a second."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from windrow.crd.finetunejob import ProgressStatus
from windrow.proto import agent_pb2, attach_pb2
from windrow.protocol import JobProgress
from windrow.rundir import RunDir
from windrow_operator import status
from windrow_operator.model import Job, JobPlacement, RunState, WorkerProgress
from windrow_operator.reports import _merged
from windrow_sidecar.agent.exporter import _jobs
from windrow_sidecar.agent.job_run import JobRun
from windrow_sidecar.agent.outbox import EventOutbox
from windrow_sidecar.agent.progress import ProgressMeter
from windrow_sidecar.agent.settings import AgentSettings
from windrow_sidecar.finetune.colocated.agent_link import _progress_message

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)


def report(step, tokens, total_steps=100):
    return agent_pb2.WorkerProgress(step=step, tokens=tokens, total_steps=total_steps)


def test_rate_and_remaining_time_come_from_the_last_ten_seconds():
    meter = ProgressMeter()
    for second in range(30):
        meter.add(second, report(step=second, tokens=1000 * second))
    assert meter.tokens_per_second == pytest.approx(1000)
    assert meter.eta_s == pytest.approx(71)


def test_reports_that_come_at_once_after_a_silence_are_no_burst_of_speed():
    """An agent that was stopped for a minute reads what the worker wrote meanwhile at once."""
    meter = ProgressMeter()
    for second in range(10):
        meter.add(second, report(step=second, tokens=1000 * second))
    for waited in range(60):
        meter.add(70 + waited * 1e-4, report(step=10 + waited, tokens=1000 * (10 + waited)))
        assert meter.tokens_per_second <= 1000
    # Over all of the silence: from the last report before it to the last one read after it.
    assert meter.tokens_per_second == pytest.approx(60_000 / (70 + 59e-4 - 9))
    for second in range(71, 90):
        meter.add(second, report(step=second, tokens=1000 * second))
    assert meter.tokens_per_second == pytest.approx(1000)


def test_reports_that_come_at_once_at_the_start_have_no_rate_yet():
    meter = ProgressMeter()
    meter.add(0, report(step=0, tokens=0, total_steps=0))
    meter.add(1.0, report(step=40, tokens=40_000))
    meter.add(1.0001, report(step=41, tokens=41_000))
    assert (meter.tokens_per_second, meter.eta_s) == (0, 0)


def test_what_a_checkpoint_holds_was_not_done_by_this_worker():
    meter = ProgressMeter()
    assert meter.add(0, report(step=0, tokens=0, total_steps=0)) == 0
    assert meter.add(1, report(step=76, tokens=100_000)) == 0
    assert meter.tokens_per_second == 0
    assert meter.add(2, report(step=77, tokens=101_500)) == 1500
    assert meter.tokens_per_second == pytest.approx(1500)


def test_a_worker_that_begins_anew_counts_from_its_first_step():
    meter = ProgressMeter()
    meter.add(0, report(step=0, tokens=0))
    assert meter.add(1, report(step=1, tokens=1500)) == 1500


def test_rows_that_were_cut_or_left_out_are_counted_from_the_worker_to_the_status():
    meter = ProgressMeter()
    told = JobProgress(step=1, total_steps=4, skipped_rows=2, cut_rows=7)
    meter.add(0.0, _progress_message(told))
    known = _merged(WorkerProgress(), meter.message())
    placement = JobPlacement("u", 1, "s", RunState.RUNNING, NOW, progress=known)
    after = status.running(Job("team", "tone", "u", 3, NOW, None, status={}), placement, NOW)
    counted = ProgressStatus.model_validate(after["progress"])
    assert (counted.skipped_rows, counted.cut_rows) == (2, 7)


def test_what_no_step_has_told_is_no_figure_on_the_wire_and_no_metric():
    run = JobRun(AgentSettings(RunDir(Path("/run"))), attach_pb2.Assign(job_uid="u"), None, None)
    jobs = SimpleNamespace(harvested_tokens={}, worker_starts=1, worker_exits={}, going=[run])

    def metrics() -> set[str]:
        families = _jobs({("serving", "decode-0"): SimpleNamespace(jobs=jobs)})
        return {family.name for family in families if family.samples}

    figures = {"windrow_job_loss", "windrow_job_learning_rate", "windrow_job_gradient_norm"}
    run.meter.add(0.0, _progress_message(JobProgress(total_steps=4)))
    assert not figures & metrics()
    told = JobProgress(1, 4, loss=2.0, learning_rate=0.0, gradient_norm=0.5)
    run.meter.add(1.0, _progress_message(told))
    assert figures <= metrics()


def test_counts_of_rows_are_metrics_of_their_job():
    run = JobRun(AgentSettings(RunDir(Path("/run"))), attach_pb2.Assign(job_uid="u"), None, None)
    jobs = SimpleNamespace(harvested_tokens={}, worker_starts=1, worker_exits={}, going=[run])
    run.meter.add(0.0, _progress_message(JobProgress(total_steps=4, skipped_rows=2, cut_rows=7)))
    found = {
        family.name: family.samples[0].value
        for family in _jobs({("serving", "decode-0"): SimpleNamespace(jobs=jobs)})
        if family.name.endswith("_rows")
    }
    assert found == {"windrow_job_skipped_rows": 2, "windrow_job_cut_rows": 7}


@pytest.mark.parametrize(
    ("kind", "why", "told"),
    [
        ("PAUSED", "no latency profile", "decode has the device (no latency profile)"),
        ("PAUSED", "", "decode has the device"),
        ("RESUMED", "no latency profile", "decode has the device"),
    ],
)
async def test_a_pause_is_told_with_what_decode_says_of_it(kind, why, told):
    outbox = EventOutbox()
    assign = attach_pb2.Assign(job_uid="u", epoch=1)
    settings = AgentSettings(RunDir(Path("/run")))
    run = JobRun(settings, assign, outbox, None, why_paused=lambda: why)
    said = agent_pb2.WorkerEvent(kind=kind, reason="Paused", detail="decode has the device")
    await run.heard(agent_pb2.WorkerReport(event=said))
    _, event = await outbox.after(0)
    assert event.detail == told
