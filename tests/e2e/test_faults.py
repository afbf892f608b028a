"""What breaks while a job runs, and that neither the job nor anybody's request is lost by it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from farm import NAMESPACE, Farm, Requests, kill, until
from kubernetes import client as k8s

from windrow.local import serving
from windrow.local.manifests import decode_pod

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(600),  # a first build of the API server included
]

STEPS = 28
BREAK_AT = 6  # after the checkpoint of step 4, before that of step 8


def test_a_killed_worker_resumes_from_its_last_checkpoint(farm: Farm):
    job = farm.submit("worker-killed", STEPS)
    before = farm.at_step(job.name, BREAK_AT)
    pod = farm.pod_of(before)
    decode = farm.decode_pids(pod)

    with Requests(farm.endpoint(pod)) as requests:
        (worker,) = farm.workers()
        kill(worker)
        after = farm.succeeded(job.name)

    assert after.epoch > before.epoch
    assert requests.failures == []
    assert requests.answered > 0
    assert farm.decode_pids(pod) == decode
    farm.assert_never_ran_twice(job.uid)
    steps = farm.finished_steps(job.uid)
    assert steps[-1] == max(steps)
    # Resumed, not begun again: nothing below the checkpoint was computed a second time.
    assert steps.count(2) == 1


def test_a_killed_sidecar_comes_back_and_its_job_goes_on(farm: Farm):
    job = farm.submit("sidecar-killed", STEPS)
    before = farm.at_step(job.name, BREAK_AT)
    pod = farm.pod_of(before)
    decode = farm.decode_pids(pod)

    with Requests(farm.endpoint(pod)) as requests:
        (worker,) = farm.workers()
        kill(farm.agent(pod))
        until("the worker dies with its agent", lambda: not worker.is_running())
        farm.succeeded(job.name)

    assert requests.failures == []
    assert farm.decode_pids(pod) == decode
    farm.assert_never_ran_twice(job.uid)
    until("the sidecar runs again", lambda: farm.agent(pod).is_running())


def test_a_job_moves_to_the_other_pod_when_its_own_is_deleted(farm: Farm):
    job = farm.submit("pod-deleted", STEPS)
    before = farm.at_step(job.name, BREAK_AT)
    pod = farm.pod_of(before)
    other = farm.other(pod)

    with Requests(farm.endpoint(other)) as requests:
        core = k8s.CoreV1Api(farm.client.api)
        core.delete_namespaced_pod(pod, NAMESPACE)
        moved = farm.at_step(job.name, BREAK_AT, epoch=before.epoch + 1)
        assert farm.pod_of(moved) == other
        farm.succeeded(job.name)

    assert requests.failures == []
    farm.assert_never_ran_twice(job.uid)
    assert farm.finished_steps(job.uid).count(2) == 1
    _create_again(farm, pod)


def test_a_killed_operator_adopts_the_running_job(farm: Farm):
    job = farm.submit("operator-killed", STEPS)
    before = farm.at_step(job.name, BREAK_AT)
    (worker,) = farm.workers()

    kill(farm.cluster.operator.child.pid)
    after = farm.succeeded(job.name)

    # Adopted: the same worker went on under the same epoch, and no step was computed twice.
    assert after.epoch == before.epoch
    assert {event.epoch for _, event in farm.tasklets(job.uid)} == {before.epoch}
    steps = farm.finished_steps(job.uid)
    assert steps == sorted(set(steps))
    until("the worker ends", lambda: not worker.is_running())


def test_a_suspended_job_stops_at_a_checkpoint_and_resumes_from_it(farm: Farm):
    job = farm.submit("suspended", STEPS)
    farm.at_step(job.name, BREAK_AT)

    farm.client.suspend(job.name)
    until("suspended", lambda: farm.job(job.name).state == "Suspended")
    until("no worker while suspended", lambda: not farm.workers())
    stopped_at = farm.job(job.name)
    assert stopped_at.checkpoint_step >= BREAK_AT
    farm.client.resume(job.name)
    farm.succeeded(job.name)

    steps = farm.finished_steps(job.uid)
    assert steps == sorted(set(steps)), "a clean stop loses no step"
    farm.assert_never_ran_twice(job.uid)


def test_a_job_deleted_while_running_leaves_no_worker_and_no_checkpoint(farm: Farm):
    job = farm.submit("deleted", 4000)
    running = farm.at_step(job.name, BREAK_AT)
    pod = farm.pod_of(running)

    with Requests(farm.endpoint(pod)) as requests:
        farm.client.delete(job.name)
        until("the object is gone", lambda: job.name not in {j.name for j in farm.client.jobs()})
        until("its worker is gone", lambda: not farm.workers())
        until("its chunks came home", lambda: farm.lent_chunks(pod) == 0)

    assert requests.failures == []
    assert farm.finished_steps(job.uid), "its figures stay"
    assert not list(Path(farm.out / job.name).rglob("step-*"))


def test_two_jobs_with_one_destination_are_told_apart(farm: Farm):
    first = farm.submit("destination", 4000)
    farm.at_step(first.name, 1)
    second = farm.client.submit(_renamed(farm, first.name, "destination-too"))

    until("refused", lambda: farm.job(second.name).state == "Invalid")
    assert first.name in farm.job(second.name).message
    for job in (first, second):
        farm.client.delete(job.name)
    until("both are gone", lambda: not farm.workers())


def _renamed(farm: Farm, name: str, new_name: str) -> dict[str, object]:
    api = k8s.CustomObjectsApi(farm.client.api)
    found = api.get_namespaced_custom_object(
        "windrow.dev", "v1alpha1", NAMESPACE, "finetunejobs", name
    )
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "metadata": {"name": new_name, "namespace": NAMESPACE},
        "spec": found["spec"],
    }


def _create_again(farm: Farm, name: str) -> None:
    within = timedelta(seconds=90)
    core = k8s.CoreV1Api(farm.client.api)
    until(
        "gone",
        lambda: name not in {p.metadata.name for p in core.list_namespaced_pod(NAMESPACE).items},
    )
    (decode,) = [decode for decode in farm.pods.decodes if decode.name == name]
    core.create_namespaced_pod(NAMESPACE, decode_pod(decode))
    # Its sidecar comes when a job waits that could go there.
    serving.await_ready(farm.client, farm.pods, within)
