"""No job is placed on a node that takes no new pods; what runs there goes on."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from windrow_operator.cluster_state import ClusterState
from windrow_operator.model import Slot
from windrow_operator.objects import why_leaving
from windrow_operator.slot_table import capacity_refusal

NOW = datetime(2025, 1, 1, tzinfo=UTC)


def node(version=1, name="n", **spec):
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "spec": spec}


def taint(key):
    return {"taints": [{"key": key, "effect": "NoSchedule"}]}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({}, ""),
        ({"unschedulable": True}, "is cordoned"),
        (taint("nvidia.com/gpu"), ""),
        (taint("DeletionCandidateOfClusterAutoscaler"), ""),
        (taint("ToBeDeletedByClusterAutoscaler"), "has the taint ToBeDeletedByClusterAutoscaler"),
        (taint("karpenter.sh/disrupted"), "has the taint karpenter.sh/disrupted"),
        (taint("node.kubernetes.io/unreachable"), "has the taint node.kubernetes.io/unreachable"),
    ],
)
def test_a_node_says_whether_it_goes_away(spec, why):
    assert why_leaving(node(**spec)) == why


def test_a_node_that_is_deleted_goes_away():
    body = node()
    body["metadata"]["deletionTimestamp"] = "2025-01-01T00:00:00Z"
    assert why_leaving(body) == "is being deleted"


def test_a_slot_on_a_cordoned_node_takes_no_job():
    assert capacity_refusal(Slot("a/b", node="n")) == ""
    refused = capacity_refusal(Slot("a/b", node="n", node_leaving="is cordoned"))
    assert refused == "is on node n, which is cordoned"


def test_slots_are_looked_at_again_when_their_node_is_cordoned_and_when_it_comes_back():
    state = ClusterState(NOW)
    for name in ("here", "elsewhere"):
        metadata = {"namespace": "d", "name": name, "uid": name, "resourceVersion": "1"}
        state.put_pod({"metadata": metadata, "spec": {"nodeName": name, "containers": []}})
    state.put_node(node(1, "here"))
    taken = state.changed_slots.take("driver")
    state.put_node(node(2, "here"))  # a heartbeat
    assert not state.changed_slots.take("driver")
    state.put_node(node(3, "here", unschedulable=True))
    assert set(state.changed_slots.take("driver")) == {"d/here"}
    state.put_node(node(2, "here"))  # late
    assert state.leaving_nodes == {"here": "is cordoned"}
    state.put_node(node(4, "here"))
    assert state.leaving_nodes == {}
    state.put_node(node(5, "here", unschedulable=True))
    state.drop_node("here")
    assert (state.leaving_nodes, state.nodes) == ({}, {})
    assert taken is not None
