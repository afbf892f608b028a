"""A real worker process under a real arena and page; the test plays decode and the agent."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from worker_pod import (
    CHUNKS,
    MODEL,
    UID,
    Pod,
    layers_of_model,
    lend_what_is_wanted,
    until,
    weights_bytes,
)

from windrow.eventlog import LossEvent, TaskletEvent, read_events
from windrow.protocol import Ending
from windrow_sidecar.finetune.colocated.grants import ASK_AFTER_SILENCE_NS

pytestmark = pytest.mark.paired


@pytest.fixture
def pod(tmp_path_factory):
    pod = Pod(tmp_path_factory.mktemp("p"))
    yield pod
    pod.close()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_job_runs_to_its_adapter_and_gives_everything_back(pod):
    worker = pod.start()
    assert until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=worker)
    pod.decode.go()
    wanted = lend_what_is_wanted(pod, worker)
    until(lambda: pod.decode.offer.held_chunks == wanted, pod=pod, worker=worker)
    until(lambda: worker.poll() is not None, pod=pod)
    assert worker.returncode == Ending.SUCCEEDED, pod.logs()

    kinds = pod.agent.kinds()
    assert kinds[0] == "STARTED"
    assert kinds[-1] == "SUCCEEDED"
    last = pod.agent.events[-1]
    assert last.tuned_eval_loss < last.base_eval_loss
    assert pod.agent.progress[-1].step == 4
    assert pod.agent.progress[-1].checkpoint_step == 4
    assert pod.decode.arena.counts()[2] == 0
    pod.decode.arena.check()
    assert pod.decode.offer.job_epoch == 0
    assert not list(pod.out.rglob("step-*")), "nobody can go on from its checkpoints"

    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(base, last.adapter_path)
    assert tuned.peft_config["default"].base_model_name_or_path == str(MODEL)

    events = [e for _, e in read_events(pod.root)]
    steps = [e for e in events if isinstance(e, TaskletEvent) and e.phase == "opt"]
    assert [e.tokens_done for e in steps][-1] == pod.agent.progress[-1].tokens
    stages = [e.stage for e in events if isinstance(e, LossEvent)]
    assert stages == ["base", *["training"] * 4, "tuned"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A pod whose worker has a job without an end; each test finds it at work."""
    pod = Pod(tmp_path_factory.mktemp("p"))
    pod.worker = pod.start(maxSteps=100_000)
    until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=pod.worker)
    yield pod
    pod.close()


@pytest.fixture
def at_work(running):
    """The running pod, granted and with all the memory that its worker wants."""
    decode = running.decode
    decode.go()
    held = decode.arena.counts()[2]
    wanted = until(lambda: decode.offer.wanted_chunks, pod=running, worker=running.worker)
    decode.arena.lend(max(0, wanted - held), owner=1)
    yield running
    decode.pause()  # the workers of other tests load on the core on which it trains


def test_decodes_weights_are_not_loaded_a_second_time(running):
    smaps = Path("/proc", str(running.worker.pid), "smaps").read_text()
    mapped = re.findall(
        r"windrow-weights.*?\nSize: +(\d+) kB.*?\nPrivate_Dirty: +(\d+) kB", smaps, re.S
    )
    assert [(int(size) * 1024 >= weights_bytes(), int(dirty)) for size, dirty in mapped] == [
        (True, 0)
    ]


def test_without_a_grant_nothing_runs(running):
    running.decode.pause()
    epoch = running.decode.grant.pause_epoch
    offer = until(
        lambda: (o := running.decode.offer).pause_epoch_seen == epoch and not o.in_flight_us and o,
        pod=running,
        worker=running.worker,
    )
    beats = running.decode.page.read_offer()[-1]
    until(lambda: running.decode.page.read_offer()[-1] > beats, pod=running, worker=running.worker)
    assert running.decode.offer.tasklet_id == offer.tasklet_id


def test_a_pause_is_seen_within_a_tasklet_and_the_worker_goes_on_after_it(at_work):
    pod, worker = at_work, at_work.worker
    until(lambda: pod.decode.offer.tokens_done, pod=pod, worker=worker)
    pod.agent.events.clear()
    pod.decode.pause()
    epoch = pod.decode.grant.pause_epoch
    quiet = until(
        lambda: (o := pod.decode.offer).pause_epoch_seen == epoch and not o.in_flight_us and o,
        within=5,
        pod=pod,
        worker=worker,
    )
    until(lambda: "PAUSED" in pod.agent.kinds(), pod=pod, worker=worker)
    assert pod.decode.offer.tasklet_id == quiet.tasklet_id
    assert quiet.resident_layers == layers_of_model()
    pod.decode.go()
    until(lambda: pod.decode.offer.tasklet_id > quiet.tasklet_id, pod=pod, worker=worker)
    until(lambda: "RESUMED" in pod.agent.kinds(), pod=pod, worker=worker)


def test_a_worker_waits_for_a_decode_that_is_silent_but_alive(at_work):
    decode, worker = at_work.decode, at_work.worker
    decode.silent = True
    far = 2 * ASK_AFTER_SILENCE_NS
    until(lambda: decode.page.heartbeat_age_ns(0) > far, pod=at_work, worker=worker)
    done, decode.silent = decode.offer.tokens_done, False
    decode.go()
    until(lambda: decode.offer.tokens_done > done, pod=at_work, worker=worker)


def test_only_the_granted_number_of_tasklets_runs(at_work):
    decode, worker = at_work.decode, at_work.worker
    decode.pause()
    epoch = decode.grant.pause_epoch
    until(lambda: decode.offer.pause_epoch_seen == epoch, pod=at_work, worker=worker)
    first = decode.offer.tasklet_id
    for granted in (3, 2):
        decode.go(n_tasklets=granted)
        first += granted
        until(
            lambda upto=first: (o := decode.offer).tasklet_id == upto and not o.in_flight_us,
            pod=at_work,
            worker=worker,
        )


def test_revoked_chunks_come_back_while_the_job_goes_on(at_work):
    pod, worker, arena = at_work, at_work.worker, at_work.decode.arena
    for _ in range(5):
        done = pod.decode.offer.tokens_done
        until(lambda done=done: pod.decode.offer.tokens_done > done, pod=pod, worker=worker)
        arena.revoke(CHUNKS)
        until(lambda: arena.counts()[4] == 0, within=5, pod=pod, worker=worker)
        assert arena.counts()[2] == 0
        until(lambda: pod.decode.offer.starving, pod=pod, worker=worker)
        arena.check()
        wanted = pod.decode.offer.wanted_chunks
        arena.lend(wanted, owner=1)


def test_a_worker_of_a_higher_epoch_resumes_and_the_one_before_writes_nothing_more(pod):
    first = pod.start(maxSteps=1000)
    until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=first)
    pod.decode.go()
    lend_what_is_wanted(pod, first)
    until(lambda: "CHECKPOINTED" in pod.agent.kinds(), pod=pod, worker=first)

    # Meanwhile the first leaves the core to it, on which both load and train.
    pod.decode.pause()
    second = pod.start(epoch=2, maxSteps=1000)
    until(lambda: len(pod.agent.hellos) == 2, pod=pod, worker=second)
    pod.decode.go()
    assert first.wait(60) == Ending.FENCED
    assert pod.decode.arena.counts()[2] == 0
    until(lambda: pod.agent.kinds().count("STARTED") == 2, pod=pod, worker=second)
    started = [e for e in pod.agent.events if e.kind == "STARTED"][-1]
    assert started.reason == "Resumed"
    assert any(e.reason == "Fenced" for e in pod.agent.events if e.kind == "FAILED")
    second.send_signal(signal.SIGTERM)
    assert second.wait(60) == Ending.STOPPED


def test_the_end_of_decode_is_survived_by_a_checkpoint(pod):
    worker = pod.start(maxSteps=1000)
    until(lambda: pod.decode.offer.job_epoch == 1, pod=pod, worker=worker)
    pod.decode.go()
    lend_what_is_wanted(pod, worker)
    until(lambda: pod.decode.offer.tokens_done, pod=pod, worker=worker)
    pod.decode.close()
    assert worker.wait(30) == Ending.DECODE_GONE, pod.logs()
    until(lambda: "STOPPED" in pod.agent.kinds(), pod=pod)
    assert pod.agent.events[-1].reason == "SlotLost"


def test_a_link_to_another_jobs_directory_is_refused_and_nothing_is_written(pod):
    worker = pod.start()
    folder = pod.run_dir.job_dir(UID)
    other, link = pod.root / "volume" / "other", pod.root / "volume" / "tone"
    other.mkdir(parents=True)
    link.symlink_to(other)
    job = json.loads((folder / "job.json").read_text())
    job["spec"]["output"]["destination"] = str(link)
    job["outputs"] = [str(pod.root / "volume")]
    (folder / "job.json").write_text(json.dumps(job))
    assert worker.wait(60) == Ending.USER_ERROR, pod.logs()
    until(lambda: pod.agent.events, pod=pod)
    event = pod.agent.events[-1]
    assert (event.user_error, event.reason) == (True, "OutputNotWritable")
    assert f"leads by a link to {other}" in event.detail
    assert list(other.iterdir()) == []


def test_a_template_that_computes_in_one_call_ends_no_worker_and_names_the_row(pod):
    """The rows of the first job, too, are read by a process that can be ended."""
    model, write = pod.root / "power", pod.write_job
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text("{{ 7 ** (10 ** 8) }}")

    def of_model(*args, **fields):
        out = write(*args, **fields)
        file = pod.run_dir.job_dir(UID) / "job.json"
        job = json.loads(file.read_text())
        job["spec"]["model"]["name"] = str(model)
        file.write_text(json.dumps(job))
        return out

    pod.write_job = of_model
    code = (
        "import sys; from windrow_sidecar.finetune import worker; "
        "from windrow_sidecar.finetune.data import rendering; "
        "rendering._RENDER_CPU_S = 1.0; sys.exit(worker.main())"
    )
    about = ["--run-dir", str(pod.root), "--job-uid", UID, "--epoch", "1"]
    worker = pod.start_by([sys.executable, "-c", code, *about])
    assert worker.wait(120) == Ending.USER_ERROR, pod.logs()
    until(lambda: pod.agent.events, pod=pod)
    event = pod.agent.events[-1]
    assert (event.user_error, event.reason) == (True, "DatasetInvalid")
    assert event.field.endswith("train.jsonl:1")
    assert "the chat template computes for more than 1 s" in event.detail


def test_bad_input_is_a_failure_that_names_the_field(pod):
    worker = pod.start()
    folder = pod.run_dir.job_dir(UID)
    job = json.loads((folder / "job.json").read_text())
    job["spec"]["dataset"]["source"] = str(pod.root / "rows.jsonl")
    (pod.root / "rows.jsonl").write_text('{"messages": []}\n')
    (folder / "job.json").write_text(json.dumps(job))
    assert worker.wait(60) == Ending.USER_ERROR, pod.logs()
    until(lambda: pod.agent.events, pod=pod)
    event = pod.agent.events[-1]
    assert event.user_error
    assert event.reason == "DatasetInvalid"
    assert "rows.jsonl:1" in event.detail
    assert event.field.endswith("rows.jsonl:1")
    assert event.remedy
    assert event.detail.endswith(event.remedy)
