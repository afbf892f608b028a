"""A day with everything going wrong: one fault a line, and the same closing checks for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import closing
import pytest
import strikes
from farm import CHECKPOINT_EVERY, Farm, Requests, until
from strikes import BREAK_AT, Scene

from windrow.eventlog import MarkEvent, StepEvent

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

STEPS = 28
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
    """

    strike: Callable[[Scene], None]
    stays: bool = True
    long: bool = True
    ends_decode: bool = False
    steps: int = STEPS


FAULTS = (
    # A worker whose sidecar is silent goes on for SILENT_AFTER_S.
    Fault(strikes.sidecar_hangs, stays=False, long=False, steps=120),
    Fault(strikes.sidecar_hangs_as_the_job_ends, stays=False),
    Fault(strikes.worker_killed, stays=False),
    Fault(strikes.worker_killed_again_and_again, stays=False),
    Fault(strikes.worker_killed_while_it_loads, stays=False),
    Fault(strikes.worker_stalls),
    Fault(strikes.sidecar_killed, stays=False),
    Fault(strikes.sidecar_ended, stays=False),
    Fault(strikes.sidecar_stalls),
    Fault(strikes.other_sidecar_killed, stays=False),
    Fault(strikes.every_sidecar_killed, stays=False),
    Fault(strikes.decode_stalls),
    Fault(strikes.decode_killed, stays=False, ends_decode=True),
    Fault(strikes.operator_hangs),
    Fault(strikes.operator_ended),
    Fault(strikes.operator_killed_twice),
    Fault(strikes.operator_killed_as_another_job_comes),
    Fault(strikes.operator_killed_before_the_end),
    Fault(strikes.sidecar_killed_while_the_operator_hangs, stays=False),
    Fault(strikes.operator_and_sidecar_and_worker_killed, stays=False),
    Fault(strikes.lease_deleted),
    Fault(strikes.lease_stolen),
    Fault(strikes.lease_given_to_nobody),
    Fault(strikes.lease_of_a_clock_that_jumped),
    Fault(strikes.api_server_hangs),
    Fault(strikes.api_server_slow),
    Fault(strikes.etcd_hangs),
    Fault(strikes.etcd_slow),
    Fault(strikes.crds_applied_again),
    Fault(strikes.webhook_registration_deleted),
    Fault(strikes.webhook_registration_points_elsewhere),
    Fault(strikes.slot_deleted),
    Fault(strikes.status_wiped),
    Fault(strikes.job_edited_while_it_runs),
    Fault(strikes.job_annotated),
    Fault(strikes.finalizer_stripped),
    Fault(strikes.policy_switched_off_and_on, stays=False),
    Fault(strikes.policy_deleted_and_made_again, stays=False),
    Fault(strikes.policy_edited),
    Fault(strikes.pod_leaves_its_policy, stays=False),
    Fault(strikes.another_job_for_the_destination),
    Fault(strikes.jobs_that_fit_nowhere),
    Fault(strikes.malformed_specs),
    Fault(strikes.another_namespace_deleted),
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
    farm.begin_events_anew()
    farm.submit(name, fault.steps)
    try:
        _survives(farm, fault, name, record_property)
    finally:
        # Whatever it was that went wrong, the next fault meets no worker of this one.
        farm.client.delete(name)
        until("the job is gone", lambda: name not in {job.name for job in farm.client.jobs()})
        until("its worker is gone", lambda: not farm.workers())


def _survives(
    farm: Farm, fault: Fault, name: str, record_property: Callable[[str, object], None]
) -> None:
    job = farm.at_step(name, BREAK_AT)
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
    for pod in farm.pods.decodes:
        events = farm.served(pod.name, since.get(pod.name, 0))
        closing.assert_kept_pace(events, farm.objective_ms)
        closing.assert_alone(events, len(pod.device.cores))
    # Nothing ran twice; what was done before a checkpoint was not done again.
    tasklets = [event for _, event in farm.tasklets(job.uid)]
    closing.assert_ran_once(tasklets)
    closing.assert_went_on(tasklets, fault.steps, CHECKPOINT_EVERY)
    assert farm.finished_steps(job.uid).count(2) == 1
    assert (after.epoch == job.epoch) is fault.stays


def _serves_alone(events: Sequence[StepEvent | MarkEvent]) -> bool:
    """Whether decode has taken some steps since its worker was gone, and lends nothing any more."""
    since_ns = closing.gone_ns(events)
    if since_ns is None:
        return False
    after = [e for e in events if isinstance(e, StepEvent) and e.start_ns > since_ns]
    return len(after) > STEPS_ALONE and after[-1].chunks_lent == 0
