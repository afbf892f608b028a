"""Story that people read of a job that waited, ran, was preempted, moved, ended; of a slot too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from operator_process import running
from prometheus_client.parser import text_string_to_metric_families
from waiting import DEADLINE_SECONDS, wait_until

import windrow_cli as cli
from windrow.client import WindrowClient
from windrow.crd import ANNOTATION_LOGS
from windrow.metrics import OPERATOR_METRICS
from windrow.proto import attach_pb2 as pb
from windrow.rundir import worker_line
from windrow_operator.events import Recorder
from windrow_operator.kube import Kube
from windrow_operator.reconcile import Event


def progress(assigned, step, **more):
    return running(assigned, step=step, total_steps=100, loss=3.0, tokens=step * 800, **more)


@pytest.fixture
def lived(cluster, urgent):
    """A job that has been through all of it, and ended."""
    cluster.policy()
    cluster.job()
    wait_until(lambda: cluster.condition("Placed").get("reason") == "NoSlot", "it waits")

    first = cluster.attach(cluster.pod("decode-0"))
    first.beat()
    assigned = first.next("assign")
    first.report(assigned, "STARTED")
    first.beat(progress(assigned, 6))
    cluster.await_state("Running")

    cluster.job("at-once", priorityClassName=urgent)
    first.next("command", what=lambda command: command.action == pb.JobCommand.STOP)
    stopped = pb.Progress(step=7, checkpoint_step=7, checkpoint_path="/said/step-00000007-00000")
    first.report(assigned, "STOPPED", progress=stopped)
    other = first.next("assign")
    first.report(other, "STARTED")
    first.beat(progress(other, 1))
    cluster.await_state("Running", "at-once")
    wait_until(lambda: cluster.condition("Requeued").get("status") == "True", "it waits again")

    second = cluster.attach(cluster.pod("decode-1"))
    second.beat()
    again = second.next("assign")
    assert (again.job_name, again.epoch) == ("tone", 2)
    second.report(again, "STARTED", reason="Resumed", detail="from step 7, /c7")
    second.beat(progress(again, 8))
    cluster.await_state("Running")
    second.report(again, "EVALUATED", base_eval_loss=3.0, tuned_eval_loss=2.0)
    second.report(again, "SUCCEEDED", adapter_path="/out/tone")
    cluster.await_state("Succeeded")
    last, _ = TURNS[-1]
    wait_until(lambda: last in dict(told(cluster)), "its last event")
    return cluster


def told(cluster):
    """Return reason and message of the events of the job, as the API server lists them."""
    found = cluster.core.list_namespaced_event(
        cluster.namespace, field_selector="involvedObject.name=tone"
    ).items
    return [(event.reason, event.message) for event in found]


def find_kubectl():
    """Return kubectl, of PATH or as `make node` has built it; None: there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = sorted((cache / "windrow" / "node").glob("*/kubectl"))
    return shutil.which("kubectl") or (str(built[-1]) if built else None)


# What each turn has to say.
TURNS = (
    ("NoSlot", "No slot is open to namespace"),
    ("Placed", "decode-0 predicts 9.6k tok/s"),
    ("Started", "Started on decode-0"),
    ("Preempted", "at-once of higher priority takes the slot; stopped with a checkpoint of step 7"),
    ("NoSlot", "decode-0 runs job"),
    ("Placed", "decode-1 predicts 9.6k tok/s"),
    ("Resumed", "Resumed on decode-1, after step 7"),
    ("Completed", "Adapter in /out/"),
)


def test_events_tell_why_at_each_turn_in_order_and_nothing_twice(lived, control_plane, capsys):
    words = ["--namespace", lived.namespace, "--kubeconfig", str(control_plane.kubeconfig)]
    assert cli.run(["explain", "tone", *words]) == 0
    explained = capsys.readouterr().out
    shown = [explained]
    if kubectl := find_kubectl():
        command = [kubectl, "describe", "ftj", "tone", *words]
        described = subprocess.check_output(command, text=True)
        shown.append(described[described.index("\nEvents:") :])
    print(*shown)

    story = told(lived)
    assert [reason for reason, _ in story] == [reason for reason, _ in TURNS]
    for (_, said), (_, wanted) in zip(story, TURNS, strict=True):
        assert wanted in said
    assert max(Counter(story).values()) == 1
    # Those who read it see that order too, though the times of its events are whole seconds.
    for text in shown:
        places = [text.index(wanted) for _, wanted in TURNS]
        assert places == sorted(places)
    assert "placed 2 times" in explained
    assert lived.status()["evictions"] == [{"reason": "Preempted", "count": 1}]


def samples(cluster):
    """Return what the operator counts: {(name, labels): value}."""
    url = f"http://127.0.0.1:{cluster.operator.state['metricsPort']}/metrics"
    families = text_string_to_metric_families(httpx.get(url, timeout=DEADLINE_SECONDS).text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_operators_metrics_tell_the_same_story_and_each_has_a_writer(lived):
    own = {"matchLabels": {"kubernetes.io/metadata.name": lived.namespace}}
    lived.policy("limited", access={"namespaceSelector": own, "gpuSecondsPerDay": 3600})
    assert lived.attach(lived.pod("refused"), token="not-a-token").refusal()
    labels = {"windrow.dev/inject": "enabled"}
    other = {"containers": [{"name": "v", "image": "v", "command": ["vllm", "serve", "/m"]}]}
    body = {"metadata": {"name": "other", "labels": labels}, "spec": other}
    lived.core.create_namespaced_pod(lived.namespace, body, dry_run="All")
    # A sidecar that says it runs a placement which is long over.
    uid = lived.get("finetunejobs", "tone")["metadata"]["uid"]
    late = pb.RunningJob(slot=0, job_uid=uid, epoch=1)
    lived.attach(lived.pod("decode-2"), running=[late]).beat(late)

    def found(name, **labels):
        return sum(
            value
            for (sample, held), value in samples(lived).items()
            if sample == name and labels.items() <= dict(held).items()
        )

    mine = {"job_namespace": lived.namespace}
    assert found("windrow_placements_total", **mine) == 3  # tone twice, at-once
    assert found("windrow_job_placement_seconds_count", **mine) == 3
    assert found("windrow_placement_ends_total", **mine, reason="Preempted") == 1
    wait_until(lambda: found("windrow_placement_ends_total", **mine, reason="Finished") == 1, "end")
    wait_until(lambda: found("windrow_jobs", **mine, state="Succeeded") == 1, "it has ended")
    assert found("windrow_jobs", **mine, state="Running") == 1
    assert found("windrow_operator_api_requests_total", resource="finetunejobs/status") >= 8
    assert found("windrow_operator_leader") == 1

    # Each row of the table is written by what has happened here; but a watch that misses something,
    # of which tests/integration/test_operator_resync.py is.
    silent = {"windrow_operator_watch_missed_total"}

    def unwritten():
        told = {name for (name, _), value in samples(lived).items() if value}
        return {
            metric.name
            for metric in OPERATOR_METRICS
            if not told & {metric.name, f"{metric.name}_count"}
        }

    wait_until(lambda: unwritten() <= silent, f"a writer of {unwritten() - silent}")


def test_conditions_that_change_while_a_job_waits_are_one_event(cluster):
    """What refuses it changes again and again: the condition follows, the story does not."""
    cluster.policy()
    cluster.job(policies=["other"])
    wait_until(lambda: cluster.condition("Placed").get("reason") == "NoSlot", "it waits")
    for name in ("decode-0", "decode-1"):
        cluster.attach(cluster.pod(name)).beat()
        wait_until(
            lambda name=name: name in cluster.condition("Placed")["message"],
            "the condition names each slot",
        )
    assert [reason for reason, _ in told(cluster)] == ["NoSlot"]


async def test_the_same_words_about_the_same_object_are_said_once_a_minute(cluster, control_plane):
    body = cluster.job(suspend=True)
    at = [datetime(2025, 1, 1, 12, tzinfo=UTC)]
    kube = await Kube.connect(control_plane.kubeconfig)
    recorder = Recorder(kube, lambda: at[0])
    try:
        for seconds in (0, 1, 58, 2):
            at[0] += timedelta(seconds=seconds)
            await recorder.record(body, Event("SlotLost", "the same words"))
            await recorder.record(body, Event("SlotLost", f"other words at {at[0]}"))
    finally:
        await kube.close()
    assert Counter(told(cluster))[("SlotLost", "the same words")] == 2  # at 0 and at 61 s
    assert len([message for _, message in told(cluster) if "other" in message]) == 4


def test_a_slot_is_explained_by_its_name_and_what_is_neither_job_nor_slot_is_told(
    cluster, control_plane, capsys
):
    cluster.policy()
    sidecar = cluster.attach(cluster.pod("decode-0"))
    sidecar.next("policy", what=lambda config: config.mode == "harvest")
    sidecar.beat(
        steps=1000, steps_over_objective=20, tpot_p99_seconds=0.015, batch=3, chunks_lent=8
    )
    words = ["--namespace", cluster.namespace, "--kubeconfig", str(control_plane.kubeconfig)]

    def explained():
        assert cli.run(["explain", "decode-0", *words]) in (0, cli.EXIT_USAGE)
        return "p99 15.0 ms" in (said := capsys.readouterr().out) and said

    said = wait_until(explained, "the slot's figures")
    assert said.startswith(f"{cluster.namespace}/decode-0 is Serving: ")
    assert "policy    chat, mode harvest" in said
    assert "p99 15.0 ms of 40.0 ms, batch 3, 0 waiting, 2.00% of its steps over" in said
    assert "8 of 108 chunks for the worker" in said
    assert cli.run(["explain", "decode-0", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["slot"] == f"{cluster.namespace}/decode-0"

    assert cli.run(["explain", "nobody", *words]) == cli.EXIT_USAGE
    assert "no FinetuneJob and no slot" in capsys.readouterr().err


def logging_pod(cluster, name, folder):
    """Create a decode pod with a native sidecar whose log lies in a folder, as on a local node."""
    (folder / name).mkdir()
    command = ["python", "-m", "engine", "--disaggregation-mode", "decode", "--model-path", "/m"]
    body = {
        "metadata": {
            "name": name,
            "labels": {"app": "chat", "windrow.dev/inject": "enabled"},
            "annotations": {ANNOTATION_LOGS: str(folder / name)},
        },
        "spec": {
            "containers": [{"name": "decode", "image": "none", "command": command}],
            "initContainers": [{"name": "windrow", "image": "none", "restartPolicy": "Always"}],
        },
    }
    return cluster.core.create_namespaced_pod(cluster.namespace, body)


def test_the_log_of_a_worker_is_followed_from_slot_to_slot_until_its_job_has_ended(
    cluster, control_plane, tmp_path
):
    mark = worker_line([f"{cluster.namespace}/tone"], "")
    talk = WindrowClient(control_plane.kubeconfig)
    followed = []

    def follow():
        for line in talk.worker_logs("tone", namespace=cluster.namespace, follow=True):
            followed.append(line)  # noqa: PERF402 - looked at while it grows

    def writes(pod, *lines):
        with (tmp_path / pod / "windrow.log").open("a") as log:
            log.writelines(f"{at}\n" for at in ("of the sidecar", *(mark + one for one in lines)))
        wait_until(lambda: followed[-1:] == [lines[-1]], f"{lines[-1]}, there is {followed}")

    cluster.policy()
    cluster.job()
    reader = threading.Thread(target=follow)
    reader.start()  # before there is a slot
    try:
        first = cluster.attach(logging_pod(cluster, "decode-0", tmp_path))
        first.beat()
        assigned = first.next("assign")
        first.report(assigned, "STARTED")
        first.beat(progress(assigned, 1))
        writes("decode-0", "one", "two")
        # Its pod goes: the job goes on in another, whose log is shorter.
        cluster.core.delete_namespaced_pod("decode-0", cluster.namespace, grace_period_seconds=0)
        second = cluster.attach(logging_pod(cluster, "decode-1", tmp_path))
        second.beat()
        again = second.next("assign")
        second.report(again, "STARTED")
        second.beat(progress(again, 2))
        writes("decode-1", "three")
        second.report(again, "SUCCEEDED", adapter_path="/out/tone")
        reader.join(DEADLINE_SECONDS)
        assert not reader.is_alive()
    finally:
        if reader.is_alive():
            cluster.delete_job()
    assert followed == ["one", "two", "three"]
