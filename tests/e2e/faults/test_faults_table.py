"""A day with everything going wrong: one fault a line, and the same closing checks for each."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import closing
import pytest
import strikes_at_cluster as cluster
import strikes_at_processes as processes
import strikes_by_people as people
from farm import CHECKPOINT_EVERY, Farm, Requests, until
from scene import BREAK_AT, Scene
from support.small_disk import small_disk

from windrow.eventlog import MarkEvent, StepEvent
from windrow_sidecar.finetune.colocated.agent_link import LOOK_EVERY_S, SILENT_AFTER_S

pytestmark = [pytest.mark.alone, pytest.mark.extended, pytest.mark.timeout(600)]

STEPS = 28
LONGER = 120  # where the fault lasts for seconds: the job is not to end under it
WITHOUT_AN_END = 4000
SILENCE_S = SILENT_AFTER_S + 3 * LOOK_EVERY_S  # a worker goes on so long without its sidecar
STEPS_ALONE = 20  # of each pod, once the worker is gone


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    Attributes:
        strike: what is done.
        stays: whether the job keeps its placement.
        long: whether only `make e2e` does it.
        ends_decode: whether the pod's own decode is hit, and its requests with it.
        steps: of the job; more where it must not end before the fault is noticed.
        outlasts_s: how long the job has to run beyond `steps`, at the rate of the jobs before it.
        own_disk: whether what the job writes has a small disk of its own.
    """

    strike: Callable[[Scene], None]
    stays: bool = True
    long: bool = True
    ends_decode: bool = False
    steps: int = STEPS
    outlasts_s: float = 0.0
    own_disk: bool = False


FAULTS = (
    Fault(processes.worker_killed, stays=False, long=False),
    Fault(processes.sidecar_hangs, stays=False, outlasts_s=3 * SILENCE_S),
    Fault(processes.sidecar_hangs_as_the_job_ends, stays=False),
    Fault(processes.worker_killed_again_and_again, stays=False),
    Fault(processes.worker_killed_while_it_loads, stays=False),
    Fault(processes.worker_stalls),
    Fault(processes.sidecar_killed, stays=False, long=False),
    Fault(processes.sidecar_ended, stays=False),
    Fault(processes.sidecar_stalls),
    Fault(processes.other_sidecar_killed, stays=False),
    Fault(processes.every_sidecar_killed, stays=False),
    Fault(processes.decode_stalls),
    Fault(processes.decode_killed, stays=False, ends_decode=True),
    Fault(processes.pod_deleted, stays=False, long=False, ends_decode=True),
    Fault(processes.operator_hangs, steps=LONGER),
    Fault(processes.operator_ended),
    Fault(processes.operator_killed_twice, long=False),
    Fault(processes.operator_killed_as_another_job_comes),
    Fault(processes.operator_killed_before_the_end),
    Fault(processes.sidecar_killed_while_the_operator_hangs, stays=False),
    Fault(processes.operator_and_sidecar_and_worker_killed, stays=False),
    Fault(cluster.lease_deleted),
    Fault(cluster.lease_stolen, steps=LONGER),
    Fault(cluster.lease_given_to_nobody),
    Fault(cluster.lease_of_a_clock_that_jumped),
    Fault(cluster.api_server_hangs, steps=LONGER),
    Fault(cluster.api_server_slow, steps=LONGER),
    Fault(cluster.etcd_hangs, steps=LONGER),
    Fault(cluster.etcd_slow, steps=LONGER),
    Fault(cluster.crds_applied_again),
    Fault(cluster.webhook_registration_deleted),
    Fault(cluster.webhook_registration_points_elsewhere),
    Fault(cluster.slot_deleted),
    Fault(cluster.status_wiped),
    Fault(cluster.disk_full_at_a_checkpoint, own_disk=True),
    # The last step has no checkpoint but that of the end, which the full disk takes as little.
    Fault(cluster.disk_full_at_the_adapter, stays=False, own_disk=True, steps=STEPS - 1),
    Fault(cluster.rows_deleted),
    Fault(people.job_suspended_and_resumed, stays=False, long=False),
    Fault(people.job_edited_while_it_runs),
    Fault(people.job_annotated),
    Fault(people.finalizer_stripped),
    Fault(people.policy_switched_off_and_on, stays=False),
    Fault(people.policy_deleted_and_made_again, stays=False),
    Fault(people.policy_edited),
    Fault(people.pod_leaves_its_policy, stays=False),
    Fault(people.another_job_for_the_destination, long=False),
    Fault(people.jobs_that_fit_nowhere),
    Fault(people.malformed_specs),
    Fault(people.namespace_of_a_waiting_job_deleted),
    Fault(people.namespace_of_a_running_job_deleted, steps=LONGER),
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
def test_a_job_survives(farm: Farm, fault: Fault, record_property: Callable[[str, object], None]):
    name = fault.strike.__name__.replace("_", "-")
    farm.make_whole()
    farm.begin_events_anew()
    with small_disk(farm.out / name, mib=16) if fault.own_disk else contextlib.nullcontext():
        steps = fault.steps + math.ceil(fault.outlasts_s / farm.step_s)
        farm.submit(name, steps)
        try:
            _survives(farm, fault, name, steps, record_property)
        finally:
            # Whatever it was that went wrong, the next fault meets no worker of this one.
            farm.client.delete(name)
            until("the job is gone", lambda: name not in {job.name for job in farm.client.jobs()})
            until("its worker is gone", lambda: not farm.workers())


def test_a_job_deleted_while_it_runs_leaves_nothing(
    farm: Farm, record_property: Callable[[str, object], None]
):
    farm.make_whole()
    farm.begin_events_anew()
    job = farm.submit("deleted", WITHOUT_AN_END)
    pod = farm.pod_of(farm.at_step(job.name, BREAK_AT))

    with Requests(farm.endpoint(pod)) as requests:
        farm.client.delete(job.name)
        until("the object is gone", lambda: job.name not in {j.name for j in farm.client.jobs()})
        until("its worker is gone", lambda: not farm.workers())
        until("its chunks came home", lambda: farm.lent_chunks(pod) == 0)

    record_property("requests", requests.answered)
    assert requests.failures == []
    assert farm.finished_steps(job.uid), "its figures stay"
    assert not list(Path(farm.out / job.name).rglob("step-*"))


def _survives(
    farm: Farm,
    fault: Fault,
    name: str,
    steps: int,
    record_property: Callable[[str, object], None],
) -> None:
    job = farm.at_step(name, BREAK_AT, checkpoint=CHECKPOINT_EVERY)
    scene = Scene(farm, job, farm.pod_of(job))
    pods = [scene.pod, farm.other(scene.pod)]
    decode = {pod: farm.decode_pids(pod) for pod in pods}
    assert all(decode.values())
    with contextlib.ExitStack() as asking:
        requests = [asking.enter_context(Requests(farm.endpoint(pod))) for pod in pods]
        fault.strike(scene)
        after = farm.succeeded(name)
        until("no worker", lambda: not farm.workers())
        # A decode process that was killed said nothing at its end.
        since = {scene.pod: time.monotonic_ns() if fault.ends_decode else 0}
        until(
            "decode goes on, with all its memory",
            lambda: all(_serves_alone(farm.served(pod, since.get(pod, 0))) for pod in pods),
        )
    record_property("requests", sum(asked.answered for asked in requests))
    record_property("placements", after.epoch)
    # Nobody's request failed, no decode process was hit, and none waited for the worker.
    for pod, asked in zip(pods, requests, strict=True):
        if not (fault.ends_decode and pod == scene.pod):
            assert asked.failures == []
            assert farm.decode_pids(pod) == decode[pod]
    served = {pod.name: farm.served(pod.name, since.get(pod.name, 0)) for pod in farm.pods.decodes}
    late = (closing.late_in_a_row(events, farm.objective_ms) for events in served.values())
    record_property("late", max(late))
    for pod in farm.pods.decodes:
        events = served[pod.name]
        closing.assert_kept_pace(events, farm.objective_ms)
        closing.assert_alone(events, len(pod.device.cores))
    # Nothing ran twice; what was done before a checkpoint was not done again.
    tasklets = [event for _, event in farm.tasklets(job.uid)]
    closing.assert_ran_once(tasklets)
    closing.assert_went_on(tasklets, steps, CHECKPOINT_EVERY)
    assert farm.finished_steps(job.uid).count(2) == 1
    assert (after.epoch == job.epoch) is fault.stays


def _serves_alone(events: Sequence[StepEvent | MarkEvent]) -> bool:
    """Return whether decode has stepped since its worker was gone, and lends nothing any more."""
    since_ns = closing.gone_ns(events)
    if since_ns is None:
        return False
    after = [e for e in events if isinstance(e, StepEvent) and e.start_ns > since_ns]
    return len(after) > STEPS_ALONE and after[-1].chunks_lent == 0
