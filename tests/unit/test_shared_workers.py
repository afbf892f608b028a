"""A worker process serves one namespace, unless the policy lets several share it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from windrow.access import NetworkAccess
from windrow.conditions import Reason
from windrow.errors import UserError
from windrow.proto import attach_pb2 as pb
from windrow.proto.agent_pb2 import WorkerCommand
from windrow.protocol import JobProgress
from windrow_sidecar import finetune
from windrow_sidecar.agent.slot_jobs import SlotJobs
from windrow_sidecar.finetune.colocated.agent_link import JobAgentLink, worker_hello
from windrow_sidecar.finetune.colocated.standby import JobOrder
from windrow_sidecar.finetune.data.network_guard import NetworkGuard, SourceRefused
from windrow_sidecar.finetune.data.places import find_files
from windrow_sidecar.finetune.data.remote import NO_CREDENTIALS, Credentials, open_file_system
from windrow_sidecar.finetune.data.source_access import SourceAccess


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


# What jobs of several namespaces have in common where the policy lets them share a worker
# (docs/operations/security.md): each test is a sentence there.


def test_each_client_of_a_store_is_made_for_one_job_with_its_own_secret():
    secrets = [
        Credentials(f"of-{n}", {"AWS_ACCESS_KEY_ID": n, "AWS_SECRET_ACCESS_KEY": n}) for n in "ab"
    ]
    made = [open_file_system("s3://b/x", each) for each in (*secrets, secrets[0], NO_CREDENTIALS)]
    assert len(set(map(id, made))) == 4
    assert [each.key for each in made] == ["a", "b", "a", None]


def test_a_stream_brings_the_secrets_of_its_own_job_alone(tmp_path):
    links = [JobAgentLink(tmp_path, worker_hello(JobOrder(n, 1), 1), JobProgress) for n in "ab"]
    for link, token in zip(links, "ab", strict=True):
        link._hear(WorkerCommand(action="CREDENTIALS", output_secret={"HF_TOKEN": token}))
    assert [link.credentials()[1]["HF_TOKEN"] for link in links] == ["a", "b"]


def test_no_job_changes_the_environment_of_a_worker():
    """Variables are set before a job is read, or in a process that serves one job."""
    changes = re.compile(
        r"environ(\[[^\]]+\] = |\.(setdefault|update|pop)\()|putenv|unsetenv|del os\.environ"
    )
    package = Path(finetune.__file__).parent
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if changes.search(file.read_text())
    }
    found = {name for name in found if not name.startswith("in_engine/")}  # as the engine starts
    assert found == {
        "worker.py",  # as it is imported
        "adapter/layer_compiler.py",  # where compiled code is kept: the same for every job
        "data/readers.py",  # a process that reads the rows of one job
        "job/tracking_client.py",  # a process that reports one job
        "job/scalars.py",  # how much TensorBoard's library writes
    }


def test_the_network_of_a_shared_worker_is_that_of_all_its_jobs_until_each_has_ended():
    """Rows are read by a process of one job; models, destinations and checkpoints are not."""
    guard, inside = NetworkGuard({}), ("127.0.0.1", 443)
    guard.admit("theirs", NetworkAccess(sources=("storage.example",)))
    with pytest.raises(SourceRefused):
        guard.check(inside)
    guard.admit("mine", NetworkAccess(sources=("127.0.0.1",)))
    guard.check(inside)
    guard.forget("mine")
    with pytest.raises(SourceRefused):
        guard.check(inside)


def test_a_job_names_no_file_by_the_access_of_another_one(tmp_path):
    for namespace in ("bank", "evil"):
        (tmp_path / namespace).mkdir()
        (tmp_path / namespace / "rows.jsonl").write_text("{}\n")
    of = {name: SourceAccess((tmp_path / name,)) for name in ("bank", "evil")}
    place = str(tmp_path / "bank" / "rows.jsonl")
    for reads in ("bank", "evil", "bank"):
        if reads == "bank":
            assert find_files(place, access=of[reads])
            continue
        with pytest.raises(UserError):
            find_files(place, access=of[reads])
