"""Harvesting is turned off beside an operator and without one, to the last tasklet."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from farm import POLICY, Farm, until

from windrow.off import ClusterSwitch
from windrow.rundir import ENV_RUN_DIR, RunDir
from windrow_lab.cluster import manifests

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(420),  # a first build of the API server included
]

PODS = 1
LEASE_S = 5.0
WITHOUT_AN_END = 4000
NAMESPACE = "windrow-system"


@pytest.fixture
def leased(farm: Farm):
    """The farm, whose policy is a lease of seconds."""
    farm.client.apply_policy(policy_of(farm, lease=f"{LEASE_S:g}s"))
    return farm


def policy_of(farm: Farm, **spec: object) -> dict[str, object]:
    made = manifests.harvest_policy(POLICY, farm.objective_ms, "windrow")
    made["spec"].update(spec)
    return made


def at_work(farm: Farm, name: str):
    job = farm.submit(name, WITHOUT_AN_END)
    farm.at_step(name, 2)
    return job


def last_tasklet_s(farm: Farm, uid: str, since_ns: int) -> float:
    """Wait for the worker's end; return seconds from `since_ns` to the end of the last tasklet."""
    until("the worker ends", lambda: not farm.workers())
    ends = [event.end_ns for _, event in farm.tasklets(uid)]
    assert ends, "tasklets were logged"
    return max(0.0, (max(ends) - since_ns) / 1e9)


def test_the_last_tasklet_comes_soon_after_the_command_with_and_without_an_operator(
    leased: Farm, record_property
):
    farm, switch = leased, ClusterSwitch(leased.client, NAMESPACE)
    took = {}

    # The operator lives: from the command to the last tasklet.
    job = at_work(farm, "alive")
    began = time.monotonic_ns()
    assert switch.turn_off("a test")
    assert switch.wait(60)
    took["alive"] = last_tasklet_s(farm, job.uid, began)
    switch.turn_on()
    farm.at_step("alive", 3, epoch=2, checkpoint=1)

    # Frozen: it holds its streams and says nothing.
    operator = psutil.Process(farm.cluster.operator.child.pid)
    began = time.monotonic_ns()
    os.kill(operator.pid, signal.SIGSTOP)
    took["frozen"] = last_tasklet_s(farm, job.uid, began)
    assert took["frozen"] <= 60
    os.kill(operator.pid, signal.SIGCONT)
    farm.at_step("alive", 4, epoch=3, checkpoint=2)

    # In the pod, with nothing but the pod.
    run_dir = RunDir(Path(farm.agent("decode-0").environ()[ENV_RUN_DIR]))
    os.kill(operator.pid, signal.SIGSTOP)
    began = time.monotonic_ns()
    subprocess.run(["touch", str(run_dir.off_switch)], check=True)
    took["switch in the pod"] = last_tasklet_s(farm, job.uid, began)
    run_dir.off_switch.unlink()
    os.kill(operator.pid, signal.SIGCONT)

    for name, seconds in took.items():
        record_property(name, f"{seconds:.1f}")
