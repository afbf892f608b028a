"""Faults of processes while a job runs: its worker, a sidecar, decode, the operator.

Each function breaks one thing and returns once that is over. What it says itself is the fault's own
mark (a reason, an event that has to come, a process that is another one now); that the job, the
requests and the memory are right at the end is checked for all of them alike by
`test_faults_table`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time

from farm import JOB_WITHIN_S, NAMESPACE, kill, until
from kubernetes import client as k8s
from scene import BREAK_AT, Scene, stopped_for

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
    worker, agent = scene.worker(), scene.farm.agent(scene.pod)
    kill(agent)
    until("the worker dies with its agent", lambda: not worker.is_running())
    _until_another_agent(scene, scene.pod, agent.pid)
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
    root = scene.destination / ".windrow" / scene.job.uid
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
    with scene.without_policy():
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


def pod_deleted(scene: Scene) -> None:
    """As when its node is drained: the job moves to the other pod, and a new one comes here."""
    k8s.CoreV1Api(scene.farm.client.api).delete_namespaced_pod(scene.pod, NAMESPACE)
    assert scene.farm.pod_of(scene.resumes()) != scene.pod
    scene.farm.renew(scene.pod)


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
    other = scene.farm.client.submit(scene.renamed("came-meanwhile", destination=scene.beside))
    kill(scene.operator())
    scene.farm.at_step(other.name, 1)
    scene.farm.client.delete(other.name)
    until("it is gone", lambda: other.name not in {job.name for job in scene.farm.client.jobs()})
    scene.farm.assert_never_ran_twice(other.uid)


def operator_killed_before_the_end(scene: Scene) -> None:
    """Keep the worker's last report in its sidecar for the next operator."""
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
