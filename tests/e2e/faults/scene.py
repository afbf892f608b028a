"""Scene of a fault: a job that runs on a pod, and hands that stop and slow processes."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from farm import NAMESPACE, Farm, until
from kubernetes import client as k8s

from windrow.views import JobView

BREAK_AT = 6  # after the checkpoint of step 4, before that of step 8
GROUP = ("windrow.dev", "v1alpha1")


@dataclass
class Scene:
    """Scene of a fault: a job that runs on `pod`, and the job as it was then."""

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
        seen = [self.job]

        def placed_again() -> bool:
            seen[:] = [job := self.farm.job(self.job.name)]
            return job.epoch > self.job.epoch and bool(job.slot or job.finished)

        try:
            until(f"{self.job.name} has a slot again", placed_again)
        except AssertionError as error:
            slots = self.farm.client.slots()
            raise AssertionError(f"{error}; the job: {seen}; the slots: {slots}") from None
        return self.farm.at_step(self.job.name, BREAK_AT, epoch=self.job.epoch + 1)

    def told(self) -> set[str]:
        events = self.farm.client.events(self.job.name, namespace=NAMESPACE)
        return {event.reason for event in events}

    def body(self) -> dict[str, Any]:
        """The job's object, as the API server has it now."""
        return self.farm.client.manifest(self.job.name, namespace=NAMESPACE)

    @property
    def destination(self) -> Path:
        """Return where the adapter goes."""
        return self.farm.out / self.job.name

    @property
    def beside(self) -> str:
        """A destination for another job."""
        return f"{self.destination}-beside"

    @contextlib.contextmanager
    def without_policy(self) -> Iterator[None]:
        """No policy selects the job's pod meanwhile."""
        core = k8s.CoreV1Api(self.farm.client.api)
        label = core.read_namespaced_pod(self.pod, NAMESPACE).metadata.labels["app"]
        core.patch_namespaced_pod(self.pod, NAMESPACE, {"metadata": {"labels": {"app": "none"}}})
        try:
            yield
        finally:
            core.patch_namespaced_pod(self.pod, NAMESPACE, {"metadata": {"labels": {"app": label}}})

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
        body = copy.deepcopy(self.body())
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
