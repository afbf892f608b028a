"""Passes of the operator's driver: others write meanwhile, and jobs that wait ask for nothing."""

import asyncio
from datetime import UTC, datetime

import pytest
from operator_process import Cluster, install_crds

from windrow.proto import attach_pb2 as pb
from windrow_operator import reports
from windrow_operator.cluster_state import ClusterState
from windrow_operator.driver import Driver
from windrow_operator.events import Recorder
from windrow_operator.kube import ApiError, Kube
from windrow_operator.metrics import Metrics
from windrow_operator.reconcile import Timeouts


class InterruptedKube(Kube):
    """The real client; calls `meanwhile` once, before the first status that is written."""

    meanwhile = None
    refused = ""  # what the name of an object ends with whose status may not be written

    async def replace(self, path, body):
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        if self.refused and path.endswith(f"/{self.refused}/status"):
            self.on_call("PUT", path, 403, 0.0)
            raise ApiError(403, "a webhook of the cluster refuses it", retry_after_s=60.0)
        return await super().replace(path, body)


@pytest.fixture
def objects(kube, namespace):
    """A Cluster without an operator process."""
    install_crds(kube)
    return Cluster(kube, namespace, operator=None)


@pytest.fixture
async def server(control_plane):
    """An InterruptedKube."""
    server = await InterruptedKube.connect(control_plane.kubeconfig)
    yield server
    await server.close()


def now():
    return datetime.now(UTC)


def driver_of(cluster, server):
    recorder = Recorder(server, now)
    return Driver(cluster, server, recorder, Metrics(), timeouts=Timeouts(), clock=now)


def with_slot(cluster, objects):
    """Let the world hold a slot that takes any job."""
    cluster.put_policy(objects.policy(access={}))
    pod = objects.pod()
    body = {"metadata": {**pod.metadata.to_dict(), "namespace": objects.namespace}}
    body["metadata"].pop("deletion_timestamp")
    known = cluster.put_pod(body)
    slots = [pb.SlotFacts(index=0, model="/m", compute_units=2, max_jobs=4, output_trees=["/out"])]
    reports.take_hello(cluster, known, pb.SidecarHello(slots=slots), now(), first=True)
    (live,) = cluster.slots.values()
    reports.take_heartbeat(cluster, live, pb.SlotHeartbeat(engine_state="serving"), now())
    return cluster


async def test_a_decision_on_a_version_that_is_no_longer_the_newest_is_not_carried_out(
    objects, server
):
    cluster = with_slot(ClusterState(now()), objects)
    cluster.put_job(objects.job("first"))
    driver = driver_of(cluster, server)

    def suspend():
        objects.patch_job("first", suspend=True)
        cluster.put_job(objects.get("finetunejobs", "first"))  # as the watch brings it

    server.meanwhile = suspend
    await driver.turn()
    assert "epoch" not in objects.status("first")

    # Its place is free again.
    cluster.put_job(objects.job("second"))
    await driver.turn()
    assert objects.status("first")["state"] == "Suspended"
    assert "epoch" not in objects.status("first")
    assert objects.status("second")["epoch"] == 1


async def test_jobs_whose_steps_overlap_never_get_more_of_a_slot_than_it_takes(objects, server):
    cluster = with_slot(ClusterState(now()), objects)
    for number in range(12):
        cluster.put_job(objects.job(f"job-{number}"))
    await driver_of(cluster, server).turn()
    placed = [name for name in range(12) if objects.status(f"job-{name}").get("epoch")]
    assert len(placed) == 4, "as many as the slot says"


async def test_a_policy_deleted_while_another_is_written_does_not_end_the_pass(objects, server):
    cluster = ClusterState(now())
    for name in ("one", "two"):
        cluster.put_policy(objects.policy(name))
    server.meanwhile = lambda: cluster.drop_policy(f"{objects.namespace}/two")
    await driver_of(cluster, server).turn()
    assert objects.get("harvestpolicies", "one")["status"]["pods"] == 0
    assert "status" not in objects.get("harvestpolicies", "two")


_SECRET = {"name": "nobody-made-it"}
_WAITS = {
    "no slot takes it": {"output": {"destination": "/elsewhere/adapter"}},
    "its Secret is not there": {
        "dataset": {"source": "s3://b/rows.jsonl", "format": "text", "secretRef": _SECRET}
    },
    "it is suspended": {"suspend": True},
    "its destination is another's": {"output": {"destination": "/out/first"}},
    "its priority class is not there": {"priorityClassName": "nobody-made-this"},
    "its status may not be written": {},
}


@pytest.mark.parametrize("reason", list(_WAITS))
async def test_a_job_that_waits_asks_the_api_server_for_nothing(objects, server, reason):
    cluster = with_slot(ClusterState(now()), objects)
    driver = driver_of(cluster, server)
    first = objects.job("first", suspend=True, output={"destination": "/out/first"})
    cluster.put_job(first)
    cluster.put_job(objects.job("waits", **_WAITS[reason]))
    server.refused = "waits" if reason == "its status may not be written" else ""
    for _ in range(5):  # finalizer, status and event are written
        await driver.turn()
    assert not objects.get("finetunejobs", "waits").get("status", {}).get("epoch")
    calls = []
    server.on_call = lambda method, path, *_: calls.append((method, path))
    for _ in range(30):
        await driver.turn()
    assert calls == []


async def test_a_job_without_its_secret_keeps_no_other_base_from_the_slot(objects, server):
    cluster = with_slot(ClusterState(now()), objects)
    cluster.put_job(objects.job("nosecret", **_WAITS["its Secret is not there"]))
    driver = driver_of(cluster, server)
    for _ in range(3):
        await driver.turn()
    assert objects.condition("Placed", "nosecret")["reason"] == "SecretUnreadable"
    reading, placed = server.get, asyncio.Event()

    async def slow(path):
        if "/secrets/" in path:
            await asyncio.wait_for(placed.wait(), 20)
        return await reading(path)

    async def writing(path, body):
        written = await Kube.replace(server, path, body)
        if path.endswith("/other/status"):
            placed.set()
        return written

    # The Secret of one more job is being read while another job comes.
    server.get, server.replace = slow, writing
    cluster.put_job(objects.job("reads", **_WAITS["its Secret is not there"]))
    cluster.put_job(objects.job("other", model={"name": "/another"}))
    await driver.turn()
    assert objects.status("other")["epoch"] == 1
