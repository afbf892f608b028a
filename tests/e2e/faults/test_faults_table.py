"""A day with everything going wrong: one fault a line, and the same closing checks for each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest
from farm import NAMESPACE, Farm, Requests, kill, until
from kubernetes import client as k8s

from windrow.views import JobView

pytestmark = [pytest.mark.alone, pytest.mark.timeout(420)]

STEPS = 28
BREAK_AT = 6  # after the checkpoint of step 4, before that of step 8


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

    def goes_on(self) -> None:
        self.farm.at_step(self.job.name, self.job.step + 1)


def stopped_for(process: psutil.Process | int, seconds: float) -> None:
    """A process that is there and does nothing, as on a machine that swaps or hangs."""
    pid = process if isinstance(process, int) else process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def sidecar_hangs(scene: Scene) -> None:
    """The job is another pod's before the sidecar goes on, and no second worker runs."""
    agent = scene.farm.agent(scene.pod)
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        until("lost", lambda: "SlotLost" in told(scene))
        assert time.monotonic() - began < 30 + 2  # and a look of this test
        scene.farm.at_step(scene.job.name, BREAK_AT, epoch=scene.job.epoch + 1)
    finally:
        os.kill(agent.pid, signal.SIGCONT)


def told(scene: Scene) -> set[str]:
    return {event.reason for event in scene.farm.client.events(scene.job.name, namespace=NAMESPACE)}


def operator_hangs(scene: Scene) -> None:
    stopped_for(scene.farm.cluster.operator.child.pid, 12)
    scene.goes_on()


def operator_killed_twice(scene: Scene) -> None:
    operator = scene.farm.cluster.operator
    lives = {operator.child.pid}
    for _ in range(2):
        kill(operator.child.pid)
        until("another life", lambda: operator.child.pid not in lives)
        lives.add(operator.child.pid)
        scene.goes_on()


def api_server_hangs(scene: Scene) -> None:
    stopped_for(scene.part_of_control_plane("kube-apiserver"), 15)
    scene.goes_on()


def etcd_hangs(scene: Scene) -> None:
    stopped_for(scene.part_of_control_plane("etcd"), 12)
    scene.goes_on()


def lease_deleted(scene: Scene) -> None:
    api = k8s.CoordinationV1Api(scene.farm.client.api)
    api.delete_namespaced_lease("windrow-operator", "windrow-system")
    scene.goes_on()


def lease_stolen(scene: Scene) -> None:
    """A replica that took it and died: the operator stands by until it expires."""
    api = k8s.CoordinationV1Api(scene.farm.client.api)
    body = api.read_namespaced_lease("windrow-operator", "windrow-system")
    body.spec.holder_identity = "another"
    body.spec.acquire_time = body.spec.renew_time
    api.replace_namespaced_lease("windrow-operator", "windrow-system", body)
    until("it leads again", lambda: holder(api) == "local")
    scene.goes_on()


def holder(api: k8s.CoordinationV1Api) -> str:
    return str(api.read_namespaced_lease("windrow-operator", "windrow-system").spec.holder_identity)


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


def job_edited_while_it_runs(scene: Scene) -> None:
    api = k8s.CustomObjectsApi(scene.farm.client.api)
    where = ("windrow.dev", "v1alpha1", NAMESPACE, "finetunejobs", scene.job.name)
    api.patch_namespaced_custom_object(*where, {"spec": {"backoffLimit": 9}})
    with pytest.raises(k8s.ApiException):
        api.patch_namespaced_custom_object(*where, {"spec": {"training": {"maxSteps": 1}}})


def status_wiped(scene: Scene) -> None:
    """Somebody wrote another status: progress comes again, the job does not."""
    api = k8s.CustomObjectsApi(scene.farm.client.api)
    where = ("windrow.dev", "v1alpha1", NAMESPACE, "finetunejobs", scene.job.name)
    api.patch_namespaced_custom_object_status(*where, {"status": {"step": None, "progress": None}})
    scene.goes_on()


def slot_deleted(scene: Scene) -> None:
    api = k8s.CustomObjectsApi(scene.farm.client.api)
    name = scene.job.slot.rpartition("/")[2]
    api.delete_namespaced_custom_object("windrow.dev", "v1alpha1", NAMESPACE, "harvestslots", name)
    until("it is there again", lambda: name in {s.name for s in scene.farm.client.slots()})
    scene.goes_on()


@dataclass(frozen=True)
class Fault:
    """One line of the table: what is done, and whether the job keeps its placement."""

    strike: Callable[[Scene], None]
    stays: bool = True
    long: bool = False


FAULTS = (
    Fault(sidecar_hangs, stays=False),
    Fault(lease_deleted, long=True),
    Fault(webhook_registration_deleted, long=True),
    Fault(job_edited_while_it_runs, long=True),
    Fault(slot_deleted, long=True),
    Fault(status_wiped, long=True),
    Fault(operator_hangs, long=True),
    Fault(operator_killed_twice, long=True),
    Fault(lease_stolen, long=True),
    Fault(api_server_hangs, long=True),
    Fault(etcd_hangs, long=True),
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, id=fault.strike.__name__, marks=[pytest.mark.long] if fault.long else []
        )
        for fault in FAULTS
    ],
)
def test_a_job_survives(farm: Farm, fault: Fault):
    name = fault.strike.__name__.replace("_", "-")
    farm.submit(name, STEPS)
    job = farm.at_step(name, BREAK_AT)
    scene = Scene(farm, job, farm.pod_of(job))
    decode = {pod.name: farm.decode_pids(pod.name) for pod in farm.pods.decodes}
    with (
        Requests(farm.endpoint(scene.pod)) as hit,
        Requests(farm.endpoint(farm.other(scene.pod))) as other,
    ):
        fault.strike(scene)
        after = farm.succeeded(name)
    # Nobody's request failed, and no decode process was hit.
    assert (hit.failures, other.failures) == ([], [])
    assert decode == {pod.name: farm.decode_pids(pod.name) for pod in farm.pods.decodes}
    # Nothing ran twice; what was done before a checkpoint was not done again.
    farm.assert_never_ran_twice(job.uid)
    steps = farm.finished_steps(job.uid)
    assert steps[-1] == max(steps) == STEPS - 1
    assert steps.count(2) == 1
    assert (after.epoch == job.epoch) is fault.stays
    # Nothing is left over.
    until("no worker", lambda: not farm.workers())
    until("every chunk came home", lambda: not any(map(farm.lent_chunks, decode)))
    farm.client.delete(name)
