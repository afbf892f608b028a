"""What can break while a job runs: each function breaks one thing and returns once that is over.

What it says itself is the fault's own mark (a reason, an event that has to come, a process that is
another one now); that the job, the requests and the memory are right at the end is checked for all
of them alike by `test_faults_table`.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest
from farm import JOB_WITHIN_S, NAMESPACE, Farm, kill, until
from kubernetes import client as k8s

from windrow.views import JobView

BREAK_AT = 6  # after the checkpoint of step 4, before that of step 8
POLICY = "farm"
LEASE_WITHIN_S = 15.0  # before its holder would give it up
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
        (found,) = self.farm.processes_named(name)
        return found

    def operator(self) -> int:
        return int(self.farm.cluster.operator.child.pid)

    def goes_on(self) -> None:
        self.farm.at_step(self.job.name, self.job.step + 1)

    def resumes(self) -> JobView:
        """Wait until it runs under another placement; it may end before anybody looks."""
        until(
            f"{self.job.name} has a slot again",
            lambda: (
                (job := self.farm.job(self.job.name)).epoch > self.job.epoch
                and (job.slot or job.finished)
            ),
        )
        return self.farm.at_step(self.job.name, BREAK_AT, epoch=self.job.epoch + 1)

    def told(self) -> set[str]:
        events = self.farm.client.events(self.job.name, namespace=NAMESPACE)
        return {event.reason for event in events}

    def objects(self) -> k8s.CustomObjectsApi:
        return k8s.CustomObjectsApi(self.farm.client.api)

    def spec_schema(self) -> dict[str, Any]:
        """The schema of spec in the definition of FinetuneJob, as the API server has it."""
        api = k8s.ApiextensionsV1Api(self.farm.client.api)
        found = api.read_custom_resource_definition("finetunejobs.windrow.dev")
        version = api.api_client.sanitize_for_serialization(found)["spec"]["versions"][0]
        schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        return schema

    def patch_job(self, body: dict[str, object]) -> None:
        where = (*GROUP, NAMESPACE, "finetunejobs", self.job.name)
        self.objects().patch_namespaced_custom_object(*where, body)

    def renamed(self, name: str, **output: str) -> dict[str, Any]:
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


def worker_killed_while_it_loads(scene: Scene) -> None:
    """Twice: at a step, and the one that comes next before it has done any."""
    before = scene.worker()
    kill(before)
    until("another worker", lambda: any(w.pid != before.pid for w in scene.farm.workers()))
    kill(scene.worker())
    scene.farm.at_step(scene.job.name, BREAK_AT, epoch=scene.job.epoch + 2)


def worker_stalls(scene: Scene) -> None:
    stopped_for(scene.worker().pid, 4)
    scene.goes_on()


def sidecar_killed(scene: Scene) -> None:
    worker = scene.worker()
    kill(scene.farm.agent(scene.pod))
    until("the worker dies with its agent", lambda: not worker.is_running())
    scene.resumes()


def sidecar_ended(scene: Scene) -> None:
    """As when it is upgraded: the worker stops at a checkpoint, and no step is done again.

    The job goes where there is a sidecar; another one comes here when a job needs it.
    """
    before, worker = scene.farm.agent(scene.pod), scene.worker()
    before.send_signal(signal.SIGTERM)
    until("both end", lambda: not (before.is_running() or worker.is_running()))
    scene.resumes()
    steps = scene.farm.finished_steps(scene.job.uid)
    assert steps == sorted(set(steps)), "a clean stop loses no step"


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


def sidecar_hangs_as_the_job_ends(scene: Scene) -> None:
    """The adapter is written and checkpoints are gone; the next worker tells of it."""
    agent, steps = scene.farm.agent(scene.pod), scene.job.total_steps
    root = scene.farm.out / scene.job.name / ".windrow" / scene.job.uid
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the last checkpoint waits for it
        scene.farm.at_step(scene.job.name, steps)
        os.kill(agent.pid, signal.SIGSTOP)
    until("the end is noted", lambda: (root / "completed.json").exists())
    until("checkpoints are gone", lambda: not (root / "checkpoints").exists())
    assert not scene.farm.job(scene.job.name).finished
    kill(agent)


def other_sidecar_killed(scene: Scene) -> None:
    """A slot without a job: its sidecar comes back once a job has nowhere else to go."""
    other = scene.farm.other(scene.pod)
    before = scene.farm.agent(other).pid
    kill(before)
    with _without_policy(scene):
        _until_another_agent(scene, other, before)
        assert scene.farm.pod_of(scene.resumes()) == other


def every_sidecar_killed(scene: Scene) -> None:
    """That of the job comes back; the other one when a job needs it (see above)."""
    pids = {pod.name: scene.farm.agent(pod.name).pid for pod in scene.farm.pods.decodes}
    for pid in pids.values():
        kill(pid)
    _until_another_agent(scene, scene.pod, pids[scene.pod])
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


def decode_killed(scene: Scene) -> None:
    """Its own requests are lost, as they would be without a worker; nobody else's."""
    before = scene.farm.decode_pids(scene.pod)
    for pid in before:
        kill(pid)
    until("decode runs again", lambda: scene.farm.decode_pids(scene.pod) - before)
    scene.resumes()


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
    try:
        until("the worker has ended", lambda: not scene.farm.workers(), JOB_WITHIN_S)
    finally:
        kill(operator)


def sidecar_killed_while_the_operator_hangs(scene: Scene) -> None:
    """Nobody adds another one meanwhile; the operator finds out once it goes on."""
    operator, worker = scene.operator(), scene.worker()
    before = scene.farm.agent(scene.pod).pid
    os.kill(operator, signal.SIGSTOP)
    try:
        kill(before)
        until("the worker dies with its agent", lambda: not worker.is_running())
    finally:
        os.kill(operator, signal.SIGCONT)
    _until_another_agent(scene, scene.pod, before)
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
    """Its holder makes it again in the same term, so that no stream ends."""
    api, before = _lease(scene)
    api.delete_namespaced_lease("windrow-operator", "windrow-system")

    def again() -> bool:
        found = api.list_namespaced_lease("windrow-system").items
        return any(
            lease.metadata.uid != before.metadata.uid
            and lease.spec.acquire_time == before.spec.acquire_time
            for lease in found
        )

    until("it is there again, of the same term", again, LEASE_WITHIN_S)
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
    with _without_policy(scene):
        assert scene.farm.pod_of(scene.resumes()) != scene.pod


@contextlib.contextmanager
def _without_policy(scene: Scene) -> Iterator[None]:
    """No policy selects the job's pod meanwhile."""
    core = k8s.CoreV1Api(scene.farm.client.api)
    label = core.read_namespaced_pod(scene.pod, NAMESPACE).metadata.labels["app"]
    core.patch_namespaced_pod(scene.pod, NAMESPACE, {"metadata": {"labels": {"app": "none"}}})
    try:
        yield
    finally:
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
    right = scene.renamed("malformed")
    wrong = list(_wrong_values(("spec",), scene.spec_schema()))
    assert len(wrong) >= 200
    where = (*GROUP, NAMESPACE, "finetunejobs")
    for path, value in wrong:
        body = copy.deepcopy(right)
        held: dict[str, Any] = body
        for part in path[:-1]:
            held = held.setdefault(part, {})
        held[path[-1]] = value
        with pytest.raises(k8s.ApiException) as refused:
            scene.objects().create_namespaced_custom_object(*where, body)
        assert refused.value.status in (400, 422), (path, value)
    scene.goes_on()


def _wrong_values(
    path: tuple[str, ...], schema: dict[str, Any]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each field of a schema with values that it does not allow."""
    kinds: dict[str, tuple[Any, ...]] = {
        "object": (7, "seven", [7]),
        "array": (7, "seven", {"seven": 7}),
        "string": (7, ["seven"], {"seven": 7}),
        "boolean": (7, "seven", ["seven"]),
        "integer": ("seven", [7], {"seven": 7}, 7.5),
        "number": ("seven", [7], {"seven": 7}),
    }
    for value in kinds.get(schema.get("type", ""), (True, {}, {"seven": 7})):
        yield path, value
    if "type" in schema:
        if "minimum" in schema:
            yield path, schema["minimum"] - 1
        if "maximum" in schema:
            yield path, schema["maximum"] + 1
    if "enum" in schema:
        yield path, "seven"
    for name, below in schema.get("properties", {}).items():
        yield from _wrong_values((*path, name), below)


def another_namespace_deleted(scene: Scene) -> None:
    """With a job that waits in it."""
    core, name = k8s.CoreV1Api(scene.farm.client.api), "short-lived"
    core.create_namespace({"metadata": {"name": name}})
    body = scene.renamed("guest", destination=_beside(scene))
    body["metadata"] = {"name": "guest", "namespace": name}
    scene.farm.client.submit(body, namespace=name)
    until("it is told why", lambda: scene.farm.client.get("guest", namespace=name).message)
    core.delete_namespace(name)
    until(
        "it is gone, and its job with it",
        lambda: name not in {found.metadata.name for found in core.list_namespace().items},
    )
    scene.goes_on()


def _beside(scene: Scene) -> str:
    return str(scene.farm.out / f"beside-{scene.job.name}")
