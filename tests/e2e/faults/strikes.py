"""What can break while a job runs: each function breaks one thing and returns once that is over.

What it says itself is the fault's own mark (a reason, an event that has to come, a process that is
another one now); that the job, the requests and the memory are right at the end is checked for all
of them alike by `test_faults_table`.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psutil
import pytest
from farm import NAMESPACE, Farm, kill, until
from kubernetes import client as k8s

from windrow.views import JobView

BREAK_AT = 6  # after the checkpoint of step 4, before that of step 8
POLICY = "farm"
GROUP = ("windrow.dev", "v1alpha1")


@dataclass
class Scene:
    """What a fault is done to: a job that runs on `pod`, and the job as it was then."""

    farm: Farm
    job: JobView
    pod: str

    def worker(self) -> psutil.Process:
        (worker,) = self.farm.workers()
        return worker

    def part_of_control_plane(self, name: str) -> psutil.Process:
        """The API server or etcd of this cluster."""
        found = [
            process
            for process in psutil.process_iter()
            if process.name() == name
            and str(self.farm.cluster.directory) in " ".join(process.cmdline())
        ]
        assert len(found) == 1, found
        return found[0]

    def operator(self) -> int:
        return int(self.farm.cluster.operator.child.pid)

    def goes_on(self) -> None:
        self.farm.at_step(self.job.name, self.job.step + 1)

    def resumes(self) -> JobView:
        """Under another placement; it may end before anybody looks."""
        return self.farm.at_step(self.job.name, BREAK_AT, epoch=self.job.epoch + 1)

    def told(self) -> set[str]:
        events = self.farm.client.events(self.job.name, namespace=NAMESPACE)
        return {event.reason for event in events}

    def objects(self) -> k8s.CustomObjectsApi:
        return k8s.CustomObjectsApi(self.farm.client.api)

    def patch_job(self, body: dict[str, object]) -> None:
        where = (*GROUP, NAMESPACE, "finetunejobs", self.job.name)
        self.objects().patch_namespaced_custom_object(*where, body)

    def renamed(self, name: str, **output: str) -> dict[str, object]:
        """The job's manifest under another name."""
        body = copy.deepcopy(self.farm.client.manifest(self.job.name, namespace=NAMESPACE))
        body["metadata"] = {"name": name, "namespace": NAMESPACE}
        body.pop("status", None)
        body["spec"]["output"] |= output
        return body


def stopped_for(pid: int, seconds: float) -> None:
    """A process that is there and does nothing, as on a machine that swaps or hangs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def slow(pid: int) -> None:
    """A process that gets a quarter of the time for a while."""
    for _ in range(10):
        stopped_for(pid, 0.75)
        time.sleep(0.25)


# --- worker, sidecar, decode ----------------------------------------------------------------------


def worker_killed(scene: Scene) -> None:
    kill(scene.worker())
    scene.resumes()


def worker_killed_again_and_again(scene: Scene) -> None:
    for epoch in (1, 2):
        until("a worker", scene.farm.workers)
        kill(scene.worker())
        scene.farm.at_step(scene.job.name, BREAK_AT, epoch=scene.job.epoch + epoch)


def worker_stalls(scene: Scene) -> None:
    stopped_for(scene.worker().pid, 4)
    scene.goes_on()


def sidecar_killed(scene: Scene) -> None:
    worker = scene.worker()
    kill(scene.farm.agent(scene.pod))
    until("the worker dies with its agent", lambda: not worker.is_running())
    scene.resumes()


def sidecar_stalls(scene: Scene) -> None:
    """Shorter than anybody waits for a heartbeat: nobody loses anything."""
    stopped_for(scene.farm.agent(scene.pod).pid, 2)
    scene.goes_on()


def sidecar_hangs(scene: Scene) -> None:
    """The job is another pod's before the sidecar goes on, and no second worker runs."""
    agent = scene.farm.agent(scene.pod)
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        until("lost", lambda: "SlotLost" in scene.told())
        assert time.monotonic() - began < 30 + 2  # and a look of this test
        scene.resumes()
    finally:
        os.kill(agent.pid, signal.SIGCONT)


def other_sidecar_killed(scene: Scene) -> None:
    other = scene.farm.other(scene.pod)
    before = scene.farm.agent(other).pid
    kill(before)
    _until_another_agent(scene, other, before)
    scene.goes_on()


def every_sidecar_killed(scene: Scene) -> None:
    pids = {pod.name: scene.farm.agent(pod.name).pid for pod in scene.farm.pods.decodes}
    for pid in pids.values():
        kill(pid)
    for pod, pid in pids.items():
        _until_another_agent(scene, pod, pid)
    scene.resumes()


def _until_another_agent(scene: Scene, pod: str, before: int) -> None:
    def another() -> bool:
        try:
            return scene.farm.agent(pod).pid != before
        except AssertionError:
            return False

    until(f"another agent of {pod}", another)


def decode_stalls(scene: Scene) -> None:
    for pid in scene.farm.decode_pids(scene.pod):
        stopped_for(pid, 1)
    scene.goes_on()


# --- the operator ---------------------------------------------------------------------------------


def operator_hangs(scene: Scene) -> None:
    stopped_for(scene.operator(), 12)
    scene.goes_on()


def operator_ended(scene: Scene) -> None:
    before = scene.operator()
    os.kill(before, signal.SIGTERM)
    until("another life", lambda: scene.operator() != before)
    scene.goes_on()


def operator_killed_twice(scene: Scene) -> None:
    lives = {scene.operator()}
    for _ in range(2):
        kill(scene.operator())
        until("another life", lambda: scene.operator() not in lives)
        lives.add(scene.operator())
        scene.goes_on()


def operator_killed_as_another_job_comes(scene: Scene) -> None:
    """Between any two of its writes, or before the first: the job runs once."""
    other = scene.farm.client.submit(scene.renamed("came-meanwhile", destination=_beside(scene)))
    kill(scene.operator())
    scene.farm.at_step(other.name, 1)
    scene.farm.client.delete(other.name)
    until("it is gone", lambda: other.name not in {job.name for job in scene.farm.client.jobs()})
    scene.farm.assert_never_ran_twice(other.uid)


def operator_killed_before_the_end(scene: Scene) -> None:
    """What the worker says last waits in its sidecar for the next operator."""
    operator = scene.operator()
    os.kill(operator, signal.SIGSTOP)
    until("the worker has ended", lambda: not scene.farm.workers())
    kill(operator)


def sidecar_killed_while_the_operator_hangs(scene: Scene) -> None:
    operator = scene.operator()
    os.kill(operator, signal.SIGSTOP)
    try:
        before = scene.farm.agent(scene.pod).pid
        kill(before)
        _until_another_agent(scene, scene.pod, before)
    finally:
        os.kill(operator, signal.SIGCONT)
    scene.resumes()


def operator_and_sidecar_and_worker_killed(scene: Scene) -> None:
    worker, agent, operator = scene.worker(), scene.farm.agent(scene.pod), scene.operator()
    for process in (operator, agent.pid, worker.pid):
        kill(process)
    until("another operator", lambda: scene.operator() != operator)
    scene.resumes()


# --- the Lease ------------------------------------------------------------------------------------


def _lease(scene: Scene) -> tuple[k8s.CoordinationV1Api, k8s.V1Lease]:
    api = k8s.CoordinationV1Api(scene.farm.client.api)
    return api, api.read_namespaced_lease("windrow-operator", "windrow-system")


def _write_lease(scene: Scene, change: Callable[[k8s.V1LeaseSpec], None]) -> None:
    """Write it before the operator renews it, however often that takes."""

    def written() -> bool:
        api, body = _lease(scene)
        change(body.spec)
        try:
            api.replace_namespaced_lease("windrow-operator", "windrow-system", body)
        except k8s.ApiException as error:
            if error.status != 409:
                raise
            return False
        return True

    until("the Lease is written", written)


def _leads_again(scene: Scene) -> None:
    until("it leads again", lambda: _lease(scene)[1].spec.holder_identity == "local")
    scene.goes_on()


def lease_deleted(scene: Scene) -> None:
    _lease(scene)[0].delete_namespaced_lease("windrow-operator", "windrow-system")
    scene.goes_on()


def lease_stolen(scene: Scene) -> None:
    """A replica that took it and died: the operator stands by until it expires."""

    def change(spec: k8s.V1LeaseSpec) -> None:
        spec.holder_identity, spec.acquire_time = "another", spec.renew_time

    _write_lease(scene, change)
    _leads_again(scene)


def lease_given_to_nobody(scene: Scene) -> None:
    def change(spec: k8s.V1LeaseSpec) -> None:
        spec.holder_identity = ""

    _write_lease(scene, change)
    _leads_again(scene)


def lease_of_a_clock_that_jumped(scene: Scene) -> None:
    def change(spec: k8s.V1LeaseSpec) -> None:
        spec.renew_time = datetime.now(UTC) + timedelta(days=1)

    _write_lease(scene, change)
    tomorrow = datetime.now(UTC) + timedelta(hours=12)
    until("it is renewed", lambda: _lease(scene)[1].spec.renew_time < tomorrow)
    _leads_again(scene)


# --- the API server and what is in it -------------------------------------------------------------


def api_server_hangs(scene: Scene) -> None:
    stopped_for(scene.part_of_control_plane("kube-apiserver").pid, 15)
    scene.goes_on()


def api_server_slow(scene: Scene) -> None:
    slow(scene.part_of_control_plane("kube-apiserver").pid)
    scene.goes_on()


def etcd_hangs(scene: Scene) -> None:
    stopped_for(scene.part_of_control_plane("etcd").pid, 12)
    scene.goes_on()


def etcd_slow(scene: Scene) -> None:
    slow(scene.part_of_control_plane("etcd").pid)
    scene.goes_on()


def crds_applied_again(scene: Scene) -> None:
    """As every upgrade of the chart does: streams of watches end with a definition that changed."""
    api = k8s.ApiextensionsV1Api(scene.farm.client.api)
    name = "finetunejobs.windrow.dev"
    right = api.api_client.sanitize_for_serialization(api.read_custom_resource_definition(name))
    versions = right["spec"]["versions"]
    fewer = copy.deepcopy(versions)
    fewer[0]["additionalPrinterColumns"].pop()
    for wanted in (fewer, versions):
        api.patch_custom_resource_definition(name, {"spec": {"versions": wanted}})
        scene.goes_on()


def webhook_registration_deleted(scene: Scene) -> None:
    api = k8s.AdmissionregistrationV1Api(scene.farm.client.api)
    api.delete_mutating_webhook_configuration("windrow-operator")
    until(
        "it is registered again",
        lambda: any(
            found.metadata.name == "windrow-operator"
            for found in api.list_mutating_webhook_configuration().items
        ),
    )


def webhook_registration_points_elsewhere(scene: Scene) -> None:
    api = k8s.AdmissionregistrationV1Api(scene.farm.client.api)
    body = api.read_mutating_webhook_configuration("windrow-operator")
    right = body.webhooks[0].client_config.url
    body.webhooks[0].client_config.url = "https://127.0.0.1:9/mutate-pods"
    api.replace_mutating_webhook_configuration("windrow-operator", body)

    def now() -> str:
        found = api.read_mutating_webhook_configuration("windrow-operator")
        return str(found.webhooks[0].client_config.url)

    until("it is right again", lambda: now() == right)


def slot_deleted(scene: Scene) -> None:
    name = scene.job.slot.rpartition("/")[2]
    where = (*GROUP, NAMESPACE, "harvestslots", name)
    before = scene.objects().get_namespaced_custom_object(*where)["metadata"]["uid"]
    scene.objects().delete_namespaced_custom_object(*where)

    def again() -> bool:
        found = scene.objects().list_namespaced_custom_object(*GROUP, NAMESPACE, "harvestslots")
        uids = {body["metadata"]["name"]: body["metadata"]["uid"] for body in found["items"]}
        return uids.get(name, before) != before

    until("it is there again", again)
    scene.goes_on()


def status_wiped(scene: Scene) -> None:
    """Somebody wrote another status: progress comes again, the job does not."""
    where = (*GROUP, NAMESPACE, "finetunejobs", scene.job.name)
    wiped = {"status": {"step": None, "progress": None}}
    scene.objects().patch_namespaced_custom_object_status(*where, wiped)
    scene.goes_on()


# --- people ---------------------------------------------------------------------------------------


def job_edited_while_it_runs(scene: Scene) -> None:
    scene.patch_job({"spec": {"backoffLimit": 9}})
    with pytest.raises(k8s.ApiException):
        scene.patch_job({"spec": {"training": {"maxSteps": 1}}})


def job_annotated(scene: Scene) -> None:
    for number in range(20):
        scene.patch_job({"metadata": {"annotations": {"example.com/note": str(number)}}})
    scene.goes_on()


def finalizer_stripped(scene: Scene) -> None:
    scene.patch_job({"metadata": {"finalizers": []}})
    until("it is put back and told", lambda: "FinalizerRestored" in scene.told())
    scene.goes_on()


def policy_switched_off_and_on(scene: Scene) -> None:
    where = (*GROUP, NAMESPACE, "harvestpolicies", POLICY)
    scene.objects().patch_namespaced_custom_object(*where, {"spec": {"mode": "off"}})
    until("no worker", lambda: not scene.farm.workers())
    scene.objects().patch_namespaced_custom_object(*where, {"spec": {"mode": "harvest"}})
    scene.resumes()
    assert "PolicyChanged" in scene.told()


def policy_deleted_and_made_again(scene: Scene) -> None:
    where = (*GROUP, NAMESPACE, "harvestpolicies")
    body = scene.objects().get_namespaced_custom_object(*where, POLICY)
    scene.objects().delete_namespaced_custom_object(*where, POLICY)
    until("no worker", lambda: not scene.farm.workers())
    again = {**body, "metadata": {"name": POLICY, "namespace": NAMESPACE}}
    again.pop("status", None)
    scene.objects().create_namespaced_custom_object(*where, again)
    scene.resumes()


def policy_edited(scene: Scene) -> None:
    where = (*GROUP, NAMESPACE, "harvestpolicies", POLICY)
    for percent in (40, 50):
        change = {"spec": {"limits": {"maxMemoryPercent": percent}}}
        scene.objects().patch_namespaced_custom_object(*where, change)
    scene.goes_on()


def pod_leaves_its_policy(scene: Scene) -> None:
    """The job goes to the other pod; with the label the pod is a slot again."""
    core = k8s.CoreV1Api(scene.farm.client.api)
    label = core.read_namespaced_pod(scene.pod, NAMESPACE).metadata.labels["app"]
    core.patch_namespaced_pod(scene.pod, NAMESPACE, {"metadata": {"labels": {"app": "none"}}})
    assert scene.farm.pod_of(scene.resumes()) != scene.pod
    core.patch_namespaced_pod(scene.pod, NAMESPACE, {"metadata": {"labels": {"app": label}}})


def another_job_for_the_destination(scene: Scene) -> None:
    other = scene.farm.client.submit(scene.renamed("same-destination"))
    until("it is refused", lambda: scene.farm.job(other.name).state == "Invalid")
    scene.farm.client.delete(other.name)
    scene.goes_on()


def jobs_that_fit_nowhere(scene: Scene) -> None:
    names = [f"nowhere-{number}" for number in range(20)]
    for name in names:
        scene.farm.client.submit(scene.renamed(name, destination=f"/nowhere/{name}"))
    until("each is told why", lambda: all("cannot write" in _message(scene, n) for n in names))
    scene.goes_on()
    for name in names:
        scene.farm.client.delete(name)
    until("they are gone", lambda: {job.name for job in scene.farm.client.jobs()}.isdisjoint(names))


def _message(scene: Scene, name: str) -> str:
    return str(scene.farm.job(name).message)


def malformed_specs(scene: Scene) -> None:
    """Two hundred of them, none of which becomes an object."""
    wrong: list[dict[str, object]] = [
        {"training": {"maxSteps": -1}},
        {"training": {"learningRate": "fast"}},
        {"lora": {"rank": 0}},
        {"model": {"name": ""}},
        {"dataset": None},
        {"output": {"destination": ""}},
        {"backoffLimit": -1},
        {"ttlSecondsAfterFinished": -5},
        {"activeDeadlineSeconds": 0},
        {"priorityClassName": 7},
    ]
    right = scene.renamed("malformed")
    where = (*GROUP, NAMESPACE, "finetunejobs")
    for number in range(200):
        change = wrong[number % len(wrong)]
        body = copy.deepcopy(right)
        body["metadata"]["name"] = f"malformed-{number}"
        for part, value in change.items():
            held = body["spec"].get(part)
            merged = {**held, **value} if isinstance(held, dict) and value else value
            body["spec"][part] = merged
        with pytest.raises(k8s.ApiException) as refused:
            scene.objects().create_namespaced_custom_object(*where, body)
        assert refused.value.status in (400, 422), change
    scene.goes_on()


def another_namespace_deleted(scene: Scene) -> None:
    """With a job that waits in it."""
    core, name = k8s.CoreV1Api(scene.farm.client.api), "short-lived"
    core.create_namespace({"metadata": {"name": name}})
    body = scene.renamed("guest", destination=_beside(scene))
    body["metadata"] = {"name": "guest", "namespace": name}
    scene.farm.client.submit(body, namespace=name)
    until("it is told why", lambda: scene.farm.client.get("guest", namespace=name).message)
    core.delete_namespace(name)
    scene.farm.client.delete("guest", namespace=name)  # nothing here collects namespaces
    until(
        "its job is gone",
        lambda: "guest" not in {job.name for job in scene.farm.client.jobs(namespace=name)},
    )
    scene.goes_on()


def _beside(scene: Scene) -> str:
    return str(scene.farm.out / f"beside-{scene.job.name}")
