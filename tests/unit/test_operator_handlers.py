"""Check what the operator makes of the changes that kopf tells it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from windrow.crd import ANNOTATION_INJECTED_BY, LABEL_DECODE
from windrow_operator.cluster_state import ClusterState
from windrow_operator.handlers import Handlers, Watching
from windrow_operator.metrics import Metrics

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)


def pod_body(uid="pod-1", **annotations):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "team",
            "name": "decode-0",
            "uid": uid,
            "labels": {LABEL_DECODE: "true"},
            "annotations": {ANNOTATION_INJECTED_BY: "arguments"} | annotations,
        },
        "spec": {"containers": [{"name": "decode", "image": "none"}]},
    }


@pytest.fixture
def cluster():
    return ClusterState(NOW)


@pytest.fixture
def said():
    return []


@pytest.fixture
def handlers(cluster, said):
    async def note(body, event):
        said.append((body["metadata"]["uid"], event.reason))

    return Handlers(Watching(cluster, Metrics(), lambda: None, note))


@pytest.mark.parametrize("how", ["ADDED", "MODIFIED", None])
async def test_an_injected_pod_is_told_once_however_it_comes(handlers, said, how):
    """kopf lists without a type, and of two changes that come close together tells the second."""
    for kind in (how, "MODIFIED", None):
        await handlers.pod({"type": kind, "object": pod_body()})
    assert said == [("pod-1", "Injected")]


async def test_pods_of_before_a_restart_are_not_told_again(cluster, said):
    cluster.put_pod(pod_body())

    async def note(body, event):
        said.append(event)

    again = Handlers(Watching(cluster, Metrics(), lambda: None, note))
    await again.pod({"type": None, "object": pod_body()})
    assert said == []


async def test_a_pod_that_is_gone_leaves_nothing_behind(handlers, cluster, said):
    await handlers.pod({"type": "ADDED", "object": pod_body()})
    await handlers.pod({"type": "DELETED", "object": pod_body()})
    assert cluster.pods == {}
    await handlers.pod({"type": "ADDED", "object": pod_body("pod-2")})
    assert [uid for uid, _ in said] == ["pod-1", "pod-2"]


def test_a_pod_that_is_told_of_again_in_the_same_version_concerns_nobody(cluster):
    """A new leader is told of thousands three times."""
    body = pod_body()
    body["metadata"]["resourceVersion"] = "7"
    first = cluster.put_pod(body)
    cluster.changed_pods.take("driver")
    cluster.changed_slots.take("driver")
    assert cluster.put_pod(body) is first
    assert not cluster.changed_pods.waits("driver")
    assert not cluster.changed_slots.waits("driver")
    body["metadata"] |= {"resourceVersion": "8", "labels": {"app": "chat"}}
    assert cluster.put_pod(body).labels == {"app": "chat"}
    assert cluster.changed_pods.waits("driver")
