"""What a local run tells, understood line by line, and the page it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from windrow.cli.finetune import _passing_on, _result
from windrow.errors import UserError
from windrow.local.curves import read_metrics, write_curves
from windrow.local.finetune import (
    LocalJob,
    Pace,
    Told,
    check_apart,
    last_error,
    listen,
    read_local_job,
    understood,
)

PROGRESS = {
    "step": 0,
    "total_steps": 0,
    "loss": 0.0,
    "learning_rate": 0.0,
    "tokens": 0,
    "memory_bytes": 1,
    "skipped_rows": 0,
    "checkpoint_path": "",
}
EVENT = {
    "kind": "STARTED",
    "detail": "",
    "adapter_path": "",
    "base_eval_loss": 0.0,
    "tuned_eval_loss": 0.0,
}


def after(*said) -> Told:
    told = Told()
    for line in said:
        told = understood(told, line)
    return told


def progress(**changed):
    return {"progress": PROGRESS | changed}


def event(**changed):
    return {"event": EVENT | changed}


def test_a_loss_that_is_not_known_yet_is_none():
    assert after(progress(total_steps=4)).loss is None
    assert after(progress(total_steps=4, step=1, loss=2.5)).loss == 2.5


def test_events_are_kept_and_the_adapter_is_known_at_the_end():
    told = after(
        event(detail="from the beginning"),
        event(kind="EVALUATED", base_eval_loss=3.0, tuned_eval_loss=2.0),
        event(kind="SUCCEEDED", adapter_path="/out"),
    )
    assert told.events[0] == "STARTED from the beginning"
    assert (told.adapter, told.base_eval_loss, told.tuned_eval_loss) == ("/out", 3.0, 2.0)
    assert told.failure == ""


def test_a_failure_is_kept_with_its_detail():
    assert after(event(kind="FAILED", detail="rows.jsonl:3: bad")).failure == "rows.jsonl:3: bad"


def test_the_pace_leaves_out_loading_and_what_a_checkpoint_held():
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    assert pace.see(Told()) == (0.0, None)
    now[0] = 50.0
    pace.see(Told(step=10, total_steps=30, tokens=1000))
    now[0] = 60.0
    assert pace.see(Told(step=15, total_steps=30, tokens=2000)) == (100.0, 30.0)


def test_a_manifest_of_another_kind_is_refused(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("apiVersion: v1\nkind: Pod\n")
    with pytest.raises(UserError):
        read_local_job(manifest)


def test_manifests_of_one_destination_are_refused_before_a_worker_starts(tmp_path):
    jobs = [LocalJob(tmp_path / f"{n}.yaml", n, tmp_path, tmp_path / "out") for n in "ab"]
    with pytest.raises(UserError, match=r"a\.yaml and .*b\.yaml would both write to") as refused:
        check_apart(jobs)
    assert refused.value.field == "spec.output.destination"
    check_apart([jobs[0], replace(jobs[1], destination=tmp_path / "other")])


def test_the_last_word_of_a_log_is_not_what_a_library_says_of_leaks(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text(
        "ValueError: what went wrong\n\nnanobind: leaked 4 instances!\n"
        ' - leaked instance 0x7f of type "x"\n'
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html\n"
    )
    assert last_error(log) == "ValueError: what went wrong"
    log.write_text("nanobind: leaked 4 instances!\n")
    assert last_error(log) == "it is empty"


def worker(code: str) -> subprocess.Popen:
    """A process in the place of a worker, with the lines of one and an end of its own."""
    lines = f"print({json.dumps(json.dumps({'job': 0, **progress(total_steps=4, step=1)}))})"
    program = f"import os, sys, time\n{lines}\nsys.stdout.flush()\n{code}"
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os.kill(os.getpid(), 9)", "it was killed by SIGKILL"),
        (
            "print('{\"job\": 0, \"eve', end='', flush=True); os._exit(1)",
            "it ended with exit code 1",
        ),
        ("time.sleep(600)", "it has said nothing for 2 s, and was ended"),
    ],
)
def test_a_worker_that_ends_without_a_last_word_or_hangs_is_told_with_how(monkeypatch, code, how):
    monkeypatch.setattr("windrow.local.finetune.SILENT_AFTER_S", 2.0)
    process = worker(code)
    (told,) = listen(process, 1, lambda n, told: None)
    assert (told.step, told.ended, told.died) == (1, "", how)
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_asks_the_command_to_stop_asks_its_worker(number):
    with subprocess.Popen(["sleep", "600"]) as process:
        before = signal.getsignal(number)
        with _passing_on(process):
            os.kill(os.getpid(), number)
            assert process.wait(timeout=60) == -signal.SIGTERM
        assert signal.getsignal(number) is before


def test_a_report_that_cannot_be_written_leaves_a_success_a_success(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    (tmp_path / "report.html").mkdir()
    job = LocalJob(tmp_path / "j.yaml", "j", tmp_path, tmp_path)
    told = after(progress(total_steps=1, step=1), event(kind="SUCCEEDED", adapter_path="/out"))
    result = _result(job, told, 1.0, tmp_path / "worker.log")
    assert (result["state"], result["adapter"], result["report"]) == ("Succeeded", "/out", "")
    assert "the report cannot be written" in result["report_problem"]


def test_a_step_that_ran_twice_is_drawn_once_and_the_page_needs_no_network(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.9},
        {"step": 2, "loss": 2.8},
        {"step": 2, "eval_loss": 2.7, "stage": "held-out"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_metrics(tmp_path)
    assert [line.get("loss") for line in found] == [3.0, 2.8, None]
    page = write_curves(tmp_path, "a <job>", [("state", "Succeeded")]).read_text()
    assert "a &lt;job&gt;" in page
    assert "Norm of the gradient" in page
    assert 'src="http' not in page


def test_a_job_without_figures_has_no_curves(tmp_path):
    assert read_metrics(tmp_path) == []
