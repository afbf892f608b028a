"""Two decode pods, a policy and a job on a real API server, with hands to break things by step."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import closing
import psutil
from kubernetes import client as k8s
from support.requests import Requests

from windrow.client import WindrowClient, read_manifest
from windrow.conditions import Reason
from windrow.errors import Transient
from windrow.eventlog import FLUSH_INTERVAL_S, MarkEvent, StepEvent, TaskletEvent, read_events
from windrow.rundir import ENV_POD_NAME, ENV_RUN_DIR
from windrow.views import JobView
from windrow_lab.cluster import manifests, serving
from windrow_lab.cluster.local import LocalCluster
from windrow_lab.cluster.manifests import NAMESPACE
from windrow_lab.figures.summary import percentile

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "windrow-tiny"
ROWS = ROOT / "examples" / "support-tone" / "train.jsonl"
EXAMPLE = ROOT / "examples" / "finetunejob.yaml"

# Two pods share the cores of one device here, and things are killed, so latencies mean nothing: the
# objective is so many times what these pods' own steps take at p99 that no protection is at work
# (`tests/integration/test_protection.py` has those), on a slow machine as on a fast one.
OBJECTIVE_FACTOR = 30.0
ALONE_S = 4.0
WITHIN_S = 150.0  # a worker has idle time only, and the machine may have little
JOB_WITHIN_S = 240.0  # from its begin to its end
CHECKPOINT_EVERY = 4
MOST_SIDECARS = 2  # one after the other in a pod; the third comes ten seconds after its end
RENEWED_WITHIN = timedelta(seconds=120)
FASTEST_STEP_S = 0.1  # of a job's, as long as none has been seen
POLICY = "farm"
AGENT = "windrow_sidecar.agent"


def until(what: str, read: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Return once `read()` is true; fail with `what` and its last value at the deadline.

    An API server that does not answer for a moment is waited out.
    """
    deadline = time.monotonic() + within_s
    while True:
        try:
            found = read()
        except Transient as error:
            found, last = False, repr(error)
        else:
            last = repr(found)
        if found:
            return
        assert time.monotonic() < deadline, f"not in {within_s:g} s: {what} (last: {last})"
        time.sleep(0.1)


def bearable_ms(pods: serving.Pods, events: Path) -> float:
    """Serve all pods for a while, with nothing beside them, and return an objective to keep."""
    with contextlib.ExitStack() as asking:
        for endpoint in pods.endpoints:
            requests = asking.enter_context(Requests(endpoint))
        time.sleep(ALONE_S)
    assert requests.failures == []
    time.sleep(2 * FLUSH_INTERVAL_S)
    took_ms = sorted(
        (event.end_ns - event.start_ns) / 1e6
        for _, event in read_events(events)
        if isinstance(event, StepEvent)
    )
    return OBJECTIVE_FACTOR * percentile(took_ms, 0.99)


@dataclass
class Farm:
    """A running cluster with decode pods `decode-0`, `decode-1`, ..."""

    cluster: LocalCluster
    client: WindrowClient
    pods: serving.Pods
    events: Path
    out: Path
    objective_ms: float
    step_s: float = (
        FASTEST_STEP_S  # between two optimizer steps of the last job, at its faster times
    )

    def rows_of(self, name: str) -> Path:
        """The dataset of a job, which is its own."""
        return self.out / f"{name}.jsonl"

    def submit(self, name: str, steps: int) -> JobView:
        job = manifests.finetune_job(
            read_manifest(EXAMPLE),
            model=MODEL,
            rows=shutil.copy(ROWS, self.rows_of(name)),
            destination=self.out / name,
            steps=steps,
            name=name,
        )
        job["spec"]["checkpoint"] = {"everySteps": CHECKPOINT_EVERY, "keep": 2}
        job["spec"]["training"]["batchSize"] = 2
        job["spec"]["dataset"]["evalFraction"] = 0.02  # a worker has idle time only
        return self.client.submit(job)

    def job(self, name: str) -> JobView:
        return self.client.get(name)

    def at_step(self, name: str, step: int, *, epoch: int = 1, checkpoint: int = 0) -> JobView:
        """Wait until the job has finished `step` steps under an epoch of at least `epoch`.

        `checkpoint`: the step that the operator has to know a checkpoint of. A placement that ends
        before counts against its slot, which rests after three of them.
        """
        seen: list[JobView] = []

        def there() -> bool:
            job = self.job(name)
            seen[:] = [job]
            assert not job.finished or job.state == "Succeeded", f"{job.state}: {job.message}"
            return job.step >= step and job.epoch >= epoch and job.checkpoint_step >= checkpoint

        try:
            until(f"{name} at step {step} of epoch {epoch}", there)
        except AssertionError as error:
            raise AssertionError(f"{error}; the job: {seen}") from None
        return seen[0]

    def succeeded(self, name: str) -> JobView:
        job = self.client.wait(name, within=JOB_WITHIN_S)
        assert job.state == "Succeeded", f"{job.state}: {job.message}"
        assert (Path(job.adapter_path) / "adapter_model.safetensors").is_file()
        return job

    def pod_of(self, job: JobView) -> str:
        """Name of the pod whose slot has the job."""
        slot = job.slot.rpartition("/")[2]
        return next(s.pod for s in self.client.slots() if s.name == slot)

    def endpoint(self, pod: str) -> str:
        return next(
            f"http://127.0.0.1:{decode.port}" for decode in self.pods.decodes if decode.name == pod
        )

    def other(self, pod: str) -> str:
        return next(decode.name for decode in self.pods.decodes if decode.name != pod)

    def make_whole(self) -> None:
        """Have a sidecar in every pod, of which none has had many, and no slot that rests.

        One that ended comes back when a job needs it, and ever later the more often that was; a
        slot that failed several jobs takes none for minutes: what one fault left must not be what
        the next one waits for.
        """
        core = k8s.CoreV1Api(self.client.api)
        found = {pod.metadata.name: pod for pod in core.list_namespaced_pod(NAMESPACE).items}
        resting = {s.pod for s in self.client.slots() if s.why.startswith(Reason.RESTING)}
        hit = [
            name
            for name in (decode.name for decode in self.pods.decodes)
            if name not in found  # an earlier test ended with it deleted
            or name in resting
            or len(found[name].spec.ephemeral_containers or ()) > MOST_SIDECARS
            or not self.has_agent(name)
        ]
        if not hit:
            return
        self.renew(*hit)
        # A policy that observes gives each pod its sidecar; one that harvests waits for jobs.
        observed = manifests.harvest_policy(POLICY, self.objective_ms, "windrow", mode="observe")
        self.client.apply_policy(observed)
        until("each pod has a sidecar", lambda: all(map(self.has_agent, hit)))
        self.client.apply_policy(manifests.harvest_policy(POLICY, self.objective_ms, "windrow"))
        serving.await_slots(self.client, self.pods, RENEWED_WITHIN)

    def renew(self, *pods: str) -> None:
        """Put new pods of the same names in the places of some, which may be gone already."""
        core = k8s.CoreV1Api(self.client.api)

        def there() -> set[str]:
            return {pod.metadata.name for pod in core.list_namespaced_pod(NAMESPACE).items}

        for pod in pods:
            try:
                core.delete_namespaced_pod(pod, NAMESPACE)
            except k8s.ApiException as error:
                if error.status != 404:
                    raise
        until(f"{pods} are gone", lambda: there().isdisjoint(pods))
        for decode in self.pods.decodes:
            if decode.name in pods:
                core.create_namespaced_pod(NAMESPACE, manifests.decode_pod(decode))
        serving.await_ready(self.client, self.pods, RENEWED_WITHIN)

    def lent_chunks(self, pod: str) -> int:
        """Chunks of a pod's slot that are a worker's, those that are asked back included."""
        (slot,) = [slot for slot in self.client.slots() if slot.pod == pod]
        return slot.chunks.lent + slot.chunks.draining

    def workers(self) -> list[psutil.Process]:
        """Processes that have a job right now; one that waits for a job is none of them."""
        noted = set()
        for note in self.cluster.directory.rglob("worker-*.pid"):
            with contextlib.suppress(FileNotFoundError):  # its worker has just been reaped
                noted.add(int(note.read_text().split()[0]))
        found = _processes("windrow_sidecar.finetune.worker")
        return [process for process in found if process.pid in noted]

    def has_agent(self, pod: str) -> bool:
        """Return whether a sidecar's agent runs in a pod."""
        return bool(self._agents(pod))

    def agent(self, pod: str) -> psutil.Process:
        """The agent of a pod's sidecar."""
        found = self._agents(pod)
        assert len(found) == 1, found
        return found[0]

    def _agents(self, pod: str) -> list[psutil.Process]:
        """Agents of a pod's sidecar; the programs that start its workers have longer names."""
        found = []
        for process in self._of_pod(pod, AGENT):
            with contextlib.suppress(psutil.Error):  # it has just ended
                found += [process] if AGENT in process.cmdline() else []
        return found

    def decode_pids(self, pod: str) -> set[int]:
        return {process.pid for process in self._of_pod(pod, "windrow_sidecar.engines.builtin")}

    def processes_named(self, name: str) -> list[psutil.Process]:
        """Processes of that name whose command line names the cluster's directory."""
        found = []
        for process in _processes(str(self.cluster.directory)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                found += [process] if process.name() == name else []
        return found

    def _of_pod(self, pod: str, program: str) -> Iterator[psutil.Process]:
        """Processes of a pod of this cluster; there may be others on the machine."""
        for process in _processes(program):
            with contextlib.suppress(psutil.Error):  # it has just ended
                variables = process.environ()
                own = variables.get(ENV_RUN_DIR, "").startswith(str(self.cluster.directory))
                if own and variables.get(ENV_POD_NAME) == pod:
                    yield process

    def tasklets(self, uid: str) -> list[tuple[str, TaskletEvent]]:
        """(folder's name, event) of everything that was ever run for a job, in order of time."""
        found = [
            (source, event)
            for source, event in read_events(self.events)
            if isinstance(event, TaskletEvent) and event.job_uid == uid
        ]
        return sorted(found, key=lambda pair: pair[1].start_ns)

    def assert_never_ran_twice(self, uid: str) -> None:
        """No two workers had a job at once (see `closing.assert_ran_once`)."""
        closing.assert_ran_once([event for _, event in self.tasklets(uid)])

    def finished_steps(self, uid: str) -> list[int]:
        """Optimizer steps that were finished, in order of time; replayed ones appear again."""
        return [event.step for _, event in self.tasklets(uid) if event.phase == "opt"]

    def served(self, pod: str, since_ns: int = 0) -> list[StepEvent | MarkEvent]:
        """Decode steps of a pod and what it marked, up to what its engine has written."""
        found = [event for _, event in read_events(self.events / pod)]
        steps = [e for e in found if isinstance(e, StepEvent) and e.start_ns >= since_ns]
        return [*steps, *(e for e in found if isinstance(e, MarkEvent) and e.at_ns >= since_ns)]

    def begin_events_anew(self) -> None:
        """Drop what was logged so far: each writer opens its file for each piece.

        Of the jobs that ran, their rate is kept.
        """
        ends_ns = sorted(
            event.end_ns
            for _, event in read_events(self.events)
            if isinstance(event, TaskletEvent) and event.phase == "opt"
        )
        if len(ends_ns) > 2:
            gaps_ns = sorted(after - before for before, after in pairwise(ends_ns))
            self.step_s = max(1e-3, gaps_ns[len(gaps_ns) // 4] / 1e9)
        for path in self.events.rglob("*.events.jsonl"):
            path.unlink()


def _processes(*words: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            ended = process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if not ended and all(word in line for word in words):
            yield process


def left_over(directory: Path) -> list[str]:
    """Processes whose environment or command line names the cluster's directory."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            told = " ".join(process.cmdline()) + json.dumps(process.environ())
        except psutil.Error:
            continue
        if str(directory) in told and process.status() != psutil.STATUS_ZOMBIE:
            found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return found


def kill(process: psutil.Process | int) -> None:
    """SIGKILL: no chance to clean up."""
    os.kill(process if isinstance(process, int) else process.pid, signal.SIGKILL)


__all__ = ["NAMESPACE", "Farm", "Requests", "kill", "left_over", "until"]
