"""A day with everything going wrong: one fault a line, and the same closing checks for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import strikes
from farm import Farm, Requests, until
from strikes import BREAK_AT, Scene

pytestmark = [pytest.mark.alone, pytest.mark.timeout(420)]

STEPS = 28


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    Attributes:
        strike: what is done.
        stays: whether the job keeps its placement.
        long: whether only `make e2e` does it.
    """

    strike: Callable[[Scene], None]
    stays: bool = True
    long: bool = True


FAULTS = (
    Fault(strikes.sidecar_hangs, stays=False, long=False),
    Fault(strikes.worker_killed, stays=False),
    Fault(strikes.worker_killed_again_and_again, stays=False),
    Fault(strikes.worker_stalls),
    Fault(strikes.sidecar_killed, stays=False),
    Fault(strikes.sidecar_stalls),
    Fault(strikes.other_sidecar_killed),
    Fault(strikes.every_sidecar_killed, stays=False),
    Fault(strikes.decode_stalls),
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
