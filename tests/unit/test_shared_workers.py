"""A worker process serves one namespace, unless the policy lets several share it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from windrow.conditions import Reason
from windrow.proto import attach_pb2 as pb
from windrow_sidecar.agent.slot_jobs import SlotJobs


class Outbox:
    """Keeps what is added to it."""

    def __init__(self):
        self.events = []

    async def add(self, event):
        self.events.append(event)

    def placed_again(self, uid, epoch):
        pass


def assign(namespace, name, *, shares=None):
    access = None if shares is None else pb.Access(shares_worker=shares)
    return pb.Assign(job_namespace=namespace, job_name=name, job_uid=name, epoch=1, access=access)


def run_of(order, ended=None):
    def is_of(uid, epoch):
        return (uid, epoch) == (order.job_uid, order.epoch)

    return SimpleNamespace(assign=order, ended=ended, is_of=is_of)


async def offered(order, *runs, most=4):
    """Return what a slot says whose worker has these runs; None: the worker took it."""
    outbox, taken = Outbox(), []
    jobs = SlotJobs(
        None,
        0,
        outbox,
        None,
        refuses_all=lambda: None,
        max_jobs=lambda: most,
        worker_changed=lambda: None,
        why_paused=str,
    )

    async def take(run):
        taken.append(run)

    jobs.runs = list(runs)
    jobs._supervisor = SimpleNamespace(runs=list(runs), takes_more=True, take=take)
    jobs._make_run = lambda order, *_, **__: run_of(order)
    await jobs.assign(order)
    if taken:
        assert not outbox.events
        return None
    (event,) = outbox.events
    assert (event.kind, event.reason) == (pb.JobEvent.REJECTED, str(Reason.BUSY))
    return event.detail


@pytest.mark.parametrize(("mine", "theirs"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("ended", [None, "Succeeded"])
def test_a_job_joins_no_worker_of_another_namespace(mine, theirs, ended):
    other = run_of(assign("blue", "secret", shares=theirs), ended)
    own = run_of(assign("red", "first", shares=mine))
    said = asyncio.run(offered(assign("red", "tone", shares=mine), other, own))
    assert "serves another namespace" in said
    assert "secret" not in said
    assert "blue" not in said


@pytest.mark.parametrize("shares", [True, None])
def test_a_job_joins_where_the_policy_lets_namespaces_share(shares):
    other = run_of(assign("blue", "other", shares=shares))
    assert asyncio.run(offered(assign("red", "tone", shares=shares), other)) is None


def test_jobs_of_one_namespace_share_a_worker_whatever_the_policy_says():
    other = run_of(assign("red", "other", shares=False))
    assert asyncio.run(offered(assign("red", "tone", shares=False), other)) is None


def test_a_full_slot_names_no_job_of_another_namespace():
    runs = [run_of(assign("blue", "secret", shares=True)), run_of(assign("red", "mine"))]
    said = asyncio.run(offered(assign("red", "tone"), *runs, most=2))
    assert said == "slot 0 runs job mine"
    said = asyncio.run(offered(assign("red", "tone"), runs[0], most=1))
    assert said == "slot 0 runs a job of another namespace"
