"""A local cluster has control plane, operator and node, and ends without a trace."""

import os
import signal

import pytest
from kubernetes import client, config
from waiting import processes_below, wait_until

from windrow_lab.cluster.local import ClusterError, ClusterSettings, LocalCluster


@pytest.fixture(scope="module")
def cluster(tools, tmp_path_factory):
    before = processes_below()
    settings = ClusterSettings(
        tools=tools.etcd.parent, log_dir=tmp_path_factory.mktemp("logs"), node_name="laptop"
    )
    with LocalCluster(settings) as running:
        yield running
    assert processes_below() <= before
    assert not running.kubeconfig.exists()


@pytest.fixture
def api(cluster):
    with config.new_client_from_config(str(cluster.kubeconfig)) as found:
        yield found


def test_our_resources_are_served_and_the_node_is_ready(cluster, api):
    custom = client.CustomObjectsApi(api)
    for plural in ("finetunejobs", "harvestpolicies", "harvestslots", "latencyprofiles"):
        listed = custom.list_cluster_custom_object("windrow.dev", "v1alpha1", plural)
        assert listed["items"] == []
    node = client.CoreV1Api(api).read_node("laptop")
    assert {c.type: c.status for c in node.status.conditions}["Ready"] == "True"
    assert not node.spec.taints


def test_a_decode_pod_is_prepared_and_what_it_logs_is_in_the_log_directory(cluster, api):
    core = client.CoreV1Api(api)
    pod = {
        "metadata": {"name": "decode-0", "labels": {"windrow.dev/inject": "enabled"}},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {"name": "decode", "image": "none", "command": ["sh", "-c", "echo up; sleep 600"]}
            ],
        },
    }
    created = core.create_namespaced_pod("default", pod)
    assert "windrow-run" in {volume.name for volume in created.spec.volumes}, "the webhook's"
    log = cluster.log_dir / "default_decode-0" / "decode.log"
    wait_until(lambda: log.exists() and log.read_text() == "up\n", "the container runs")
    core.delete_namespaced_pod("decode-0", "default")


def test_an_operator_that_is_killed_runs_again(cluster):
    first = cluster.operator.child.pid
    os.kill(first, signal.SIGKILL)
    wait_until(
        lambda: cluster.operator.child.pid != first and cluster.operator.child.poll() is None,
        "another operator",
    )
    assert cluster.operator.restarts == 1


def test_an_operator_that_cannot_start_is_shown_by_its_log(tools, tmp_path):
    before = processes_below()
    settings = ClusterSettings(
        tools=tools.etcd.parent, log_dir=tmp_path, operator_arguments=("--no-such-flag",)
    )
    with pytest.raises(ClusterError, match="no-such-flag"):
        LocalCluster(settings).start()
    assert processes_below() <= before
