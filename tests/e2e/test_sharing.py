"""Jobs on one base share the only slot there is, and each comes and goes for itself.

At the end the pod is replaced, and the new one starts from what the first has measured.
"""

from __future__ import annotations

import re

import pytest
from farm import NAMESPACE, Farm, Requests, until
from kubernetes import client as k8s

pytestmark = [
    pytest.mark.paired,
    pytest.mark.extended,
    pytest.mark.timeout(420),  # a first build of the API server included
]

PODS = 1
PROFILES = "windrow-latency-profiles"
STEPS = 24
WITHOUT_AN_END = 4000


def test_two_jobs_share_the_slot_and_both_succeed(farm: Farm):
    names = ("tone", "code")
    with Requests(farm.endpoint("decode-0")) as requests:
        jobs = [farm.submit(name, STEPS) for name in names]
        running = [farm.at_step(name, 2) for name in names]
        (worker,) = farm.workers()
        assert {job.slot for job in running} == {running[0].slot}
        ended = [farm.succeeded(name) for name in names]

    assert requests.failures == []
    assert requests.answered > 0
    assert [job.epoch for job in ended] == [1, 1], "neither was placed twice"
    # In turns: neither waited for the end of the other.
    tone, code = (_ends_of_steps(farm, job.uid) for job in jobs)
    assert tone[0] < code[-1]
    assert code[0] < tone[-1]
    for job in jobs:
        assert farm.finished_steps(job.uid) == list(range(STEPS))
    until("the worker ends", lambda: not worker.is_running())
    until("its chunks came home", lambda: farm.lent_chunks("decode-0") == 0)


def test_a_job_that_is_deleted_in_the_middle_leaves_the_other_going(farm: Farm):
    stays = farm.submit("stays", WITHOUT_AN_END)
    farm.at_step(stays.name, 1)
    (worker,) = farm.workers()
    goes = farm.submit("goes", WITHOUT_AN_END)
    farm.at_step(goes.name, 2)
    before = farm.job(stays.name)

    farm.client.delete(goes.name)
    until("it is gone", lambda: goes.name not in {job.name for job in farm.client.jobs()})
    farm.at_step(stays.name, before.step + 4)

    after = farm.job(stays.name)
    assert (after.epoch, after.slot) == (before.epoch, before.slot)
    assert worker.is_running()
    steps = farm.finished_steps(stays.uid)
    assert steps == sorted(set(steps)), "no step was computed twice"

    farm.client.delete(stays.name)
    until("no worker is left", lambda: not farm.workers())
    until("its chunks came home", lambda: farm.lent_chunks("decode-0") == 0)


def test_a_new_pod_starts_from_the_latency_profile_that_the_first_has_measured(farm: Farm):
    core = k8s.CoreV1Api(farm.client.api)
    until("its namespace has the profile", lambda: PROFILES in _config_maps(core))
    farm.renew("decode-0")
    log = (farm.cluster.log_dir / f"{NAMESPACE}_decode-0" / "decode.log").read_text()
    # Whether it bears it out is the machine's matter: a noisy one measures again.
    assert re.search(r"profile( in|: reused from) \S+/windrow-profiles/\w+\.json", log)


def _config_maps(core: k8s.CoreV1Api) -> set[str]:
    return {m.metadata.name for m in core.list_namespaced_config_map(NAMESPACE).items}


def _ends_of_steps(farm: Farm, uid: str) -> list[int]:
    """Return when each optimizer step ended, ns."""
    return [event.end_ns for _, event in farm.tasklets(uid) if event.phase == "opt"]
