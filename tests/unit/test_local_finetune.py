"""Check what a local run tells, understood line by line, and the page it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from windrow.crd import EarlyStopSpec, parse_job_spec
from windrow.errors import UserError
from windrow_cli.finetune import _passed_on, _result, _state
from windrow_lab.finetune.curves import (
    Table,
    flat,
    of_bytes,
    of_seconds,
    read_metrics,
    thinned,
    write_curves,
)
from windrow_lab.finetune.local_job import (
    LocalJob,
    Pace,
    RunSummary,
    check_apart,
    last_error,
    listen,
    read_local_job,
    understood,
    without_cluster,
)
from windrow_sidecar.finetune.job.assembly import read_job, without_effect
from windrow_sidecar.finetune.training.optimizer import Schedule

SPEC = parse_job_spec(
    {
        "model": {"name": "/m"},
        "dataset": {"source": "/rows.jsonl"},
        "training": {"maxSteps": 4, "evalEverySteps": 2},
        "output": {"destination": "/out"},
    }
)
PROGRESS = {
    "step": 0,
    "total_steps": 0,
    "loss": None,
    "learning_rate": None,
    "gradient_norm": None,
    "tokens": 0,
    "memory_bytes": 1,
    "train_rows": 9,
    "held_out_rows": 1,
    "skipped_rows": 0,
    "cut_rows": 0,
    "checkpoint_path": "",
}
EVENT = {
    "kind": "STARTED",
    "detail": "",
    "adapter_path": "",
    "base_eval_loss": None,
    "tuned_eval_loss": None,
    "notes": [],
}


def after(*said) -> RunSummary:
    told = RunSummary()
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
        event(kind="EVALUATED", base_eval_loss=3.0),
        event(kind="EVALUATED", base_eval_loss=3.0, tuned_eval_loss=0.0),
        event(kind="SUCCEEDED", adapter_path="/out"),
    )
    assert told.events[0] == "started: from the beginning"
    assert (told.adapter, told.base_eval_loss, told.tuned_eval_loss) == ("/out", 3.0, 0.0)
    assert told.failure == ""


def test_nothing_is_said_twice_and_each_note_has_a_line_of_its_own():
    started = event(detail="from step 2; a; b", notes=["a", "b"])
    saved = event(kind="CHECKPOINTED", detail="/out/step-2")
    told = after(started, saved, saved, event(kind="SUCCEEDED", detail="2 steps"))
    assert told.events == (
        *("started: from step 2", "note: a", "note: b"),
        *("checkpointed: /out/step-2", "succeeded: 2 steps"),
    )
    assert told.notes == ("a", "b")


def test_what_no_step_has_told_is_a_dash():
    still = Pace(clock=lambda: 0.0)
    assert _state(after(), still) == ""
    assert _state(after(progress(total_steps=4)), still) == (
        "step 0/4, loss -, lr -, grad norm -, - tokens/s"
    )
    resumed = progress(total_steps=4, step=2, loss=2.5)
    assert _state(after(resumed), still) == "step 2/4, loss 2.500, lr -, grad norm -, - tokens/s"
    ran = progress(total_steps=4, step=1, loss=2.5, learning_rate=0.0, gradient_norm=0.1234)
    assert "lr 0.00e+00, grad norm 0.123" in _state(after(ran), still)


def test_a_failure_is_kept_with_its_detail():
    assert after(event(kind="FAILED", detail="rows.jsonl:3: bad")).failure == "rows.jsonl:3: bad"


def test_a_failure_for_a_row_has_field_and_remedy_in_its_json(tmp_path):
    job = LocalJob(tmp_path / "j.yaml", "j", tmp_path, tmp_path, SPEC)
    where = {"field": "rows.jsonl:3", "remedy": "Write chat rows."}
    told = after(event(kind="FAILED", detail="rows.jsonl:3: bad", **where))
    result = _result(job, told, 1.0, tmp_path / "worker.log")
    assert {name: result[name] for name in where} == where


def test_the_pace_leaves_out_loading_and_what_a_checkpoint_held():
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    assert pace.see(RunSummary()) == (0.0, None)
    now[0] = 50.0
    pace.see(RunSummary(step=10, total_steps=30, tokens=1000))
    now[0] = 60.0
    assert pace.see(RunSummary(step=15, total_steps=30, tokens=2000)) == (100.0, 30.0)


def test_fields_that_only_a_cluster_honours_are_told():
    assert without_cluster(SPEC) == []
    spec = SPEC.model_copy(update={"suspend": True, "active_deadline_seconds": 60})
    assert without_cluster(spec) == [
        "without a cluster, nothing follows from spec.suspend, spec.activeDeadlineSeconds"
    ]


@pytest.mark.parametrize(
    ("changed", "rows", "note"),
    [
        ({"batch_size": 9}, 8, "batchSize is 9, above the rows to train on (8): a step takes all"),
        ({"eval_every_steps": 5}, 99, "evalEverySteps is 5: no evaluation comes between the 4"),
        ({"max_sequence_length": 65}, 99, "is 65, and the model has 64 positions"),
        (
            {"eval_every_steps": 5, "early_stop": EarlyStopSpec(patience=1)},
            99,
            "between the 4 steps, and spec.training.earlyStop never acts",
        ),
    ],
)
def test_what_does_not_do_what_it_seems_to_is_told(changed, rows, note):
    short = SPEC.training.model_copy(update={"max_sequence_length": 64})
    fits = SPEC.model_copy(update={"training": short})
    wrong = SPEC.model_copy(update={"training": short.model_copy(update=changed)})
    (said,) = without_effect(wrong, rows, 4, 64)
    assert note in said
    assert not list(without_effect(fits, 99, 4, 64))


def test_a_warm_up_that_leaves_no_step_a_rate_is_told():
    spec = SPEC.model_copy(
        update={"training": SPEC.training.model_copy(update={"eval_every_steps": None})}
    )
    (said,) = without_effect(spec, 99, 1, None)
    assert "the only step belongs to the warm-up" in said
    assert Schedule("cosine", 1.0, 1, float(SPEC.training.warmup_ratio)).rate(0) == 0
    without = spec.training.model_copy(update={"warmup_ratio": 0.0})
    assert not list(without_effect(spec.model_copy(update={"training": without}), 99, 1, None))


def test_a_revision_of_a_folder_is_told(tmp_path):
    model = SPEC.model.model_copy(update={"name": str(tmp_path), "revision": "v2"})
    (said,) = without_effect(SPEC.model_copy(update={"model": model}), 99, 4, None)
    assert said == f"spec.model.revision is v2: the folder {tmp_path} has none"


def test_the_place_of_a_file_url_is_the_path_that_it_means(tmp_path):
    manifest = tmp_path / "job.json"
    head = {"apiVersion": "windrow.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "j"}}
    spec = SPEC.model_dump(by_alias=True, exclude_none=True, mode="json")
    spec["output"]["destination"] = f"file://{tmp_path}/a%20b"
    manifest.write_text(json.dumps({**head, "spec": spec}))
    assert (
        read_local_job(manifest).destination == tmp_path / "a b" == read_job(manifest).destination
    )


def test_a_manifest_of_another_kind_is_refused(tmp_path):
    manifest = tmp_path / "job.yaml"
    manifest.write_text("apiVersion: v1\nkind: Pod\n")
    with pytest.raises(UserError):
        read_local_job(manifest)


def test_a_job_is_not_read_from_the_manifest_of_another_kind(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text('{"kind": "HarvestPolicy", "spec": {"selector": {}}}')
    with pytest.raises(UserError, match=r"is a HarvestPolicy\. Name a FinetuneJob manifest"):
        read_job(path)


@pytest.mark.parametrize(
    ("name", "uid"),
    [("m.yaml", "../../x"), ("m.yaml", ""), ("m.yaml", ".."), ("...yaml", None), ("..yaml", None)],
)
def test_a_job_has_a_folder_of_its_own_whatever_its_manifest_says(tmp_path, name, uid):
    manifest = {
        "apiVersion": "windrow.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": {"name": "tone"} | ({} if uid is None else {"uid": uid}),
        "spec": SPEC.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    path = tmp_path / name
    path.write_text(json.dumps(manifest))
    for reads in (read_local_job, read_job):
        with pytest.raises(UserError, match="cannot be the name of the job's folder"):
            reads(path)


def test_manifests_of_one_destination_are_refused_before_a_worker_starts(tmp_path):
    jobs = [LocalJob(tmp_path / f"{n}.yaml", n, tmp_path, tmp_path / "out", SPEC) for n in "ab"]
    with pytest.raises(UserError, match=r"a\.yaml and .*b\.yaml would both write to") as refused:
        check_apart(jobs)
    assert refused.value.field == "spec.output.destination"
    check_apart([jobs[0], replace(jobs[1], destination=tmp_path / "other")])


def test_the_last_word_of_a_log_is_its_last_line_that_says_something(tmp_path):
    log = tmp_path / "worker.log"
    log.write_text("Traceback\nValueError: what went wrong\n\n")
    assert last_error(log) == "ValueError: what went wrong"
    log.write_text("\n")
    assert last_error(log) == "it is empty"


def test_a_process_whose_threads_hold_what_is_ours_ends_without_a_word(tmp_path):
    code = """
import threading, time
from windrow_sidecar._core import Arena, Geometry
geometry = Geometry(layers=1, kv_heads=1, head_dim=32, dtype_bytes=4, block_bytes=4096, chunks=2)
page = Arena.create(geometry, reserved_chunks=0).page
threading.Thread(target=lambda: (page, time.sleep(60)), daemon=True).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


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
    monkeypatch.setattr("windrow_lab.finetune.local_job.SILENT_AFTER_S", 2.0)
    process = worker(code)
    (told,) = listen(process, 1, lambda n, told: None)
    assert (told.step, told.ended, told.died) == (1, "", how)
    process.communicate()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_asks_the_command_to_stop_asks_its_worker(number, early):
    before = signal.getsignal(number)
    with _passed_on() as asked:
        if early:  # the worker is not there yet
            os.kill(os.getpid(), number)
        with subprocess.Popen(["sleep", "600"]) as process, asked.to(process):
            if not early:
                os.kill(os.getpid(), number)
            assert process.wait(timeout=60) == -signal.SIGTERM
        assert asked.came
    assert signal.getsignal(number) is before


def test_what_went_wrong_on_the_way_to_a_success_is_in_the_result(tmp_path):
    job = LocalJob(tmp_path / "j.yaml", "j", tmp_path, tmp_path, SPEC)
    lost = event(kind="WARNED", detail="the checkpoint of step 5 is not written")
    told = after(progress(total_steps=9, step=9), lost, event(kind="SUCCEEDED", adapter_path="/o"))
    result = _result(job, told, 1.0, tmp_path / "worker.log")
    assert result["state"] == "Succeeded"
    assert result["notes"][-1] == "the checkpoint of step 5 is not written"


def test_a_report_that_cannot_be_written_leaves_a_success_a_success(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    (tmp_path / "report.html").mkdir()
    job = LocalJob(tmp_path / "j.yaml", "j", tmp_path, tmp_path, SPEC)
    told = after(progress(total_steps=1, step=1), event(kind="SUCCEEDED", adapter_path="/out"))
    result = _result(job, told, 1.0, tmp_path / "worker.log")
    assert (result["state"], result["adapter"], result["report"]) == ("Succeeded", "/out", "")
    assert "the report cannot be written" in result["report_problem"]


def metrics_of(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_step_that_ran_twice_is_drawn_once(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.9},
        {"step": 2, "loss": 2.8},
        {"step": 2, "eval_loss": 2.7, "stage": "held-out"},
    ]
    metrics_of(tmp_path, lines)
    assert [line.get("loss") for line in read_metrics(tmp_path)] == [3.0, 2.8, None]
    page = write_curves(tmp_path, "j", "").read_text()
    assert page.count("<title>step 2: 2.8</title>") == 1
    assert "step 2: 2.9" not in page
    assert "held-out rows" in page


def test_the_page_needs_no_network_and_says_what_is_written_as_it_is(tmp_path):
    metrics_of(tmp_path, [{"step": 1, "loss": 3.0}])
    facts = Table("Outcome", [("State", "<b>")])
    page = write_curves(tmp_path, "a <job>", "x & y", notes=["<i>"], facts=[facts]).read_text()
    for written in ("a &lt;job&gt;", "x &amp; y", "<li>&lt;i&gt;</li>", "<td>&lt;b&gt;</td>"):
        assert written in page
    assert "http" not in page
    assert "<script" not in page


def test_a_page_of_many_steps_is_small_and_keeps_the_extremes(tmp_path):
    def loss(step):
        return 99.0 if step == 7777 else 1 + 1 / step

    points = [(step, loss(step)) for step in range(1, 100_001)]
    kept = thinned(points)
    assert len(kept) <= 800
    assert (7777, 99.0) in kept
    assert kept == sorted(kept)
    figures = ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "memory_bytes")
    metrics_of(tmp_path, [{"step": n, **dict.fromkeys(figures, y)} for n, y in points[:20_000]])
    assert write_curves(tmp_path, "j", "").stat().st_size < 300_000


def test_figures_that_are_not_there_or_not_finite_leave_a_dash(tmp_path):
    nan = float("nan")
    metrics_of(tmp_path, [{"step": 0, "eval_loss": 2.0, "stage": "base"}, {"step": 1, "loss": nan}])
    page = write_curves(tmp_path, "j", "").read_text()
    assert "<title>step 0: 2</title>" in page
    assert page.count("- (no step ran)") == 4
    assert "nan" not in page


def test_figures_have_units_for_people():
    assert [of_bytes(n) for n in (0, 1023, 2**20, 1.5 * 2**40)] == [
        *("0 B", "1023 B", "1 MiB", "1.5 TiB")
    ]
    assert [of_seconds(s) for s in (0.04, 59.9, 61, 3600, 18_120)] == [
        *("0.0 s", "59.9 s", "1 min 01 s", "1 h 00 min", "5 h 02 min")
    ]
    assert flat({"a": 1, "b": {"c": True, "d": "x"}}) == [("a", "1"), ("b.c", "true"), ("b.d", "x")]


def test_a_job_without_figures_has_no_curves(tmp_path):
    assert read_metrics(tmp_path) == []


def test_in_a_narrow_terminal_a_bar_has_room_beside_the_figures():
    seconds = iter((0.0, 10.0, 10.0))
    pace = Pace(lambda: next(seconds))
    told = RunSummary(step=0, total_steps=1200, loss=2.5, learning_rate=1e-3, gradient_norm=0.4)
    pace.see(told)
    told = replace(told, step=1000, tokens=123_450)
    short, whole = (_state(told, pace, short=short) for short in (True, False))
    assert short == "step 1000/1200, loss 2.500, 12,345 tokens/s, 2 s left"
    assert len(short) < 60
    assert "lr 1.00e-03, grad norm 0.4" in whole
