"""Check what jobs have had under a policy: of today, by namespace, and after a restart."""

from datetime import UTC, datetime, timedelta

from windrow_operator.cluster_state import ClusterState
from windrow_operator.policies import PolicyCounts, status_of

NOW = datetime(2025, 1, 1, 12, 0, tzinfo=UTC)


def policy(status=None):
    return {
        "metadata": {
            "namespace": "team",
            "name": "chat",
            "uid": "p",
            "resourceVersion": "1",
            "creationTimestamp": "2025-01-01T00:00:00Z",
        },
        "spec": {"selector": {}, "objective": {"tpot": "1s"}, "mode": "harvest"},
        "status": status or {},
    }


def test_jobs_that_share_a_device_share_its_seconds():
    cluster = ClusterState(NOW)
    cluster.usage.charge("team/chat", 10, ["a", "b"], NOW)
    cluster.usage.charge("team/chat", 10, ["a", "a"], NOW)
    usage = cluster.usage.today("team/chat", NOW)
    assert (usage.seconds, usage.by_namespace) == (20, {"a": 15, "b": 5})
    assert cluster.usage.today("team/chat", NOW + timedelta(days=1)).by_namespace == {}


def test_another_leader_goes_on_from_the_status():
    first, second = ClusterState(NOW), ClusterState(NOW)
    first.put_policy(policy())
    first.usage.charge("team/chat", 10, ["a", "b"], NOW)
    usage = first.usage.today("team/chat", NOW)
    written = status_of(first.policies["team/chat"], PolicyCounts(), usage, (), NOW)
    assert written["usage"]["namespaces"] == [
        {"namespace": "a", "gpuSeconds": 5.0},
        {"namespace": "b", "gpuSeconds": 5.0},
    ]
    second.put_policy(policy(written))
    assert second.usage.today("team/chat", NOW) == usage
