"""Check what the operator lists: all of it, within its namespaces, and what a watch has missed."""

import copy
from datetime import UTC, datetime

import pytest
from operator_process import Cluster, install_crds

from windrow_operator import resync
from windrow_operator.cluster_state import ClusterState
from windrow_operator.kube import Kube
from windrow_operator.resync import Resync


@pytest.fixture
def objects(kube, namespace):
    """A Cluster without an operator process."""
    install_crds(kube)
    return Cluster(kube, namespace, operator=None)


@pytest.fixture
async def server(control_plane, monkeypatch):
    """A client of the API server; a watch has a moment to tell what it knows."""
    monkeypatch.setattr(resync, "_TOLD_WITHIN_S", 0.05)
    server = await Kube.connect(control_plane.kubeconfig)
    yield server
    await server.close()


def ghost_of(body, uid="gone"):
    """Return an object that the API server no longer has."""
    ghost = copy.deepcopy(body)
    ghost["metadata"] |= {"uid": uid, "name": "gone"}
    return ghost


def known(cluster, namespace):
    jobs = {b["metadata"]["name"] for b in cluster.jobs.values() if of(b, namespace)}
    policies = {b["metadata"]["name"] for b in cluster.policy_bodies.values() if of(b, namespace)}
    pods = {pod.name for pod in cluster.pods.values() if pod.namespace == namespace}
    return jobs, policies, pods


def of(body, namespace):
    return body["metadata"]["namespace"] == namespace


async def missed(compared):
    """Compare once; the count of namespaces is left out, since other tests make and end some."""
    return {kind: n for kind, n in (await compared.compare()).items() if kind != "namespaces"}


async def test_deletes_that_no_watch_told_of_are_found(objects, server):
    cluster = ClusterState(datetime.now(UTC))
    job, policy = objects.job(), objects.policy()
    objects.create_pod("decode-0", {"windrow.dev/decode": "true"})
    compared = Resync(server, cluster, (objects.namespace,))
    await compared.run()
    everything = ({"tone"}, {"chat"}, {"decode-0"})
    assert known(cluster, objects.namespace) == everything
    assert await missed(compared) == {}

    cluster.put_job(ghost_of(job))
    cluster.put_policy(ghost_of(policy))
    (pod,) = cluster.pods.values()
    cluster.pods["gone"] = pod
    assert await missed(compared) == {"pods": 1, "harvestpolicies": 1, "finetunejobs": 1}
    assert known(cluster, objects.namespace) == everything
    assert set(cluster.pods) == {pod.uid}


async def test_a_change_that_no_watch_told_of_is_found(objects, server):
    cluster = ClusterState(datetime.now(UTC))
    objects.job()
    compared = Resync(server, cluster, (objects.namespace,))
    await compared.run()
    objects.patch_job(suspend=True)
    assert await missed(compared) == {"finetunejobs": 1}
    (body,) = cluster.jobs.values()
    assert body["spec"]["suspend"] is True


async def test_an_older_version_of_a_store_that_was_put_back_ends_no_placement(objects, server):
    now = datetime.now(UTC)
    cluster = ClusterState(now)
    job = objects.job()
    compared = Resync(server, cluster, (objects.namespace,))
    await compared.run()
    newer = copy.deepcopy(job)
    newer["metadata"]["resourceVersion"] = str(int(job["metadata"]["resourceVersion"]) + 1000)
    newer["spec"]["suspend"] = True
    cluster.put_job(newer)
    uid = job["metadata"]["uid"]
    cluster.assign(uid, 1, f"{objects.namespace}/decode-0", now)
    assert await missed(compared) == {"finetunejobs": 1}
    assert not cluster.jobs[uid]["spec"].get("suspend")
    assert cluster.runs[uid].epoch == 1


async def test_only_namespaces_that_are_served_are_listed(objects, server):
    cluster = ClusterState(datetime.now(UTC))
    objects.job()
    await Resync(server, cluster, ("another",)).run()
    assert not cluster.jobs
    assert objects.namespace in cluster.namespaces  # whose labels policies look at


async def test_a_listing_in_pieces_is_whole(objects, server, monkeypatch):
    for i in range(7):
        objects.job(f"tone-{i}")
    monkeypatch.setattr("windrow_operator.kube._PIECE", 3)
    cluster = ClusterState(datetime.now(UTC))
    await Resync(server, cluster, (objects.namespace,)).run()
    assert len(cluster.jobs) == 7
