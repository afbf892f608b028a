"""Check what a sidecar says, and what the operator then knows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from windrow.proto import attach_pb2 as pb
from windrow_operator import reports
from windrow_operator.cluster_state import ClusterState
from windrow_operator.model import Pod, RunState
from windrow_operator.slot_table import capacity_refusal

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)
POD = Pod("team", "decode-0", "pod-1", node="n")
KEY = "team/decode-0"


def job_body(version=1, epoch=1, slot=KEY):
    return {
        "metadata": {
            "namespace": "team",
            "name": "tone",
            "uid": "u",
            "resourceVersion": str(version),
            "generation": 1,
            "creationTimestamp": "2025-01-01T00:00:00Z",
        },
        "spec": {},
        "status": {"epoch": epoch, "slot": slot},
    }


@pytest.fixture
def cluster():
    cluster = ClusterState(NOW)
    cluster.put_job(job_body())
    return cluster


def hello(*running):
    return pb.SidecarHello(slots=[pb.SlotFacts(index=0, chunks=8)], running=running)


def running(epoch=1, **progress):
    return pb.RunningJob(slot=0, job_uid="u", epoch=epoch, progress=pb.Progress(**progress))


def event(kind, epoch=1, **fields):
    return pb.JobEvent(kind=pb.JobEvent.Kind.Value(kind), job_uid="u", epoch=epoch, **fields)


def test_a_job_that_the_hello_names_is_adopted(cluster):
    assert reports.take_hello(cluster, POD, hello(running(total_steps=9)), NOW, first=True) == []
    assert cluster.runs["u"].state is RunState.RUNNING


def test_an_epoch_that_is_over_is_ended(cluster):
    (command,) = reports.take_hello(cluster, POD, hello(running(epoch=7)), NOW, first=True)
    assert (command.action, command.epoch) == (pb.JobCommand.ABORT, 7)
    assert "u" not in cluster.runs


def test_a_loss_of_zero_is_a_loss_and_one_that_is_not_said_stays_known(cluster):
    cluster.assign("u", 1, KEY, NOW)
    said = event("EVALUATED", base_eval_loss=3.0, tuned_eval_loss=0.0)
    reports.take_event(cluster, [KEY], said, NOW)
    reports.take_event(cluster, [KEY], event("SUCCEEDED", adapter_path="/a"), NOW)
    assert (cluster.runs["u"].base_loss, cluster.runs["u"].tuned_loss) == (3.0, 0.0)


def test_a_sidecar_that_came_anew_takes_no_job_before_its_engine_has_called(cluster):
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    serving = pb.SlotHeartbeat(engine_state="serving")
    reports.take_heartbeat(cluster, cluster.slots[KEY], serving, NOW)
    reports.detach(cluster, POD, NOW)
    # Another process in its place: it knows of no engine, and would refuse a job.
    reports.take_hello(cluster, POD, pb.SidecarHello(), NOW, first=True)
    assert capacity_refusal(cluster.slot_views(NOW)[KEY]) == "has an engine that is starting"
    reports.take_hello(cluster, POD, hello(), NOW, first=False)
    reports.take_heartbeat(cluster, cluster.slots[KEY], serving, NOW)
    assert not capacity_refusal(cluster.slot_views(NOW)[KEY])


def test_a_sidecar_that_dials_again_takes_jobs_at_once(cluster):
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    beat = pb.SlotHeartbeat(engine_state="serving")
    reports.take_heartbeat(cluster, cluster.slots[KEY], beat, NOW)
    reports.detach(cluster, POD, NOW)
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    assert not capacity_refusal(cluster.slot_views(NOW)[KEY])


def test_a_slot_whose_heartbeats_cease_while_its_stream_lives_is_silent(cluster):
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    live = cluster.slots[KEY]
    assert not cluster.slot_views(NOW + timedelta(minutes=1))[KEY].silent  # none has come yet
    reports.take_heartbeat(cluster, live, pb.SlotHeartbeat(batch=3), NOW)
    assert live.current_beat(NOW + timedelta(seconds=10)).batch == 3
    assert live.current_beat(NOW + timedelta(seconds=11)) is None
    assert cluster.slot_views(NOW + timedelta(seconds=11))[KEY].silent


def test_a_placement_that_the_first_hello_does_not_name_is_lost(cluster):
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    cluster.assign("u", 1, KEY, NOW)
    reports.take_hello(cluster, POD, hello(), NOW, first=False)
    assert cluster.runs["u"].state is RunState.ASSIGNED
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    assert cluster.runs["u"].state is RunState.LOST


def test_a_job_whose_end_was_told_holds_no_slot_though_the_last_heartbeat_names_it(cluster):
    reports.take_hello(cluster, POD, hello(running(total_steps=9)), NOW, first=True)
    beat = pb.SlotHeartbeat(engine_state="serving", jobs=[running(total_steps=9)])
    reports.take_heartbeat(cluster, cluster.slots[KEY], beat, NOW)
    body = cluster.jobs["u"]
    reports.take_event(cluster, [KEY], event("STOPPED"), NOW)
    unplaced = {**body, "status": {"epoch": 1}}
    cluster.put_job(unplaced)
    assert cluster.slot_views(NOW)[KEY].holders == ()


def test_a_worker_that_vanishes_from_the_heartbeats_is_lost(cluster):
    reports.take_hello(cluster, POD, hello(running(total_steps=9)), NOW, first=True)
    live = cluster.slots[KEY]
    quiet = pb.SlotHeartbeat(slot=0, engine_state="serving")
    reports.take_heartbeat(cluster, live, quiet, NOW + timedelta(seconds=9))
    assert cluster.runs["u"].state is RunState.RUNNING
    reports.take_heartbeat(cluster, live, quiet, NOW + timedelta(seconds=11))
    assert cluster.runs["u"].state is RunState.LOST


def test_jobs_that_share_a_slot_are_reported_and_lost_each_for_itself(cluster):
    other = job_body()
    other["metadata"] |= {"uid": "v", "name": "code"}
    cluster.put_job(other)
    both = [running(total_steps=9), pb.RunningJob(slot=0, job_uid="v", epoch=1)]
    reports.take_hello(cluster, POD, hello(*both), NOW, first=True)
    assert [h.name for h in cluster.slot_views(NOW)[KEY].holders] == ["team/code", "team/tone"]
    for second in range(1, 12):
        beat = pb.SlotHeartbeat(slot=0, engine_state="serving", job=both[0], jobs=both[:1])
        reports.take_heartbeat(cluster, cluster.slots[KEY], beat, NOW + timedelta(seconds=second))
    assert cluster.runs["u"].state is RunState.RUNNING
    assert cluster.runs["v"].state is RunState.LOST


def test_the_last_word_of_a_placement_stands(cluster):
    reports.take_hello(cluster, POD, hello(running(total_steps=9)), NOW, first=True)
    reports.take_event(cluster, [KEY], event("SUCCEEDED", adapter_path="/a"), NOW)
    reports.take_event(cluster, [KEY], event("FAILED", reason="WorkerDied"), NOW)
    beat = pb.SlotHeartbeat(slot=0, job=running(step=1, total_steps=9))
    reports.take_heartbeat(cluster, cluster.slots[KEY], beat, NOW)
    assert cluster.runs["u"].state is RunState.SUCCEEDED


def test_a_worker_of_an_old_epoch_is_ended_when_a_heartbeat_names_it(cluster):
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    beat = pb.SlotHeartbeat(slot=0, jobs=[running(epoch=0)])
    (command,) = reports.take_heartbeat(cluster, cluster.slots[KEY], beat, NOW)
    assert (command.action, command.epoch) == (pb.JobCommand.ABORT, 0)


def test_a_sidecar_cannot_speak_for_a_slot_of_another_pod(cluster):
    reports.take_event(cluster, ["team/decode-9"], event("SUCCEEDED"), NOW)
    assert "u" not in cluster.runs


def test_a_resumed_worker_says_so_and_later_words_do_not_change_that(cluster):
    reports.take_hello(cluster, POD, hello(), NOW, first=True)
    cluster.assign("u", 1, KEY, NOW)
    started = event("STARTED", reason="Resumed", detail="from step 20")
    reports.take_event(cluster, [KEY], started, NOW)
    reports.take_event(cluster, [KEY], event("PAUSED", detail="burst"), NOW)
    run = cluster.runs["u"]
    assert (run.resumed, run.started, run.detail) == (True, "from step 20", "burst")


def test_a_new_pod_of_the_same_name_is_another_slot(cluster):
    reports.take_hello(cluster, POD, hello(running(total_steps=9)), NOW, first=True)
    new = Pod("team", "decode-0", "pod-2")
    reports.take_hello(cluster, new, hello(), NOW, first=True)
    assert cluster.slots[KEY].pod_uid == "pod-2"
    assert cluster.runs["u"].state is RunState.LOST


def test_a_watch_that_lags_behind_a_write_cannot_undo_it(cluster):
    cluster.put_job(job_body(version=9, epoch=2))
    cluster.put_job(job_body(version=8, epoch=1))
    assert cluster.expects("u", 2, KEY)


def test_a_warning_about_checkpoints_stands_until_one_is_written_and_changes_nothing_else(cluster):
    reports.take_hello(cluster, POD, hello(running(total_steps=9)), NOW, first=True)
    reports.take_event(cluster, [KEY], event("STARTED", detail="from the beginning"), NOW)
    before = cluster.runs["u"]
    reports.take_event(cluster, [KEY], event("WARNED", reason="DiskFull", detail="no room"), NOW)
    assert cluster.runs["u"].trouble == ("DiskFull", "no room")
    reports.take_event(
        cluster, [KEY], event("WARNED", reason="TrackingFailed", detail="mlflow: no"), NOW
    )
    assert cluster.runs["u"].trouble == ("DiskFull", "no room")
    assert cluster.runs["u"].tracking == ("TrackingFailed", "mlflow: no")
    assert (cluster.runs["u"].state, cluster.runs["u"].detail) == (before.state, before.detail)
    reports.take_event(cluster, [KEY], event("CHECKPOINTED", detail="/c5"), NOW)
    assert cluster.runs["u"].trouble == ("", "/c5")
