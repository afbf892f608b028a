"""Jobs, the operator and a sidecar, on a real API server."""

import asyncio
import json
import signal
import time

import grpc
import pytest
from kubernetes import client
from operator_process import running
from waiting import DEADLINE_SECONDS, wait_until

from windrow.proto import attach_pb2 as pb
from windrow.rundir import profile_file

AT_ONCE = 400  # connections


@pytest.fixture
def placed(cluster):
    """A job that is on its way to a sidecar: (cluster, sidecar, assignment)."""
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job()
    return cluster, sidecar, sidecar.next("assign")


def start(sidecar, assigned, **progress):
    sidecar.report(assigned, "STARTED")
    sidecar.beat(running(assigned, **{"step": 1, "total_steps": 100, "loss": 3.5, **progress}))


def own_folder(cluster, assigned, step):
    """Return where a checkpoint is, whatever the sidecar says of its folder."""
    own = f"/out/{cluster.namespace}/tone/.windrow/{assigned.job_uid}"
    return f"{own}/checkpoints/step-{step:08d}-00000"


def test_a_job_runs_from_placement_to_its_adapter(placed):
    cluster, sidecar, assigned = placed
    status = cluster.status()
    assert (assigned.epoch, status["epoch"], status["state"]) == (1, 1, "Placed")
    assert "decode-0 predicts 9.6k tok/s" in cluster.condition("Placed")["message"]

    start(sidecar, assigned)
    cluster.await_state("Running")
    sidecar.beat(
        running(
            assigned,
            step=40,
            total_steps=100,
            loss=2.25,
            tokens_per_second=9840,
            tokens=4000,
            eta_seconds=72,
            checkpoint_step=25,
            checkpoint_path="/said/step-00000025-00000",
        )
    )
    wait_until(lambda: cluster.status().get("step") == "40/100", "progress in the status")
    status = cluster.status()
    assert (status["loss"], status["eta"]) == ("2.250", "1m12s")
    assert status["checkpoint"] == {"step": 25, "path": own_folder(cluster, assigned, 25)}

    sidecar.report(assigned, "EVALUATED", base_eval_loss=3.0, tuned_eval_loss=2.0)
    sidecar.report(assigned, "SUCCEEDED", adapter_path="/out/tone")
    status = cluster.await_state("Succeeded")
    assert status["adapter"] == {"path": f"/out/{cluster.namespace}/tone"}
    assert status["evaluation"] == {"baseLoss": 3.0, "tunedLoss": 2.0}
    assert "slot" not in status
    wait_until(
        lambda: not cluster.get("finetunejobs", "tone")["metadata"].get("finalizers"),
        "no finalizer is left",
    )


def test_what_a_worker_says_of_its_checkpoints_is_a_condition_and_an_event(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")
    why = "the checkpoint of step 5 is not written, there is none yet: No space left on device"
    sidecar.report(assigned, "WARNED", reason="DiskFull", detail=why)
    said = wait_until(lambda: cluster.condition("Checkpointed"), "a condition")
    assert (said["status"], said["reason"], said["message"]) == ("False", "DiskFull", why)
    assert cluster.status()["state"] == "Running"

    def events():
        found = cluster.core.list_namespaced_event(cluster.namespace).items
        return [e for e in found if e.reason == "DiskFull" and e.involved_object.name == "tone"]

    (event,) = wait_until(events, "an event")
    assert (event.type, event.message) == ("Warning", why)
    sidecar.report(assigned, "CHECKPOINTED", detail="/c6")
    wait_until(lambda: cluster.condition("Checkpointed")["status"] == "True", "written again")


def test_a_sidecar_is_told_its_policy_and_shows_as_a_slot(cluster):
    sidecar = cluster.attach(cluster.pod())
    assert sidecar.next("hello").protocol_version == 1
    assert sidecar.next("policy").mode == "off"
    cluster.policy()
    config = sidecar.next("policy", what=lambda config: config.mode == "harvest")
    assert (config.name, config.objective_seconds, config.percentile) == ("chat", 0.04, 99)
    sidecar.beat(tpot_p99_seconds=0.0151, decode_units=1, finetune_units=1, chunks_lent=8)

    def shown():
        slots = cluster.custom.list_namespaced_custom_object(
            "windrow.dev", "v1alpha1", cluster.namespace, "harvestslots"
        )["items"]
        return [s for s in slots if s.get("status", {}).get("tpotP99") == "15.1ms"]

    (slot,) = wait_until(shown, "a HarvestSlot with the reported figures")
    status = slot["status"]
    assert (status["objective"], status["decode"], status["lent"]) == ("40ms", "1/2", "8/128")
    assert slot["metadata"]["ownerReferences"][0]["name"] == "decode-0"
    wait_until(
        lambda: (cluster.get("harvestpolicies", "chat").get("status") or {}).get("slots") == 1,
        "the policy counts its slot",
    )


def lost(cluster):
    """Return the events that say that the job has lost its slot; its condition soon says more."""
    events = cluster.core.list_namespaced_event(cluster.namespace).items
    return [e for e in events if e.reason == "SlotLost" and e.involved_object.name == "tone"]


def test_a_sidecar_that_falls_silent_loses_its_job_though_its_stream_stays(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")
    began = time.monotonic()
    sidecar.fall_silent()
    wait_until(lambda: lost(cluster), "the slot is lost")
    assert time.monotonic() - began < 30
    assert sidecar.error is None or sidecar.error.code() is not grpc.StatusCode.OK


def test_a_pod_that_is_gone_loses_its_job_though_its_sidecar_still_speaks(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")
    cluster.core.delete_namespaced_pod("decode-0", cluster.namespace, grace_period_seconds=0)
    wait_until(lambda: lost(cluster), "the slot is lost")
    cluster.await_state("Pending")


def test_a_job_of_higher_priority_gets_the_slot_after_a_checkpoint(placed, urgent):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned, checkpoint_step=5, checkpoint_path="/said/step-00000005-00000")
    cluster.await_state("Running")
    cluster.job("at-once", priorityClassName=urgent)
    stop = sidecar.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    assert (stop.job_uid, "of higher priority" in stop.reason) == (assigned.job_uid, True)
    sidecar.report(
        assigned,
        "STOPPED",
        progress=pb.Progress(
            step=6, checkpoint_step=6, checkpoint_path="/said/step-00000006-00000"
        ),
    )
    second = sidecar.next("assign")
    assert second.job_name == "at-once"
    wait_until(lambda: cluster.condition("Evicted").get("reason") == "Preempted", "it is told why")
    status = cluster.status()
    assert status["checkpoint"] == {"step": 6, "path": own_folder(cluster, assigned, 6)}
    assert status["evictions"] == [{"reason": "Preempted", "count": 1}]
    # Only one gives way, and the first waits for its slot to be free again.
    sidecar.report(second, "SUCCEEDED", adapter_path="/a")
    again = sidecar.next("assign")
    assert (again.job_name, again.epoch) == ("tone", 2)


def test_a_job_that_names_its_policies_is_placed_under_no_other(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job(policies=["other"])
    wait_until(
        lambda: (
            "which spec.policies does not name" in cluster.condition("Placed").get("message", "")
        ),
        "the job says why it waits",
    )
    cluster.job("tone-2", policies=["chat"])
    assert sidecar.next("assign").job_name == "tone-2"


def test_a_queue_controller_holds_a_job_releases_it_and_takes_it_back(cluster):
    """Suspend and resume as Kueue's external integrations do: by `spec.suspend` alone."""
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job(suspend=True)  # held from its creation
    wait_until(lambda: cluster.condition("Suspended").get("status") == "True", "it is held")
    assert "epoch" not in cluster.status()

    cluster.patch_job(suspend=False)  # admitted
    assigned = sidecar.next("assign")
    start(sidecar, assigned)
    cluster.await_state("Running")

    cluster.patch_job(suspend=True)  # evicted
    sidecar.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    sidecar.report(
        assigned,
        "STOPPED",
        progress=pb.Progress(
            step=6, checkpoint_step=6, checkpoint_path="/said/step-00000006-00000"
        ),
    )
    cluster.await_state("Suspended")
    evicted = cluster.condition("Evicted")
    assert (evicted["status"], evicted["reason"]) == ("True", "Suspended")
    assert "slot" not in cluster.status()  # so that the reservation can be given back

    cluster.patch_job(suspend=False)  # admitted again
    assert sidecar.next("assign").epoch == 2
    wait_until(lambda: cluster.condition("Evicted")["status"] == "False", "it has a slot again")


def test_a_job_that_another_controller_manages_is_not_touched(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job("theirs", managedBy="kueue.x-k8s.io/multikueue")
    cluster.job("ours")
    assert sidecar.next("assign").job_name == "ours"
    body = cluster.get("finetunejobs", "theirs")
    assert not body.get("status")
    assert not body["metadata"].get("finalizers")


def test_the_figures_of_a_slot_go_when_its_sidecar_does(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.next("policy", what=lambda config: config.mode == "harvest")
    sidecar.beat(tpot_p99_seconds=0.0151, steps=70, decode_units=1, chunks_lent=8)

    def slot():
        found = cluster.custom.list_namespaced_custom_object(
            "windrow.dev", "v1alpha1", cluster.namespace, "harvestslots"
        )["items"]
        return found[0]["status"] if found and "status" in found[0] else {}

    def ready():
        return {c["type"]: c["status"] for c in slot().get("conditions", ())}.get("Ready")

    wait_until(lambda: slot().get("tpotP99") == "15.1ms", "the figures")
    wait_until(lambda: ready() == "True", "a slot that is ready")
    sidecar.close()
    wait_until(lambda: ready() == "False", "a slot that is not ready")
    figures = {"tpotP99", "tpotP99Seconds", "steps", "decode", "chunks", "lent", "engineState"}
    assert not figures & slot().keys()
    assert slot()["lastHeartbeatTime"]


def test_a_policy_that_selects_no_pod_says_so(cluster):
    cluster.policy(selector={"matchLabels": {"app": "nobody"}})
    held = wait_until(
        lambda: (cluster.get("harvestpolicies", "chat").get("status") or {}).get("conditions"),
        "conditions",
    )
    assert {c["type"]: c["reason"] for c in held} == {"Accepted": "Valid", "SelectsPods": "NoPods"}


def test_a_suspended_job_stops_with_a_checkpoint_and_resumes(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")

    cluster.patch_job(suspend=True)
    command = sidecar.next("command")
    assert (command.action, command.epoch) == (command.STOP, 1)
    sidecar.report(
        assigned,
        "STOPPED",
        progress={
            "step": 7,
            "total_steps": 100,
            "checkpoint_step": 7,
            "checkpoint_path": "/said/step-00000007-00000",
        },
    )
    sidecar.beat()
    status = cluster.await_state("Suspended")
    assert status["checkpoint"] == {"step": 7, "path": own_folder(cluster, assigned, 7)}

    cluster.patch_job(suspend=False)
    again = sidecar.next("assign")
    assert (again.job_uid, again.epoch) == (assigned.job_uid, 2)
    assert cluster.condition("Suspended")["status"] == "False"


def test_a_job_deleted_while_running_stops_before_it_goes(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")
    cluster.delete_job()
    assert sidecar.next("command").action == pb.JobCommand.STOP
    assert cluster.has_job()
    sidecar.report(assigned, "STOPPED")
    wait_until(lambda: not cluster.has_job(), "the job is gone")


def test_a_deleted_job_goes_even_if_the_worker_never_answers(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")
    cluster.delete_job()
    wait_until(lambda: not cluster.has_job(), "the job is gone")
    assert sidecar.next("command", what=lambda c: c.action == c.ABORT).epoch == 1


def test_a_restarted_operator_adopts_the_job_that_runs(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")
    pod = cluster.core.read_namespaced_pod("decode-0", cluster.namespace)
    sidecar.close()

    cluster.operator.end(signal.SIGKILL)
    cluster.operator.start()
    now = running(assigned, step=60, total_steps=100, loss=2.0)
    again = cluster.attach(pod, running=[now])
    again.beat(now)
    wait_until(lambda: cluster.status().get("step") == "60/100", "progress of the adopted job")
    assert cluster.status()["epoch"] == 1
    again.report(assigned, "SUCCEEDED", adapter_path="/out/tone")
    cluster.await_state("Succeeded")
    assert all(message.WhichOneof("message") not in ("assign", "command") for message in again.told)


def test_a_job_whose_assignment_was_lost_is_placed_again_under_a_new_epoch(placed):
    cluster, sidecar, _ = placed
    pod = cluster.core.read_namespaced_pod("decode-0", cluster.namespace)
    sidecar.close()
    again = cluster.attach(pod)
    again.beat()
    assert again.next("assign").epoch == 2


def test_a_stale_epoch_that_runs_is_aborted_and_what_is_told_of_it_does_not_count(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")
    old = pb.Assign(job_uid=assigned.job_uid, epoch=0)
    # As a sidecar that dials again sends what it sent before.
    sidecar.report(old, "STARTED")
    sidecar.report(old, "SUCCEEDED", adapter_path="/stale")
    now = running(assigned, step=70, total_steps=100, loss=2.0)
    sidecar.beat(now)
    wait_until(lambda: cluster.status().get("step") == "70/100", "what was said after it")
    assert all(message.WhichOneof("message") != "command" for message in sidecar.told)
    now.progress.joined_with = 2
    sidecar.beat(jobs=[now, running(old)])
    command = sidecar.next("command")
    assert (command.action, command.epoch) == (command.ABORT, 0)
    assert cluster.status()["state"] == "Running"

    def joined():
        (slot,) = cluster.list("harvestslots")
        return [job.get("joinedWith") for job in slot["status"]["jobs"]]

    wait_until(lambda: joined() == [2], "the slot says whose rows pass together")


def test_a_job_moves_to_the_other_pod_when_its_own_is_gone(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned, checkpoint_step=10, checkpoint_path="/said/step-00000010-00000")
    cluster.await_state("Running")
    other = cluster.attach(cluster.pod("decode-1"))
    other.beat()
    cluster.core.delete_namespaced_pod("decode-0", cluster.namespace, grace_period_seconds=0)
    sidecar.close()
    moved = other.next("assign")
    assert (moved.job_uid, moved.epoch) == (assigned.job_uid, 2)
    assert cluster.status()["slot"] == f"{cluster.namespace}/decode-1"


def test_a_worker_that_fails_is_tried_again_until_the_limit(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job(backoffLimit=1)
    first = sidecar.next("assign")
    sidecar.report(first, "FAILED", reason="WorkerDied", detail="signal 9")
    second = sidecar.next("assign")
    assert (second.epoch, cluster.status()["attempts"]) == (2, 1)
    sidecar.report(second, "FAILED", reason="WorkerDied", detail="signal 9")
    cluster.await_state("Failed")
    assert cluster.condition("Failed")["reason"] == "BackoffLimitExceeded"


def test_an_error_of_the_user_fails_at_once_and_says_what_to_mend(placed):
    cluster, sidecar, assigned = placed
    detail = "rows.jsonl:17: 'messages' is missing. Write chat rows."
    where = {"field": "rows.jsonl:17", "remedy": "Write chat rows."}
    sidecar.report(
        assigned, "FAILED", reason="DatasetInvalid", detail=detail, user_error=True, **where
    )
    cluster.await_state("Failed")
    failed = cluster.condition("Failed")
    assert failed["reason"] == "DatasetInvalid"
    assert (
        failed["message"]
        == f"{detail} Fix it in a new job: one that has failed does not run again."
    )
    assert cluster.status()["userError"] == where


def test_a_job_that_failed_over_its_checkpoint_is_mended_by_a_new_one_as_its_message_says(placed):
    cluster, sidecar, assigned = placed
    detail = "/c7 cannot be gone on from: 8 was trained with, the job says 16."
    sidecar.report(assigned, "FAILED", reason="CheckpointMismatch", detail=detail, user_error=True)
    cluster.await_state("Failed")
    assert "Fix it in a new job" in cluster.condition("Failed")["message"]
    # The very same spec, to the same destination.
    sidecar.beat()
    destination = cluster.get("finetunejobs", "tone")["spec"]["output"]["destination"]
    cluster.job("again", output={"destination": destination})
    again = sidecar.next("assign")
    assert (again.job_name, again.epoch) == ("again", 1)
    assert again.job_uid != assigned.job_uid


def test_a_job_of_a_priority_class_that_does_not_exist_is_not_placed_until_it_does(cluster, kube):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    name = f"batch-{cluster.namespace}"
    cluster.job(priorityClassName=name)
    cluster.await_state("Invalid")
    assert cluster.condition("Accepted")["reason"] == "PriorityClassNotFound"
    classes = client.SchedulingV1Api(kube)
    classes.create_priority_class({"metadata": {"name": name}, "value": -10})
    try:
        assert sidecar.next("assign").job_name == "tone"
    finally:
        classes.delete_priority_class(name)


def test_a_job_without_a_slot_says_why_each_refuses(cluster):
    cluster.policy(mode="observe")
    cluster.attach(cluster.pod()).beat()
    cluster.job()
    wait_until(
        lambda: (
            "decode-0 may not be harvested now" in cluster.condition("Placed").get("message", "")
        ),
        "the slot's refusal in the condition",
    )
    assert cluster.condition("Placed")["reason"] == "NoSlot"


def test_of_two_jobs_for_one_destination_the_later_is_refused(placed):
    cluster, _, _ = placed
    cluster.job("late", output={"destination": f"/out/{cluster.namespace}/./tone/"})
    cluster.await_state("Invalid", "late")
    accepted = cluster.condition("Accepted", "late")
    assert accepted["reason"] == "DestinationInUse"
    assert f"{cluster.namespace}/tone" in accepted["message"]


def test_of_two_jobs_that_reach_one_directory_of_a_claim_by_two_paths_the_later_is_refused(placed):
    cluster, _, _ = placed
    claim = {"persistentVolumeClaim": {"claimName": "shared"}}
    # The policy of `placed` selects the pods; this one mounts the same claim elsewhere.
    for name, path in (("one", "/one"), ("two", "/two/deep")):
        volumes = [{"name": "v", "mountPath": path, **claim}]
        cluster.policy(name=name, sidecar={"volumes": volumes})
    cluster.job("first", output={"destination": "/one/deep/tone"})
    cluster.job("apart", output={"destination": "/two/deep/tone"})
    cluster.job("late", output={"destination": "/two/deep/deep/tone"})
    cluster.await_state("Invalid", "late")
    accepted = cluster.condition("Accepted", "late")
    assert accepted["reason"] == "DestinationInUse"
    assert f"{cluster.namespace}/first, which reaches it by '/one/deep/tone'" in accepted["message"]
    for free in ("first", "apart"):
        assert cluster.condition("Accepted", free)["status"] == "True"


def volume(name, **more):
    return {"name": name, "mountPath": f"/{name}", "hostPath": {"path": "/srv"}, **more}


def test_a_job_writes_only_to_volumes_of_the_policy_that_its_pod_has_to_write(cluster):
    cluster.policy(sidecar={"volumes": [volume("data"), volume("rows", readOnly=True)]})
    # A directory of the node is mounted only in a namespace that may have such pods.
    label = {"pod-security.kubernetes.io/enforce": "privileged"}
    cluster.core.patch_namespace(cluster.namespace, {"metadata": {"labels": label}})

    def volumes_of_a_pod():
        asks = {"windrow.dev/inject": "enabled"}
        pod = cluster.create_pod("probe", asks, dry_run="All")
        return {volume.name for volume in pod.spec.volumes}

    wait_until(lambda: {"windrow-data", "windrow-rows"} <= volumes_of_a_pod(), "both volumes")
    sidecar = cluster.attach(cluster.pod(), outputs=())
    sidecar.beat()
    cluster.job("elsewhere", output={"destination": "/rows/tone"})
    wait_until(
        lambda: (
            "decode-0 cannot write /rows/tone: by its policy's volumes its pod may write only "
            "below /data" in cluster.condition("Placed", "elsewhere").get("message", "")
        ),
        "the slot's refusal in the condition",
    )
    cluster.job(output={"destination": "/data/tone"})
    assigned = sidecar.next("assign")
    assert (assigned.job_name, list(assigned.outputs.trees)) == ("tone", ["/data"])


def test_a_volume_that_came_after_the_pod_is_not_written_to(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod(), outputs=())
    sidecar.beat()
    cluster.custom.patch_namespaced_custom_object(
        "windrow.dev",
        "v1alpha1",
        cluster.namespace,
        "harvestpolicies",
        "chat",
        {"spec": {"sidecar": {"volumes": [volume("data")]}}},
    )
    cluster.job(output={"destination": "/data/tone"})
    wait_until(
        lambda: "may write nowhere" in cluster.condition("Placed").get("message", ""),
        "the slot's refusal in the condition",
    )


def test_a_finished_job_is_deleted_after_its_time(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job(ttlSecondsAfterFinished=0)
    sidecar.report(sidecar.next("assign"), "SUCCEEDED", adapter_path="/a")
    wait_until(lambda: not cluster.has_job(), "the job is deleted")


def test_events_tell_the_story(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned)
    cluster.await_state("Running")

    def told():
        events = cluster.core.list_namespaced_event(cluster.namespace).items
        return {event.reason for event in events if event.involved_object.name == "tone"}

    wait_until(lambda: {"Placed", "Started"} <= told(), "events of the job")


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"token": "not-a-token"}, grpc.StatusCode.UNAUTHENTICATED),
        ({"pod_uid": "another"}, grpc.StatusCode.PERMISSION_DENIED),
        ({"version": 99}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_sidecar_that_is_not_who_it_says_is_refused(cluster, hello, code):
    assert cluster.attach(cluster.pod(), **hello).refusal() == code


async def test_sidecars_that_come_all_at_once_end_no_operator(cluster):
    # In C: whatever breaks there takes the process with it, and no log line of ours says so.
    address = f"127.0.0.1:{cluster.operator.state['attachPort']}"
    trust = grpc.ssl_channel_credentials(cluster.authority())
    own = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own for each
    channels = [grpc.aio.secure_channel(address, trust, own) for _ in range(AT_ONCE)]
    ready = [asyncio.create_task(channel.channel_ready()) for channel in channels]
    done, pending = await asyncio.wait(ready, timeout=DEADLINE_SECONDS)
    for task in pending:
        task.cancel()
    for channel in channels:
        await channel.close()
    assert cluster.operator.process.poll() is None, cluster.operator.log.read_text()[-2000:]
    assert len(done) == AT_ONCE


def test_a_token_for_another_audience_is_refused(cluster):
    pod = cluster.pod()
    sidecar = cluster.attach(pod, token=cluster.token(pod, audience="vault"))
    assert sidecar.refusal() == grpc.StatusCode.UNAUTHENTICATED


def test_a_pod_that_was_not_made_harvestable_is_no_slot(cluster):
    """A policy selects it and its token is good; the webhook never saw it."""
    cluster.policy()
    pod = cluster.create_pod("decode-0", {"windrow.dev/inject": "disabled"})
    assert cluster.attach(pod).refusal() == grpc.StatusCode.PERMISSION_DENIED


def test_a_token_of_a_pod_that_was_replaced_is_refused(cluster):
    old = cluster.pod()
    token = cluster.token(old)
    cluster.core.delete_namespaced_pod("decode-0", cluster.namespace, grace_period_seconds=0)
    wait_until(lambda: not pod_names(cluster), "the old pod is gone")
    new = cluster.pod()
    refusal = cluster.attach(new, token=token).refusal()
    assert refusal in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


def pod_names(cluster):
    return [pod.metadata.name for pod in cluster.core.list_namespaced_pod(cluster.namespace).items]


def test_a_profile_is_stored_once_for_its_kind(cluster, kube):
    profile = {
        "key": "abc",
        "device": "host:2-cores",
        "engine": "builtin",
        "solo": [{"units": 2, "c0Us": 100.0, "b0Us": 10.0, "k0NsPerToken": 5.0}],
        "takenAt": "2025-01-01T00:00:00Z",
    }
    for name in ("decode-0", "decode-1"):
        cluster.attach(cluster.pod(name)).send_profile("abc", profile)
    custom = client.CustomObjectsApi(kube)

    def stored():
        return custom.list_namespaced_custom_object(
            "windrow.dev", "v1alpha1", cluster.namespace, "latencyprofiles"
        )["items"]

    wait_until(stored, "a LatencyProfile")
    assert [item["spec"]["key"] for item in stored()] == ["abc"]


def test_new_pods_find_what_an_earlier_one_has_measured(cluster):
    profile = {
        "key": "abc",
        "device": "host:2-cores",
        "engine": "builtin",
        "solo": [{"units": 2, "c0Us": 100.0, "b0Us": 10.0, "k0NsPerToken": 5.0}],
        "takenAt": "2025-01-01T00:00:00Z",
    }
    cluster.attach(cluster.pod()).send_profile("abc", profile)

    def given():
        maps = cluster.core.list_namespaced_config_map(cluster.namespace).items
        return next((m.data for m in maps if m.metadata.name == "windrow-latency-profiles"), None)

    wait_until(given, "a ConfigMap for new pods")
    assert json.loads(given()[profile_file("abc")])["solo"][0]["c0Us"] == 100


def slots(cluster):
    return cluster.custom.list_namespaced_custom_object(
        "windrow.dev", "v1alpha1", cluster.namespace, "harvestslots"
    )["items"]


def test_a_slot_that_rests_goes_on_resting_under_the_next_leader(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    for name in ("one", "two", "three"):
        cluster.job(name, backoffLimit=0)
        assigned = sidecar.next("assign")
        sidecar.report(assigned, "FAILED", reason="WorkerError", detail="no device")
        cluster.await_state("Failed", name)

    def rest():
        health = [(slot.get("status") or {}).get("health", {}) for slot in slots(cluster)]
        return health and health[0].get("restsUntil")

    until = wait_until(rest, "the slot rests")
    cluster.operator.end(signal.SIGKILL)
    cluster.operator.start()
    again = cluster.attach(cluster.core.read_namespaced_pod("decode-0", cluster.namespace))
    again.beat()
    cluster.job("four")
    wait_until(lambda: until in cluster.condition("Placed", "four").get("message", ""), "it rests")
    assert rest() == until


def test_the_operator_ends_within_two_seconds_with_a_sidecar_attached(placed):
    cluster, _, _ = placed
    seconds = cluster.operator.end(signal.SIGTERM)
    state = cluster.operator.state
    cluster.operator.start()
    assert cluster.operator.state["attachPort"] == state["attachPort"]
    assert not state["ready"]
    assert seconds < 4  # two, and as much again for a machine that is busy with other tests


@pytest.mark.extended
def test_a_job_waits_for_its_secret_and_its_worker_alone_is_told_it(cluster):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod())
    sidecar.beat()
    cluster.job(output={"destination": "s3://team/tone", "secretRef": {"name": "team-s3"}})

    def says(text):
        return lambda: (
            cluster.condition("Placed").get("reason") == "SecretUnreadable"
            and text in cluster.condition("Placed")["message"]
        )

    wait_until(says("there is no Secret 'team-s3'"), "the Secret's absence in the condition")
    held = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "hidden-5e1", "password": "other"}
    secret = {"metadata": {"name": "team-s3"}, "stringData": held}
    cluster.core.create_namespaced_secret(cluster.namespace, secret)
    touch(cluster, "1")
    wait_until(says("is not meant for jobs"), "the owner's word is missing")
    labels = {"metadata": {"labels": {"windrow.dev/credentials": "true"}}}
    cluster.core.patch_namespaced_secret("team-s3", cluster.namespace, labels)
    touch(cluster, "2")
    assigned = sidecar.next("assign")
    del held["password"]
    assert (dict(assigned.output_secret), dict(assigned.dataset_secret)) == (held, {})
    assert "hidden-5e1" not in assigned.spec_json
    assert "hidden-5e1" not in str(cluster.get("finetunejobs", "tone"))
    assert "hidden-5e1" not in cluster.operator.log.read_text()


def touch(cluster, text):
    """Have the operator look at the job before its next try."""
    note = {"metadata": {"annotations": {"looked-at": text}}}
    cluster.custom.patch_namespaced_custom_object(
        "windrow.dev", "v1alpha1", cluster.namespace, "finetunejobs", "tone", note
    )


def test_an_assignment_says_which_checkpoint_the_job_has(placed):
    cluster, sidecar, assigned = placed
    start(sidecar, assigned, checkpoint_step=5, checkpoint_path="/said/step-00000005-00000")
    wait_until(lambda: (cluster.status().get("checkpoint") or {}).get("step") == 5, "it is known")
    sidecar.report(assigned, "FAILED", reason="WorkerDied", detail="killed")
    again = sidecar.next("assign")
    assert (again.epoch, again.checkpoint_path) == (2, own_folder(cluster, assigned, 5))
