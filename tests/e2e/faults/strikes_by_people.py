"""Acts of people on a job, on its policy and beside it while it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from farm import NAMESPACE, POLICY, until
from kubernetes import client as k8s
from scene import GROUP, Scene


def job_suspended_and_resumed(scene: Scene) -> None:
    """It stops at a checkpoint, so that no step is done again."""
    scene.farm.client.suspend(scene.job.name)
    until("suspended", lambda: scene.farm.job(scene.job.name).state == "Suspended")
    until("no worker while suspended", lambda: not scene.farm.workers())
    assert scene.farm.job(scene.job.name).checkpoint_step >= scene.job.step
    scene.farm.client.resume(scene.job.name)
    scene.resumes()
    steps = scene.farm.finished_steps(scene.job.uid)
    assert steps == sorted(set(steps)), "a clean stop loses no step"


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
    with scene.without_policy():
        assert scene.farm.pod_of(scene.resumes()) != scene.pod


def another_job_for_the_destination(scene: Scene) -> None:
    other = scene.farm.client.submit(scene.renamed("same-destination"))
    until("it is refused", lambda: scene.farm.job(other.name).state == "Invalid")
    assert scene.job.name in _message(scene, other.name)
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


def namespace_of_a_waiting_job_deleted(scene: Scene) -> None:
    """Its job, which may run nowhere, goes with it."""
    core, name = k8s.CoreV1Api(scene.farm.client.api), "short-lived"
    core.create_namespace({"metadata": {"name": name}})
    body = scene.renamed("guest", destination=scene.beside)
    body["metadata"] = {"name": "guest", "namespace": name}
    scene.farm.client.submit(body, namespace=name)
    until("it is told why", lambda: scene.farm.client.get("guest", namespace=name).message)
    core.delete_namespace(name)
    until(
        "it is gone, and its job with it",
        lambda: name not in {found.metadata.name for found in core.list_namespace().items},
    )
    scene.goes_on()


def namespace_of_a_running_job_deleted(scene: Scene) -> None:
    """It runs on the other pod, and leaves neither a worker there nor a lent chunk."""
    core, name = k8s.CoreV1Api(scene.farm.client.api), "ends-early"
    other = scene.farm.other(scene.pod)
    anywhere = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "Exists"}]}
    core.create_namespace({"metadata": {"name": name}})
    body = scene.renamed("guest", destination=scene.beside)
    body["metadata"] = {"name": "guest", "namespace": name}
    body["spec"]["training"]["maxSteps"] = 4000
    body["spec"]["policies"] = [f"{NAMESPACE}/{POLICY}"]
    _patch_access(scene, {"namespaceSelector": anywhere})
    try:
        scene.farm.client.submit(body, namespace=name)
        until("it runs", lambda: scene.farm.client.get("guest", namespace=name).step > 0)
        assert len(scene.farm.workers()) == 2
        core.delete_namespace(name)
        until(
            "it is gone, and its job with it",
            lambda: name not in {found.metadata.name for found in core.list_namespace().items},
        )
    finally:
        _patch_access(scene, None)
    until("its worker is gone", lambda: len(scene.farm.workers()) < 2)
    until("its chunks came home", lambda: scene.farm.lent_chunks(other) == 0)
    scene.goes_on()


def _patch_access(scene: Scene, access: dict[str, Any] | None) -> None:
    """Say who may use the pods' slots; None: their own namespace."""
    where = (*GROUP, NAMESPACE, "harvestpolicies", POLICY)
    scene.objects().patch_namespaced_custom_object(*where, {"spec": {"access": access}})
